"""After any pattern of accepted and refused drafts both caches hold what a fresh run over the same tokens puts there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.decoding.blocks import BlockProposer
from stages.decoding.cached_model import CachedModel
from stages.decoding.draft_model import DraftModelProposer
from stages.decoding.proposer import Batch, DecodingError, Observed, Sampling
from stages.drafters.draft import greedy_drafts
from tests.decoding.loops import SHAPES, K, Pair

pytestmark = pytest.mark.usefixtures("one_thread")

CAPACITY = 64
HISTORY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def histories(draw: Any) -> tuple[list[list[int]], list[tuple[list[int], int | None, bool]], int]:
    """Prompts, and rounds of (accepted per row, row that ends or None, are drafts asked for), and a seed."""
    rows = draw(st.integers(1, 4))
    prompts = [draw(st.lists(st.integers(4, 499), min_size=1, max_size=9)) for _ in range(rows)]
    rounds = []
    for _ in range(draw(st.integers(1, 5))):
        ends = draw(st.none() | st.integers(0, rows - 1)) if rows > 1 else None
        rounds.append(([draw(st.integers(0, K)) for _ in range(rows)], ends, draw(st.booleans())))
        rows -= ends is not None
    return prompts, rounds, draw(st.integers(0, 1000))


def close(ours: Tensor, fresh: Tensor) -> None:
    torch.testing.assert_close(ours, fresh, rtol=1e-3, atol=1e-3)


@HISTORY
@given(history=histories())
def test_a_rewound_cache_equals_a_fresh_one(pair: Pair, history: Any) -> None:
    prompts, rounds, seed = history
    generator = torch.Generator().manual_seed(seed)
    model = CachedModel(pair.model, (2, 6))
    model.begin(len(prompts), CAPACITY)
    states: list[Tensor] = list(model.read_prompts(prompts).states)  # type: ignore[arg-type]
    states = [part[: len(prompt)] for part, prompt in zip(states, prompts, strict=True)]
    texts = [list(prompt) for prompt in prompts]
    for accepted, ends, _ in rounds:
        new = torch.randint(4, 500, (len(texts), K + 1), generator=generator)
        read = model.read(new)
        assert read.states is not None
        model.rewind([len(text) + count + 1 for text, count in zip(texts, accepted, strict=True)])
        for row, count in enumerate(accepted):
            texts[row] += new[row, : count + 1].tolist()
            states[row] = torch.cat([states[row], read.states[row, : count + 1]])
        if ends is not None:
            keep = [row for row in range(len(texts)) if row != ends]
            model.keep(torch.tensor(keep))
            texts, states = [texts[row] for row in keep], [states[row] for row in keep]
    assert model.lengths == [len(text) for text in texts]
    fresh = CachedModel(pair.model, (2, 6))
    for row, text in enumerate(texts):
        fresh.begin(1, CAPACITY)
        read = fresh.read_prompts([text])
        assert read.states is not None
        close(states[row], read.states[0])
        for layer in range(model.num_layers):
            for ours, theirs in zip(model.cache.keys_values(layer, row), fresh.cache.keys_values(layer, 0), strict=True):
                close(ours, theirs)


def drive(proposer: Any, history: Any, width: int) -> tuple[list[list[int]], list[Tensor]]:
    """Run a proposer through a history in which given numbers of its drafts are accepted; returns committed tokens and states of each row.

    width: of the hidden states, which are random but fixed per position.
    """
    prompts, rounds, seed = history
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(len(prompts), CAPACITY, width, generator=generator)
    proposer.begin(len(prompts), CAPACITY, Sampling(), None)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), CAPACITY, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
        tokens[row, len(prompt)] = int(torch.randint(4, 500, (), generator=generator))
    longest = int(lengths.max())
    proposer.observe(Observed(tokens[:, :longest], torch.zeros_like(lengths), lengths.clone(), states[:, :longest]))
    lengths = lengths + 1
    for accepted, ends, drafting in rounds:
        anchors = Batch(tokens, lengths).anchors()
        new = torch.randint(4, 500, (len(tokens), K + 1), generator=generator)
        counts = torch.tensor(accepted)
        if drafting:
            proposal = proposer.propose(Batch(tokens, lengths), K)
            # What is accepted is what was drafted; at the first rejection stands another token.
            new[:, :K] = torch.where(torch.arange(K) < counts[:, None], proposal.tokens, (proposal.tokens + 1) % 500)
        else:
            counts = torch.zeros_like(counts)
        slots = lengths[:, None] + torch.arange(K + 1)
        tokens.scatter_(1, slots, new)
        read = torch.cat([anchors[:, None], new[:, :K]], 1)
        starts = lengths - 1
        proposer.observe(Observed(read, starts, counts + 1, states.gather(1, (slots - 1)[..., None].expand(-1, -1, width))))
        lengths = lengths + counts + 1
        if ends is not None:
            index = torch.tensor([row for row in range(len(tokens)) if row != ends])
            tokens, lengths, states = tokens[index], lengths[index], states[index]
            proposer.keep(index)
        assert proposer.positions().tolist() == (lengths - 1).tolist()
    final = proposer.propose(Batch(tokens, lengths), K)
    assert final.lengths.tolist() == [K] * len(lengths)
    texts = [tokens[row, :length].tolist() for row, length in enumerate(lengths.tolist())]
    return [[*text, *drafts] for text, drafts in zip(texts, final.tokens.tolist(), strict=True)], list(states)


@HISTORY
@given(history=histories())
def test_a_draft_models_cache_equals_a_fresh_one_and_its_drafts_are_its_own_greedy_ones(pair: Pair, history: Any) -> None:
    proposer = DraftModelProposer(pair.draft_model, K)
    texts, _ = drive(proposer, history, 1)
    fresh = CachedModel(pair.draft_model)
    for row, text in enumerate(texts):
        logits = pair.draft_model(torch.tensor([text]), use_cache=False).logits[0, -K - 1 : -1]
        assert logits.argmax(-1).tolist() == text[-K:]
        fresh.begin(1, CAPACITY)
        fresh.read_prompts([text[:-1]])
        assert proposer.model.lengths[row] == len(text) - 1
        for layer in range(fresh.num_layers):
            for ours, theirs in zip(proposer.model.cache.keys_values(layer, row), fresh.cache.keys_values(layer, 0), strict=True):
                close(ours, theirs)


@pytest.mark.parametrize("name", SHAPES)
@HISTORY
@given(history=histories())
def test_a_block_drafters_cache_equals_a_fresh_one_and_its_drafts_those_of_one_pass(pair: Pair, name: str, history: Any) -> None:
    proposer = pair.proposer(name)
    assert isinstance(proposer, BlockProposer)
    texts, states = drive(proposer, history, len(proposer.config.layer_ids) * proposer.config.hidden_size)
    for row, text in enumerate(texts):
        position = len(text) - K - 1
        drafts = greedy_drafts(proposer.drafter, states[row][:position], torch.tensor([text[position]]), torch.tensor([position]))
        assert drafts.tokens[0].tolist() == text[-K:]
        context = proposer.drafter.hidden_norm(proposer.drafter.fc(states[row][:position]))
        rope = proposer.drafter._rope(torch.arange(position))
        for layer, store in zip(proposer.layers, proposer._stores, strict=True):
            assert store.keys is not None
            assert store.values is not None
            keys, values = layer.self_attn.keys_values(context, *rope)
            close(store.keys[row, :, :position], keys.transpose(0, 1))
            close(store.values[row, :, :position], values.transpose(0, 1))


def test_a_draft_models_logits_are_those_of_transformers_and_repeat_exactly(pair: Pair) -> None:
    tokens = torch.randint(4, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain = pair.draft_model(tokens, use_cache=False).logits
    runs = []
    for _ in range(2):
        model = CachedModel(pair.draft_model)
        model.begin(2, CAPACITY)
        parts = [model.read_prompts(tokens[:, :30].tolist()).logits]
        parts += [model.read(tokens[:, place : place + 2]).logits for place in range(30, 40, 2)]
        runs.append(torch.cat(parts, 1))
    assert torch.equal(runs[0], runs[1])
    error = (runs[0] - plain[:, 29:]).abs().max() / plain.abs().max()
    assert float(error) < 1e-3


def test_a_cache_is_never_written_past_its_end(pair: Pair) -> None:
    model = CachedModel(pair.model)
    model.begin(1, 4)
    model.read_prompts([[5, 6, 7]])
    with pytest.raises(IndexError, match="a row of 5 tokens in a cache of 4"):
        model.read(torch.tensor([[8, 9]]))
    with pytest.raises(ValueError, match=r"rewind from \[3\] to \[4\]"):
        model.rewind([4])


def test_decoders_leave_no_hooks_in_the_model(pair: Pair) -> None:
    model = CachedModel(pair.model, (2, 6))
    model.begin(1, CAPACITY)
    read = model.read_prompts([[5, 6, 7]])
    assert read.states is not None
    assert read.states.shape == (1, 3, 128)
    assert not [module for module in pair.model.modules() if module._forward_pre_hooks]


def test_what_cannot_be_tapped_or_rewound_is_refused(pair: Pair) -> None:
    with pytest.raises(DecodingError, match="tapped layer 7: the model has layers 1 to 6"):
        CachedModel(pair.model, (2, 7))
    config = pair.model.config
    config.layer_types = ["sliding_attention"] * 6
    try:
        with pytest.raises(DecodingError, match=r"layers \['sliding_attention'\] with sdpa attention; only full sdpa attention"):
            CachedModel(pair.model)
    finally:
        del config.layer_types
