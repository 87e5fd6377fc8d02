"""Calibration at the end of a training: what is counted as survival, on which samples, and that weights and reading order stay what they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.drafters.draft import greedy_drafts
from stages.train import loop
from stages.train.calibrate import calibrate, greedy_outcomes, judged_blocks
from tests.train.test_loop import build, quiet, settings

NAN = float("nan")


def test_a_draft_survives_as_long_as_it_is_the_verifier_s_choice_and_is_judged_no_further_than_the_text() -> None:
    verifier = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    text = torch.tensor([[5, 6, -1], [5, 6, -1], [9, 6, -1], [9, 6, -1], [5, 6, -1]])
    drafts = torch.tensor([[5, 6, 7], [5, 8, 7], [5, 6, 7], [9, 6, 7], [5, 6, 7]])
    counted = torch.ones(5, 3, dtype=torch.bool)
    counted[4, 1:] = False
    expected = [
        [1, 1, 1],
        [1, 0, 0],  # right again after a wrong token is no use
        [1, NAN, NAN],  # the text left the verifier's choice: what it would have said then is not known
        [0, NAN, NAN],  # nor is it where the draft had failed, or survival would look rarer than it is
        [1, NAN, NAN],  # the end of the text
    ]
    assert torch.equal(greedy_outcomes(drafts, verifier, text, counted).nan_to_num(-1.0), torch.tensor(expected, dtype=torch.float64).nan_to_num(-1.0))


def test_blocks_are_judged_as_a_greedy_decoder_judges_them(tiny_verifier: Path) -> None:
    """Against the verifier itself: the text is its greedy answer, so a draft survives while it is the text."""
    drafter, data = build(tiny_verifier, 1, draft_vocab_size=300)
    params = settings(validation_samples=4)
    drafter.eval()
    blocks = judged_blocks(drafter, data, 0, params)
    assert blocks is not None
    sample = data.samples[0]
    anchors = torch.arange(5, 45)
    context = data.states.read(sample.id, sample.input_ids).hidden_states[:44, :-1].flatten(1)
    drafts = greedy_drafts(drafter, context, torch.tensor(sample.input_ids)[anchors], anchors).tokens
    _, survived = blocks["greedy"]
    assert survived.shape == (40, 7)
    for row, anchor in enumerate(anchors.tolist()):
        text = sample.input_ids[anchor + 1 : anchor + 8]
        for slot in range(7):
            expected = float(drafts[row, : slot + 1].tolist() == text[: slot + 1]) if slot < len(text) else -1.0
            assert float(survived[row, slot].nan_to_num(-1.0)) == expected
    logits, rates = blocks["sampling"]
    assert bool((rates[:, 1:] <= rates[:, :-1] + 1e-6).logical_or(rates[:, 1:].isnan()).all())
    assert logits.shape == rates.shape


def test_a_training_ends_with_a_calibration_of_samples_it_was_not_fitted_on(tiny_verifier: Path, tmp_path: Path) -> None:
    drafter, data = build(tiny_verifier, 6)
    params = settings(steps=10)
    loop.train(drafter, data, data, params, tmp_path / "work", quiet)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    found = calibrate(drafter, data, params)
    assert found is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    for mode, entry in found.modes.items():
        assert entry.fitted_on == 3 * 40
        assert [row["position"] for row in entry.held_out] == list(range(1, 8))
        assert entry.held_out[0]["blocks"] == 3 * 40
        assert entry.shifts != [0.0] * 7, mode
    assert calibrate(drafter, data, params) == found


@pytest.mark.parametrize("head", [True, False])
def test_a_stream_is_asked_for_what_the_calibration_reads_after_everything_else(head: bool, tiny_verifier: Path, tmp_path: Path) -> None:
    """A sample that was not expected would stop the training at its very end."""
    drafter, data = build(tiny_verifier, 4, confidence_head=head)
    params = settings(steps=2, validation_samples=2)
    order = loop.sample_order(len(data), params.sequences_per_step, params.steps, params.seed)
    expected = list(loop.reading_order(data, data, params, order, 0, head))
    read: list[str] = []
    original = data.states.read
    data.states.read = lambda sample, tokens=None: (read.append(sample), original(sample, tokens))[1]  # type: ignore[method-assign, assignment, return-value]
    loop.train(drafter, data, data, params, tmp_path / "work", quiet)
    loop.check(drafter, data, params)
    assert (calibrate(drafter, data, params) is not None) == head
    assert read == expected
    assert len(expected) == 2 * 2 + 2 + (4 if head else 0)
