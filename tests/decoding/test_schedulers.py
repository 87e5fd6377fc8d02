"""The schedulers between drafter and verifier: calibrated, bounded by what there is, and off where nothing is gained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stages.artifacts import write_json
from stages.decoding.costs import CostError
from stages.decoding.schedule import ScheduleError
from stages.decoding.schedulers import HardwareScheduler, StaticScheduler, read_scale
from stages.drafters.calibration import CALIBRATION_FILE, Calibration, ModeCalibration, Scale
from stages.errors import ArtifactError
from tests.decoding.tables import table
from tests.drafters.shapes import config

PLAIN = Scale(torch.ones(4), torch.zeros(4))
ACCEPTANCE = {4: [0.7, 0.45, 0.3, 0.2]}


@dataclass
class Offer:
    available: Tensor
    confidence: Tensor | None


def offer(*rows: list[float], available: list[int] | None = None) -> Offer:
    return Offer(torch.tensor(available or [len(row) for row in rows]), torch.tensor(rows))


def test_a_threshold_is_held_against_the_calibrated_survival() -> None:
    rows = offer([0.9, 0.9, 0.9, 0.9], [0.9, 0.4, 0.9, 0.9])
    assert StaticScheduler(0.7, PLAIN).lengths(rows).tolist() == [3, 1]
    doubtful = Scale(torch.ones(4), torch.tensor([0.0, -2.0, 0.0, 0.0]))
    assert StaticScheduler(0.7, doubtful).lengths(rows).tolist() == [1, 1]
    assert StaticScheduler(0.0, PLAIN).lengths(offer([0.9, 0.9], [0.9, 0.9], available=[1, 2])).tolist() == [1, 2]


def test_the_batch_s_tokens_go_to_the_surest_drafts() -> None:
    scheduler = HardwareScheduler(table(), PLAIN, ACCEPTANCE)
    lengths = scheduler.lengths(offer([0.95, 0.95, 0.95, 0.95], [0.6, 0.1, 0.1, 0.1], [0.05, 0.9, 0.9, 0.9])).tolist()
    assert lengths[0] > lengths[1] >= lengths[2]
    assert scheduler.lengths(offer([0.9] * 4, [0.9] * 4, available=[0, 2])).tolist()[0] == 0


def test_nothing_is_drafted_where_the_table_says_that_it_costs_more_than_it_gives() -> None:
    scheduler = HardwareScheduler(table(), PLAIN, ACCEPTANCE)
    assert [scheduler.limit(torch.full((requests,), 30), 4) for requests in (1, 8)] == [4, 0]
    assert HardwareScheduler(table(), PLAIN, {4: [0.01, 0.0, 0.0, 0.0]}).limit(torch.tensor([30]), 4) == 0
    with pytest.raises(CostError, match="9 requests, measured were 1 to 8"):
        scheduler.limit(torch.full((9,), 30), 4)


@pytest.mark.parametrize("scheduler", [StaticScheduler(0.5, PLAIN), HardwareScheduler(table(), PLAIN, ACCEPTANCE)])
def test_a_drafter_without_confidence_is_refused_in_one_line(scheduler: StaticScheduler | HardwareScheduler) -> None:
    with pytest.raises(ScheduleError, match="needs a confidence head, this drafter has none"):
        scheduler.lengths(Offer(torch.tensor([4]), None))
    with pytest.raises(ScheduleError, match="5 drafts per row, calibrated are 4"):
        scheduler.lengths(offer([0.5] * 5))


def test_a_checkpoint_says_how_its_head_is_read_or_why_it_cannot(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config().to_speculators("tiny", ["LlamaForCausalLM"]))
    with pytest.raises(ArtifactError, match=r"calibration\.json: no such file"):
        read_scale(tmp_path, "greedy")
    mode = ModeCalibration(temperatures=[1.0] * 4, shifts=[0.5] * 4, fitted_on=10, held_out=[])
    write_json(tmp_path / CALIBRATION_FILE, Calibration(bins=10, modes={"greedy": mode}).model_dump(mode="json"))
    assert read_scale(tmp_path, "greedy").shifts.tolist() == [0.5] * 4
    write_json(tmp_path / "config.json", config(confidence_head=False).to_speculators("tiny", ["LlamaForCausalLM"]))
    with pytest.raises(ScheduleError, match="confidence scheduling needs a confidence head, this dspark drafter has none"):
        read_scale(tmp_path, "greedy")


@pytest.mark.parametrize("threshold", [-0.1, 1.5])
def test_a_threshold_is_a_probability(threshold: float) -> None:
    with pytest.raises(ScheduleError, match="from 0 to 1"):
        StaticScheduler(threshold, PLAIN)
