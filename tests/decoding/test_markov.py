"""The Markov chain over candidates: exact with all of them, proved exact where it says so, and never far off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stages.decoding.markov import Chain
from stages.decoding.proposer import DecodingError, Sampling
from stages.drafters.model import Drafter
from tests.drafters.shapes import KINDS, config, drafter, name_of

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 200


def block(model: Drafter) -> tuple[Tensor, Tensor, Tensor]:
    """Backbone output, base logits and anchors of `ROWS` blocks."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, model.config.draft_tokens, model.config.hidden_size, generator=generator) * 0.2
    return hidden, hidden @ model.head.T, torch.randint(0, model.config.vocab_size, (ROWS,), generator=generator)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.get("markov_rank") != 0], ids=name_of)
def test_all_candidates_are_the_exact_chain(kind: dict[str, Any]) -> None:
    model = drafter(config(**kind))
    inputs = block(model)
    exact = Chain(model).draft(*inputs, Sampling(), None)
    whole = Chain(model, model.config.draft_vocab_size).draft(*inputs, Sampling(), None)
    assert torch.equal(exact.tokens, whole.tokens)
    almost = Chain(model, model.config.draft_vocab_size - 1).draft(*inputs, Sampling(), None)
    assert float((exact.tokens == almost.tokens).float().mean()) > 0.95


@pytest.mark.parametrize("scale", [0.1, 10.0, 300.0])
def test_a_slot_that_is_proved_is_exact(scale: float) -> None:
    """The first slot has the true previous token under both, so there the two choices can be compared one by one."""
    model = drafter(config(block_size=2))
    assert model.markov_head is not None
    with torch.no_grad():
        model.markov_head.markov_w2.weight.mul_(scale)
    hidden, base, anchors = block(model)
    exact = Chain(model).draft(hidden, base, anchors, Sampling(), None).tokens
    proved = 0
    for row in range(ROWS):
        chain = Chain(model, 8)
        ours = chain.draft(hidden[row : row + 1], base[row : row + 1], anchors[row : row + 1], Sampling(), None).tokens
        counted = chain.counters()
        assert counted["markov_slots"] == 1
        if counted["markov_slots_proved"]:
            assert torch.equal(ours[0], exact[row])
        proved += counted["markov_slots_proved"]
    # The louder the bias, the less the base logits say.
    assert scale != 0.1 or proved > ROWS // 2
    assert scale != 300.0 or proved < ROWS // 2


@pytest.mark.parametrize("kind", [{}, {"draft_vocab_size": 40}], ids=name_of)
def test_sampled_candidates_are_drawn_from_the_q_that_is_told(kind: dict[str, Any]) -> None:
    model = drafter(config(**kind))
    drafts = Chain(model, 6).draft(*block(model), Sampling(1.0), torch.Generator().manual_seed(1))
    assert drafts.draws is not None
    q = drafts.draws.probabilities
    assert q.shape[-1] == model.config.draft_vocab_size
    torch.testing.assert_close(q.sum(-1), torch.ones(q.shape[:2]))
    assert int((q > 0).sum(-1).max()) <= 6
    columns = torch.searchsorted(model.draft_ids, drafts.tokens)
    assert torch.equal(q.gather(2, columns[..., None])[..., 0], drafts.draws.drafted)


def test_no_candidates_are_refused() -> None:
    with pytest.raises(DecodingError, match="0 candidates of the Markov chain: at least 1"):
        Chain(drafter(config()), 0)
