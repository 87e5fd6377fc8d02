"""The chain of EAGLE-3: trained as it drafts, and as the `speculators` package computes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.drafters.eagle3 import Eagle3, greedy_chains, tapped
from stages.drafters.model import Blocks, make_segments
from tests.drafters.kinds import make_drafter, write_checkpoint

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


@torch.no_grad()
def test_speculators_computes_the_same_chain(tiny_verifier: Path, tmp_path: Path) -> None:
    """Conformance: the reference trainer's own unrolled forward on our checkpoint, every position an anchor."""
    speculators = pytest.importorskip("speculators", reason="test-only dependency")
    model = make_drafter("eagle3", tiny_verifier, draft_ids=torch.arange(1, 512, 2))
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "eagle3", tiny_verifier, model)
    content = (checkpoint / "config.json").read_text().replace('"tiny"', f'"{tiny_verifier}"')
    (checkpoint / "config.json").write_text(content)
    theirs = speculators.SpeculatorModel.from_pretrained(checkpoint, dtype=torch.float32)
    theirs.load_verifier_weights()
    theirs.eval()
    read = theirs.state_dict()
    assert all(torch.equal(read[name].float(), tensor) for name, tensor in model.state_dict().items())
    context, tokens = material(model)
    seen: list[torch.Tensor] = []
    theirs.norm.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    from speculators.models.attention import create_float_mask

    # Its default attention has no CPU kernel.
    theirs._attn_impl, theirs._create_mask_fn = "eager", create_float_mask
    theirs.layers[0].self_attn.config._attn_implementation = "eager"
    steps = model.config.draft_tokens
    theirs(context[None], tokens.roll(-1)[None], torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=steps)
    anchors = torch.arange(1, LENGTH - steps)
    previous = tokens[anchors[:, None] + torch.arange(steps)]
    ours = model.unrolled(blocks(context, tokens, anchors), tokens.roll(-1), previous)
    torch.testing.assert_close(ours, torch.stack(seen, dim=1)[anchors - 1], rtol=1e-4, atol=1e-4)
