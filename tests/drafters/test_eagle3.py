"""The chain of EAGLE-3 is trained as it drafts, and sees what a decoder has."""

from __future__ import annotations

from pathlib import Path

import torch

from stages.drafters.eagle3 import Eagle3, greedy_chains, tapped
from stages.drafters.model import Blocks, make_segments
from tests.drafters.kinds import make_drafter

LENGTH = 20
ANCHORS = torch.tensor([1, 6, 12, 19])


def material(model: Eagle3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    width = len(model.config.layer_ids) * model.config.hidden_size
    return torch.randn(LENGTH, width, generator=g), torch.randint(4, 500, (LENGTH,), generator=g)


def blocks(context: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor) -> Blocks:
    return Blocks(context, torch.arange(len(context)), tokens[anchors], anchors, make_segments([len(context)], [anchors]))


@torch.no_grad()
def test_training_unrolls_what_decoding_drafts(tiny_verifier: Path) -> None:
    """Fed with the tokens that it drafts itself, training's chain says them again: one model, two ways in."""
    model = make_drafter("eagle3", tiny_verifier)
    context, tokens = material(model)
    drafts = greedy_chains(model, context, tokens, ANCHORS)
    previous = torch.cat([tokens[ANCHORS][:, None], drafts.tokens[:, :-1]], dim=1)
    following = torch.cat([tokens[1:], tokens[:1]])
    logits = model.unrolled(blocks(context, tokens, ANCHORS), following, previous) @ model.head.T
    torch.testing.assert_close(logits, drafts.logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_packed_sequences_draft_as_they_do_alone(tiny_verifier: Path) -> None:
    model = make_drafter("eagle3", tiny_verifier)
    (first, first_tokens), (second, second_tokens) = material(model), material(model, 1)
    anchors = [torch.tensor([3, 9]), torch.tensor([1, 15])]
    previous = torch.randint(4, 500, (4, 4), generator=torch.Generator().manual_seed(2))
    packed = Blocks(torch.cat([first, second]), torch.arange(LENGTH).repeat(2), previous[:, 0], torch.cat(anchors), make_segments([LENGTH, LENGTH], anchors))
    together = model.unrolled(packed, torch.cat([first_tokens.roll(-1), second_tokens.roll(-1)]), previous)
    for place, (context, tokens) in enumerate([(first, first_tokens), (second, second_tokens)]):
        rows = slice(2 * place, 2 * place + 2)
        alone = model.unrolled(blocks(context, tokens, anchors[place]), tokens.roll(-1), previous[rows])
        torch.testing.assert_close(alone, together[rows], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_anchor_sees_the_states_before_it_and_no_later_ones(tiny_verifier: Path) -> None:
    model = make_drafter("eagle3", tiny_verifier)
    context, tokens = material(model)
    anchor = torch.tensor([7])
    before = greedy_chains(model, context, tokens, anchor).logits
    context[7:] = 1e3
    tokens[8:] = 5
    assert torch.equal(greedy_chains(model, context, tokens, anchor).logits, before)  # type: ignore[arg-type]
    for row in (0, 6):
        changed = context.clone()
        changed[row] += 1.0
        assert not torch.allclose(greedy_chains(model, changed, tokens, anchor).logits, before)  # type: ignore[arg-type]


def test_three_layers_of_more_are_tapped() -> None:
    assert tapped([2, 8, 15, 22, 28]) == [2, 15, 28]
    assert tapped([4]) == [4]
    assert tapped([2, 8, 15]) == [2, 8, 15]
