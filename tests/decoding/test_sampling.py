"""Sampled output has the verifier's distribution: joint distributions over a tiny vocabulary, 200,000 samples each, and proof that the test can fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor

from stages.decoding import sampling as module
from stages.decoding.blocks import BlockProposer
from stages.decoding.cached_model import CachedModel, Read
from stages.decoding.draft_model import DraftModelProposer
from stages.decoding.loop import Decoder
from stages.decoding.ngram import NgramProposer
from stages.decoding.proposer import Draws, Proposal, Proposer, Sampling
from stages.decoding.sampling import distribution, draw, verify_sampled
from stages.decoding.stopping import Prompt
from stages.drafters.model import Drafter
from stages.pairing.frozen import FrozenVerifier
from tests.drafters.shapes import config

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES = 200_000
VOCABULARY = 5
LENGTH = 3

SAMPLINGS = {
    "temperature 1": Sampling(1.0),
    "temperature 0.7, top-p": Sampling(0.7, top_p=0.8),
    "top-k": Sampling(1.3, top_k=3),
    "top-k and top-p": Sampling(1.0, top_k=4, top_p=0.9),
}


@dataclass(frozen=True)
class Fit:
    """How far counts are from the distribution they should have."""

    p_value: float
    total_variation: float
    noise: float
    impossible: int

    @property
    def good(self) -> bool:
        """Held by an exact sampler but once in ten thousand runs; the seeds are fixed, so always or never.

        `noise` is the total variation that so many samples of the right distribution have on average.
        """
        return self.p_value > 1e-4 and self.total_variation < 3 * self.noise and self.impossible == 0


def fit(sequences: Tensor, expected: Tensor) -> Fit:
    """Compare sampled sequences `[N, n]` with the exact joint distribution `[V, …, V]` (n times)."""
    size, length = expected.shape[0], expected.dim()
    cells = (sequences * size ** torch.arange(length - 1, -1, -1)).sum(1)
    counts = torch.bincount(cells, minlength=size**length).double()
    wanted = expected.flatten().double() * len(sequences)
    large = wanted >= 5.0
    statistic = ((counts - wanted)[large] ** 2 / wanted[large]).sum()
    rest, rest_wanted = counts[~large].sum(), wanted[~large].sum()
    freedom = int(large.sum()) - 1
    if rest_wanted >= 5.0:
        statistic += (rest - rest_wanted) ** 2 / rest_wanted
        freedom += 1
    samples = len(sequences)
    # A cell's count is nearly normal, and the mean size of a normal deviation is sqrt(2 / pi) of its standard deviation.
    noise = float((wanted * (1 - wanted / samples)).sqrt().sum()) * math.sqrt(2 / math.pi) / (2 * samples)
    variation = float((counts - wanted).abs().sum()) / (2 * samples)
    return Fit(float(chi2.sf(float(statistic), freedom)), variation, noise, int(counts[wanted == 0].sum()))


def bigram_joint(table: Tensor, first: int, length: int) -> Tensor:
    """Joint `[V] * length` of a chain: `table` `[V, V]` rows are p(next | last)."""
    joint = table[first]
    for _ in range(length - 1):
        joint = joint[..., None] * table
    return joint


Verify = Callable[[Tensor, Proposal, Tensor, Sampling, torch.Generator], tuple[Tensor, Tensor]]


def sampled_chain(sampling: Sampling, verify: Verify, certain: bool = False, seed: int = 0, samples: int = SAMPLES) -> Fit:
    """One round of a bigram verifier with a bigram drafter, continued by the verifier alone, against the verifier's joint distribution.

    Lengths differ from row to row, 0 included. certain: drafts are a fixed chain, as prompt lookup has them.
    """
    generator = torch.Generator().manual_seed(seed)
    p_logits = torch.randn(VOCABULARY, VOCABULARY, generator=generator) * 1.5
    q_logits = p_logits + torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    p = distribution(p_logits, sampling).dense(VOCABULARY)
    q = distribution(q_logits, sampling).dense(VOCABULARY)
    last = torch.zeros(samples, dtype=torch.long)
    drafts, probabilities = [last], []
    for _ in range(LENGTH):
        probabilities.append(q[drafts[-1]])
        drafts.append((drafts[-1] + 2) % VOCABULARY if certain else draw(probabilities[-1], generator))
    tokens, of_slots = torch.stack(drafts[1:], 1), torch.stack(probabilities, 1)
    draws = None if certain else Draws(of_slots, None, of_slots.gather(2, tokens[..., None])[..., 0])
    lengths = torch.randint(0, LENGTH + 1, (samples,), generator=generator)
    accepted, committed = verify(p_logits[torch.stack(drafts, 1)], Proposal(tokens, lengths, draws), lengths, sampling, generator)
    out = [committed[:, 0]]
    for slot in range(1, LENGTH):
        out.append(torch.where(slot <= accepted, committed[:, slot], draw(p[out[-1]], generator)))
    return fit(torch.stack(out, 1), bigram_joint(p, 0, LENGTH))


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_rejection_sampling_has_the_verifiers_distribution(name: str, certain: bool) -> None:
    found = sampled_chain(SAMPLINGS[name], verify_sampled, certain)
    assert found.good, found


def one_slot_late(logits: Tensor, proposal: Proposal, lengths: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Drafts are judged by the verifier's distribution of the position before theirs."""
    return verify_sampled(torch.cat([logits[:, :1], logits[:, :-1]], 1), proposal, lengths, sampling, generator)


