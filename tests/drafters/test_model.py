"""What a block may see, and that drafting left to right is what training was taught."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.drafters.draft import greedy_draft, greedy_drafts
from stages.drafters.layers import block_attention
from stages.drafters.model import Blocks, Drafter, make_segments
from tests.drafters.shapes import KINDS, config, drafter, name_of

LENGTH = 20


def inputs(model: Drafter, lengths: list[int], anchors: list[list[int]], seed: int = 1) -> Blocks:
    g = torch.Generator().manual_seed(seed)
    width = len(model.config.layer_ids) * model.config.hidden_size
    positions = [torch.tensor(a) for a in anchors]
    return Blocks(
        context=torch.randn(sum(lengths), width, generator=g),
        context_positions=torch.cat([torch.arange(n) for n in lengths]),
        anchor_tokens=torch.randint(10, 90, (sum(map(len, anchors)),), generator=g),
        anchor_positions=torch.cat(positions),
        segments=make_segments(lengths, positions),
    )


def test_attention_equals_dense_masked_attention() -> None:
    """The split product over context and block is softmax attention under the dense mask of the definition."""
    g = torch.Generator().manual_seed(0)
    a, i, n, m, d, t = 3, 4, 6, 2, 8, 10
    q, kb, vb = torch.randn(a, i, n, d, generator=g), torch.randn(a, i, m, d, generator=g), torch.randn(a, i, m, d, generator=g)
    kc, vc = torch.randn(t, m, d, generator=g), torch.randn(t, m, d, generator=g)
    mask = torch.arange(t)[None, :] < torch.tensor([0, 3, 10])[:, None]
    dense = torch.cat([mask.repeat_interleave(i, 0), torch.block_diag(*[torch.ones(i, i)] * a).bool()], dim=1)
    keys = torch.cat([kc, kb.reshape(a * i, m, d)]).repeat_interleave(n // m, 1).transpose(0, 1)
    values = torch.cat([vc, vb.reshape(a * i, m, d)]).repeat_interleave(n // m, 1).transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q.reshape(a * i, n, d).transpose(0, 1)[None], keys[None], values[None], dense)
    torch.testing.assert_close(block_attention(q, kb, vb, kc, vc, mask), expected[0].transpose(0, 1).reshape(a, i, n * d))


@torch.no_grad()
def test_blocks_and_sequences_do_not_see_each_other() -> None:
    """A packed batch gives each block what it gets alone: nothing leaks over anchors or document borders."""
    model = drafter(config())
    packed = inputs(model, [LENGTH, 12], [[3, 9, 17], [1, 11]])
    together = model.hidden(packed)
    row = 0
    for start, length, anchors in ((0, LENGTH, [3, 9, 17]), (LENGTH, 12, [1, 11])):
        for anchor in anchors:
            alone = Blocks(
                packed.context[start : start + length],
                torch.arange(length),
                packed.anchor_tokens[row : row + 1],
                torch.tensor([anchor]),
                make_segments([length], [torch.tensor([anchor])]),
            )
            torch.testing.assert_close(model.hidden(alone)[0], together[row], rtol=1e-5, atol=1e-5)
            row += 1


@torch.no_grad()
def test_the_anchor_and_what_follows_it_are_not_context() -> None:
    """At decode time the anchor has no hidden state yet; a training that saw it would not transfer."""
    model = drafter(config())
    blocks = inputs(model, [LENGTH], [[7]])
    before = model.hidden(blocks)
    blocks.context[7:] = 1e3
    assert torch.equal(model.hidden(blocks), before)
    blocks.context[6] += 1.0
    assert not torch.allclose(model.hidden(blocks), before)


@torch.no_grad()
def test_positions_matter_absolutely_within_the_sequence() -> None:
    """Rotary positions are true positions: shifting context and anchor together changes nothing, one of them does."""
    model = drafter(config())
    b = inputs(model, [8], [[8]])
    base = model.hidden(b)
    shifted = Blocks(b.context, b.context_positions + 50, b.anchor_tokens, b.anchor_positions + 50, b.segments)
    torch.testing.assert_close(model.hidden(shifted), base, rtol=1e-4, atol=1e-4)
    apart = Blocks(b.context, b.context_positions, b.anchor_tokens, b.anchor_positions + 50, b.segments)
    assert not torch.allclose(model.hidden(apart), base, atol=1e-3)


def test_casting_the_drafter_keeps_its_positions() -> None:
    """`Drafter.to(bfloat16)` must not round rotary frequencies: it would move every position silently."""
    model = drafter(config())
    before = model._rope(torch.arange(300))
    after = model.to(torch.bfloat16)._rope(torch.arange(300))
    assert torch.equal(before[0], after[0])
    assert after[0].dtype == torch.float32


@pytest.mark.parametrize("changes", KINDS, ids=name_of)
@torch.no_grad()
def test_teacher_forcing_on_the_drafted_chain_reproduces_the_draft(changes: dict[str, Any]) -> None:
    """Training feeds true previous tokens to the Markov head; fed the drafted ones, it gives the drafted logits."""
    model = drafter(config(**changes))
    blocks = inputs(model, [LENGTH], [[4, 13]])
    drafts = greedy_drafts(model, blocks.context, blocks.anchor_tokens, blocks.anchor_positions)
    hidden = model.hidden(blocks)
    logits = hidden @ model.head.T
    if model.markov_head is not None:
        previous = torch.cat([blocks.anchor_tokens[:, None], drafts.tokens[:, :-1]], dim=1)
        logits = logits + model.markov_head.markov_w2(model.markov_head.features(model.markov_head.markov_w1(previous), hidden))
    torch.testing.assert_close(logits, drafts.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.draft_ids[logits.argmax(-1)], drafts.tokens)
    assert drafts.tokens.shape == (2, model.config.draft_tokens)
    single, single_logits = greedy_draft(model, blocks.context, int(blocks.anchor_tokens[1]), 13)
    assert single == drafts.tokens[1].tolist()
    torch.testing.assert_close(single_logits, drafts.logits[1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_planted_chain_is_followed() -> None:
    """With backbone logits silenced, the Markov head alone decides: token after token along the planted bigrams."""
    model = drafter(config())
    assert model.markov_head is not None
    model.head = torch.zeros_like(model.head)
    chain = {10: 11, 11: 12, 12: 40, 40: 41}
    model.markov_head.markov_w1.weight.zero_()
    model.markov_head.markov_w2.weight.zero_()
    for rank, (token, following) in enumerate(chain.items()):
        model.markov_head.markov_w1.weight[token, rank] = 1.0
        model.markov_head.markov_w2.weight[following, rank] = 5.0
    blocks = inputs(model, [6], [[6]])
    assert greedy_draft(model, blocks.context, 10, 6)[0] == [11, 12, 40, 41]
