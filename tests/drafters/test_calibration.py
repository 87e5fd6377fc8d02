"""Calibration of the confidence head: what it must find, that it helps on other data, and when an error is only noise."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stages.artifacts import write_json
from stages.drafters.calibration import (
    BINS,
    CALIBRATION_FILE,
    GRID,
    Calibration,
    ModeCalibration,
    Scale,
    calibration_errors,
    fit,
    logit,
    noise_floor,
    prefix_survival,
    read_calibration,
    reliability,
    report,
)
from stages.errors import ArtifactError

TRUE = torch.tensor([0.5, 1.6, 2.4, 1.0])


def blocks(count: int, temperatures: Tensor = TRUE, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of a head that is off by `temperatures`, and what came true of each prefix."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(count, len(temperatures), generator=generator) + 1.0
    accepted = torch.rand(count, len(temperatures), generator=generator) < torch.sigmoid(logits / temperatures)
    return logits, accepted.double().cumprod(dim=1)


def test_the_temperatures_that_were_planted_are_found() -> None:
    found = fit(*blocks(40_000)).temperatures
    assert torch.allclose(found.log(), TRUE.double().log(), atol=0.12), found


def test_survival_is_calibrated_on_data_that_was_not_fitted() -> None:
    """What the issue asks: at most 0.02 at every position; the head by itself is far from it."""
    rows = report(*blocks(8_000, seed=1), fit(*blocks(8_000)))
    assert [row["position"] for row in rows] == [1, 2, 3, 4]
    assert max(row["ece_before"] for row in rows) > 0.04
    assert max(row["ece_after"] for row in rows) <= 0.02


def test_later_slots_make_up_for_nothing_that_earlier_ones_got_wrong() -> None:
    """Sequential: the product is calibrated slot by slot, so the temperature of a slot does not hang on the slots behind it."""
    logits, survived = blocks(5_000)
    for shifted in (False, True):
        whole, part = (fit(logits[:, :count], survived[:, :count], shifted) for count in (4, 2))
        assert torch.equal(whole.temperatures[:2], part.temperatures)
        assert torch.equal(whole.shifts[:2], part.shifts)


def test_what_lies_beyond_a_half_needs_a_shift_and_the_shift_keeps_what_the_head_knows() -> None:
    """Greedy acceptance of a head that was trained on sampling: where it says 0.4 it is 0.6. To say 0.6 to every block would be calibrated, too."""
    logits, _ = blocks(20_000)
    generator = torch.Generator().manual_seed(5)
    accepted = torch.rand(logits.shape, generator=generator) < torch.sigmoid(logits - 0.2)
    logits, survived = logits - 2.0, accepted.double().cumprod(dim=1)
    fitted, held_out = slice(0, None, 2), slice(1, None, 2)
    alone, shifted = (fit(logits[fitted], survived[fitted], flag) for flag in (False, True))
    assert max(row["ece_after"] for row in report(logits[held_out], survived[held_out], alone)) > 0.05
    assert max(row["ece_after"] for row in report(logits[held_out], survived[held_out], shifted)) <= 0.02
    assert torch.allclose(shifted.shifts, torch.full((4,), 1.8, dtype=torch.float64), atol=0.25)
    assert prefix_survival(logits, shifted)[:, 0].std() > 0.2


def test_a_calibrated_head_is_left_nearly_alone() -> None:
    found = fit(*blocks(40_000, torch.ones(4))).temperatures
    assert torch.allclose(found, torch.ones(4, dtype=torch.float64), atol=0.12), found
    assert 1.0 in GRID.round(decimals=9)


def test_what_nobody_knows_does_not_count() -> None:
    """Blocks that the text cuts short say nothing of the slots behind the cut; a slot that nothing is known of stays as it is."""
    logits, survived = blocks(4_000)
    cut = survived.clone()
    cut[2_000:, 2] = float("nan")
    cut[:, 3] = float("nan")
    found, whole = fit(logits, cut), fit(logits, survived)
    assert torch.equal(found.temperatures[:2], whole.temperatures[:2])
    assert abs(float(found.temperatures[2] / whole.temperatures[2]) - 1.0) < 0.3
    assert found.temperatures[3] == 1.0
    assert [row["blocks"] for row in report(logits, cut, found)] == [4_000, 4_000, 2_000]


def test_the_error_is_the_mean_gap_over_the_bins() -> None:
    predicted = torch.tensor([0.05, 0.05, 0.95, 1.0])
    survived = torch.tensor([0.0, 1.0, 1.0, 1.0])
    # Bin 0: |0.1 − 1| , last bin: |1.95 − 2|, over four blocks.
    assert calibration_errors(predicted[:, None], survived).item() == pytest.approx((0.9 + 0.05) / 4)
    bins = reliability(predicted, survived)
    assert [(row["count"], row["survived"]) for row in bins] == [(2, 0.5), (2, 1.0)]
    assert [row["predicted"] for row in bins] == pytest.approx([0.05, 0.975])


@pytest.mark.parametrize("count", [300, 3_000])
def test_the_noise_floor_is_what_perfect_predictions_show(count: int) -> None:
    """Without it an error of 0.02 on a few hundred blocks would be taken for a fault of the calibration."""
    generator = torch.Generator().manual_seed(3)
    predicted = torch.rand(count, generator=generator).double().square()
    drawn = [float(calibration_errors(predicted[:, None], (torch.rand(count, generator=generator) < predicted).double())) for _ in range(400)]
    floor = noise_floor(predicted)
    assert floor.mean == pytest.approx(sum(drawn) / len(drawn), rel=0.05)
    inside = sum(floor.low <= value <= floor.high for value in drawn) / len(drawn)
    assert 0.85 < inside < 0.96


def test_little_data_is_not_overfitted_much() -> None:
    """One number per slot: with 300 blocks the error on other data stays near the noise of so few."""
    scale = fit(*blocks(300))
    for row in report(*blocks(20_000, seed=1), scale):
        assert row["ece_after"] <= noise_floor(prefix_survival(blocks(300)[0], scale)[:, row["position"] - 1]).high


def test_survival_never_rises_along_a_block_and_probabilities_come_back() -> None:
    confidence = torch.tensor([[0.0, 0.3, 1.0], [0.999, 0.5, 0.2]])
    survival = prefix_survival(logit(confidence), Scale(torch.tensor([2.0, 0.3, 1.0]), torch.tensor([0.0, 1.0, -1.0])))
    assert bool((survival[:, 1:] <= survival[:, :-1]).all())
    assert bool(survival.isfinite().all())
    assert torch.allclose(torch.sigmoid(logit(confidence)), confidence.double(), atol=2e-6)
    assert torch.equal(prefix_survival(logit(confidence))[:, 0], torch.sigmoid(logit(confidence))[:, 0])


def test_soft_outcomes_serve_as_well_as_hard_ones() -> None:
    logits, _ = blocks(20_000)
    expected = torch.sigmoid(logits.double() / TRUE).cumprod(dim=1)
    assert torch.allclose(fit(logits, expected).temperatures.log(), TRUE.double().log(), atol=0.03)


def test_a_calibration_travels_as_a_file_and_a_missing_one_says_why(tmp_path: Path) -> None:
    mode = ModeCalibration(temperatures=[1.0, 2.0], shifts=[0.0, 0.5], fitted_on=10, held_out=[])
    write_json(tmp_path / CALIBRATION_FILE, Calibration(bins=BINS, modes={"greedy": mode}).model_dump(mode="json"))
    calibration = read_calibration(tmp_path)
    assert [part.tolist() for part in calibration.scale("greedy")] == [[1.0, 2.0], [0.0, 0.5]]
    with pytest.raises(ArtifactError, match="not fitted for sampling decoding, only for greedy"):
        calibration.scale("sampling")
    with pytest.raises(ArtifactError, match=r"calibration\.json: no such file; .* drafter\.confidence_head true"):
        read_calibration(tmp_path / "elsewhere")
    write_json(tmp_path / CALIBRATION_FILE, {"bins": 10})
    with pytest.raises(ArtifactError, match=r"calibration\.json: modes: Field required"):
        read_calibration(tmp_path)
    assert math.isclose(float(GRID[0] * GRID[-1]), 1.0)