def one_too_many(logits: Tensor, proposal: Proposal, lengths: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The rejected draft is kept, and its replacement comes after it."""
    accepted, committed = verify_sampled(logits, proposal, lengths, sampling, generator)
    rows = torch.arange(len(accepted))
    wrong = accepted < lengths
    place = accepted.clamp(max=proposal.tokens.shape[1] - 1)
    committed[rows[wrong], accepted[wrong]] = proposal.tokens[rows, place][wrong]
    return accepted, committed


def one_too_few(logits: Tensor, proposal: Proposal, lengths: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The last draft of a row is never tested: a block accepted so far is taken for rejected there."""
    return verify_sampled(logits, replace(proposal, draws=replace(proposal.draws, drafted=proposal.draws.drafted.roll(1, 1))), lengths, sampling, generator)  # type: ignore[type-var, union-attr]


@pytest.mark.parametrize("name", ["temperature 1", "temperature 0.7, top-p"])
@pytest.mark.parametrize("verify", [one_slot_late, one_too_many, one_too_few])
def test_an_off_by_one_in_acceptance_is_found(verify: Verify, name: str) -> None:
    assert not sampled_chain(SAMPLINGS[name], verify).good


def test_a_wrong_residual_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected draft is replaced from p instead of (p − q)₊: tokens that the drafter likes come too often."""
    monkeypatch.setattr(module, "residual", lambda p, *_: p.probabilities)
    assert not sampled_chain(SAMPLINGS["temperature 1"], verify_sampled).good


def test_a_q_without_the_truncation_that_was_drawn_with_is_found() -> None:
    def untruncated(logits: Tensor, proposal: Proposal, lengths: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        assert proposal.draws is not None
        softened = proposal.draws.probabilities.clamp(min=0.05)
        softened = softened / softened.sum(-1, keepdim=True)
        draws = Draws(softened, None, softened.gather(2, proposal.tokens[..., None])[..., 0])
        return verify_sampled(logits, replace(proposal, draws=draws), lengths, sampling, generator)

    assert not sampled_chain(SAMPLINGS["temperature 0.7, top-p"], untruncated).good


# The whole loop: a verifier of five tokens, real caches, real proposers.


def tiny_model(seed: int, layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 1.2 * weight.shape[1] ** -0.5)
    return model


def tiny_drafter(model: Any, draft_ids: Tensor | None) -> Drafter:
    ends = FrozenVerifier(model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach(), torch.ones(32), 1e-5)
    count = VOCABULARY if draft_ids is None else len(draft_ids)
    shape = config(VOCABULARY, 32, draft_vocab_size=count, block_size=3, num_layers=1, layer_ids=[1, 2], mask_token_id=1)
    torch.manual_seed(3)
    drafter = Drafter(shape, ends, draft_ids).eval()
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
    return drafter


@torch.inference_mode()
def model_joint(model: Any, prompt: list[int], length: int, sampling: Sampling) -> Tensor:
    """Exact joint distribution of the next `length` tokens."""
    prefixes = torch.tensor([prompt])
    joint = torch.ones(1)
    for _ in range(length):
        p = distribution(model(prefixes, use_cache=False).logits[:, -1], sampling).dense(VOCABULARY)
        joint = (joint[:, None] * p).flatten()
        prefixes = torch.cat([prefixes.repeat_interleave(VOCABULARY, 0), torch.arange(VOCABULARY).repeat(len(prefixes))[:, None]], 1)
    return joint.view([VOCABULARY] * length)


def read_together(self: CachedModel, prompts: list[list[int]]) -> Read:
    """Equal prompts in one forward: the loop reads each prompt by itself, which 200,000 of them would take minutes for."""
    return self.read(torch.tensor(prompts), last_only=True)


WHOLE_LOOP = {
    ("dspark", "temperature 1"): SAMPLES,
    ("dspark", "temperature 0.7, top-p"): SAMPLES,
    ("dspark, reduced vocabulary", "temperature 1"): 50_000,
    ("dspark, reduced vocabulary", "temperature 0.7, top-p"): 50_000,
    ("dspark, candidates", "temperature 1"): 50_000,
    ("draft model", "temperature 0.7, top-p"): 50_000,
    ("prompt lookup", "temperature 1"): 50_000,
    ("nobody", "top-k"): 50_000,
}
"""Proposer and sampling → samples; half a minute each 200,000."""


@pytest.mark.parametrize(("proposer", "name"), WHOLE_LOOP)
def test_the_loop_has_the_verifiers_distribution(monkeypatch: pytest.MonkeyPatch, proposer: str, name: str) -> None:
    monkeypatch.setattr(CachedModel, "read_prompts", read_together)
    model, sampling, prompt = tiny_model(0), SAMPLINGS[name], [1, 4, 2, 1]
    makers: dict[str, Callable[[], Proposer | None]] = {
        "dspark": lambda: BlockProposer(tiny_drafter(model, None)),
        "dspark, reduced vocabulary": lambda: BlockProposer(tiny_drafter(model, torch.tensor([0, 2, 3]))),
        "dspark, candidates": lambda: BlockProposer(tiny_drafter(model, None), candidates=2),
        "draft model": lambda: DraftModelProposer(tiny_model(1, 1), 2),
        "prompt lookup": lambda: NgramProposer(2, 1, 2),
        "nobody": lambda: None,
    }
    decoder = Decoder(model, makers[proposer](), sampling, seed=5)
    decoder.eos_ids = ()
    done = decoder.decode([Prompt("", prompt, 4)] * WHOLE_LOOP[proposer, name], 25_000)
    found = fit(torch.tensor([entry.token_ids for entry in done]), model_joint(model, prompt, 4, sampling))
    assert found.good, found
    accepted = {each.accepted for entry in done for each in entry.rounds}
    assert accepted == ({0} if proposer == "nobody" else {0, 1, 2}), "drafts must be refused, and accepted, for this to say anything"


# Truncation and drawing.


def by_sorting(logits: Tensor, sampling: Sampling) -> Tensor:
    """The definition, row by row: temperature, then the k likeliest, then of these the fewest that reach the mass."""
    out = torch.zeros_like(logits, dtype=torch.float64)
    for row, scaled in enumerate(logits.double() / sampling.temperature):
        order = scaled.argsort(descending=True, stable=True)[: sampling.top_k or len(scaled)]
        p = scaled[order].softmax(0)
        # A sum that reaches 1 by rounding truncates nothing.
        reaching = (count for count in range(1, len(p) + 1) if sampling.top_p < 1.0 and float(p[:count].sum()) >= sampling.top_p)
        count = next(reaching, len(p))
        out[row, order[:count]] = p[:count] / p[:count].sum()
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 300, 5000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
)
def test_truncation_is_what_its_definition_says(seed: int, temperature: float, top_k: int, top_p: float, spread: float) -> None:
    """With nuclei below and above the number of candidates that are looked at first."""
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(seed)) * spread
    wanted = by_sorting(logits, Sampling(temperature, top_k, top_p))
    found = distribution(logits, Sampling(temperature, top_k, top_p)).dense(1000).double()
    differing = (wanted > 0) != (found > 0)
    # In fp32 the token at the very edge of the nucleus may fall on either side.
    assert int(differing.sum(1).max()) <= 1
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)


def test_a_draw_follows_its_weights_and_never_takes_a_weight_of_zero() -> None:
    weights = torch.tensor([0.0, 0.5, 0.0, 3.0, 0.0, 1.5, 0.0]).repeat(SAMPLES, 1)
    counts = torch.bincount(draw(weights, torch.Generator().manual_seed(0)), minlength=7)
    assert counts[[0, 2, 4, 6]].tolist() == [0, 0, 0, 0]
    for column, share in ((1, 0.1), (3, 0.6), (5, 0.3)):
        assert abs(int(counts[column]) - share * SAMPLES) < 5 * math.sqrt(SAMPLES * share * (1 - share))
