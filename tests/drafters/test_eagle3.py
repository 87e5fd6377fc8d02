"""The chain of EAGLE-3 is trained as it drafts, sees what a decoder has, and is the one that `speculators` computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.drafters.checkpoint import save_checkpoint
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


def load_theirs(checkpoint: Path) -> Any:
    """The checkpoint as the `speculators` package reads it, in fp32."""
    speculators = pytest.importorskip("speculators", reason="test-only dependency")
    config = speculators.SpeculatorModelConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = speculators.SpeculatorModel.from_pretrained(checkpoint, config=config, dtype=torch.float32)
    # Its constructor marks what the checkpoint leaves to the verifier with NaN, and only what is NaN is loaded. `from_pretrained` (0.9.0)
    # makes those tensors anew without writing them: memory as it was found, now and then without any NaN, is kept as the embedding.
    for weight in (theirs.embed_tokens.weight, *(() if theirs.use_draft_vocab else (theirs.lm_head.weight,))):
        torch.nn.init.constant_(weight, math.nan)
    theirs.load_verifier_weights()
    return theirs.eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [{}, {"draft_ids": torch.arange(1, 512, 2)}, {"layer_ids": [4]}, {"layer_ids": [2, 6], "draft_ids": torch.arange(0, 512, 3)}],
    ids=["whole", "reduced", "one layer", "two layers, reduced"],
)
def test_speculators_unrolls_the_same_chains(changes: dict[str, Any], tiny_verifier: Path, tmp_path: Path) -> None:
    """Conformance: the `speculators` package loads the checkpoint, and its training-time test gives our logits at every step (fp32)."""
    model = make_drafter("eagle3", tiny_verifier, **changes)
    save_checkpoint(tmp_path / "checkpoint", model, str(tiny_verifier), ["LlamaForCausalLM"], torch.float32)
    theirs = load_theirs(tmp_path / "checkpoint")
    for name, value in {**model.state_dict(), "embed_tokens.weight": model.embedding, "lm_head.weight": model.head}.items():
        assert torch.equal(theirs.state_dict()[name], value), name

    # Two packed sequences: in both, chains see nothing of the other.
    steps = model.config.draft_tokens
    sequences = [material(model, seed) for seed in (0, 1)]
    anchors = [torch.tensor([1, 6, LENGTH - steps]), torch.tensor([2, 9])]
    context = torch.cat([states for states, _ in sequences])
    following = torch.cat([tokens.roll(-1) for _, tokens in sequences])
    previous = torch.cat([tokens[places[:, None] + torch.arange(steps)] for (_, tokens), places in zip(sequences, anchors, strict=True)])
    segments = make_segments([LENGTH, LENGTH], anchors)
    ours = model.unrolled(Blocks(context, torch.arange(LENGTH).repeat(2), previous[:, 0], torch.cat(anchors), segments), following, previous) @ model.head.T

    said: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, args, output: said.append(output[0]))
    documents = torch.arange(2).repeat_interleave(LENGTH)
    theirs(context[None], following[None], documents[None], position_ids=torch.arange(LENGTH).repeat(2)[None], ttt_steps=steps)
    # An anchor at position p starts its chain in row p - 1; rows of the second sequence lie behind those of the first.
    rows = torch.cat([places - 1 + start for start, places in zip((0, LENGTH), anchors, strict=True)])
    torch.testing.assert_close(ours, torch.stack(said, dim=1)[rows], rtol=1e-4, atol=1e-4)
