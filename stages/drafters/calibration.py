"""Calibration of the confidence head: sequential temperature scaling of the prefix survival (DSpark paper).

    scale = fit(logits, survived)                        # one temperature per slot, on validation data
    survival = prefix_survival(logits, scale)            # [N, K], what the schedulers sort by

The head says how likely slot k is accepted, given that all slots before it were; a scheduler spends verifier tokens by the
product of those, so the product is what has to be right: among the blocks with survival 0.3 at slot k, three in ten are
accepted up to k. Slot by slot one temperature is found on a grid, the earlier ones fixed.

Letters: `N` blocks, `K` slots. `survived` `[N, K]` holds what came true of each prefix: 1 or 0, or its expectation; NaN where
nobody knows. It never rises along a row.

Survival means another thing to each way of decoding, so each has its own scale (`MODES`). Under sampling at temperature 1 a draft
is accepted with probability 1 − ½‖q − p‖₁, which the head was trained on; under greedy it is accepted where it is the verifier's
most likely token, mostly more often than that. In neither are temperatures alone enough: they move no probability across ½, and a
head that has seen its training texts several times is too sure on all others (ECE 0.11 at the first slot, with a shift 0.02). So each
slot has a shift beside its temperature, and the pair has the least ECE of those whose log loss is within a hundredth of the
least: ECE by itself would be content with two numbers that tell every block the same.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from stages.artifacts import read_json
from stages.errors import ArtifactError

Mode = Literal["greedy", "sampling"]
MODES: tuple[Mode, ...] = ("greedy", "sampling")

CALIBRATION_FILE = "calibration.json"
BINS = 10
GRID = torch.logspace(math.log10(0.2), math.log10(5.0), 141, dtype=torch.float64)
"""Temperatures that are tried: a fifth to five, 2.3 % apart; the middle one is 1."""
SHIFTS = torch.linspace(-4.0, 4.0, 41, dtype=torch.float64)
LOSS_MARGIN = 1.01
"""With shifts: log loss of a pair that may be chosen, as a share of the least."""


def _bin_sums(predicted: Tensor, values: Tensor, bins: int) -> Tensor:
    """Sums of `values` `[n, G]` over the equal-width bins of probabilities `[n, G]`: `[bins, G]`."""
    index = (predicted * bins).long().clamp_(0, bins - 1)
    return torch.zeros(bins, predicted.shape[1], dtype=values.dtype).scatter_add_(0, index, values)


def calibration_errors(predicted: Tensor, survived: Tensor, bins: int = BINS) -> Tensor:
    """Expected calibration error of each column of `predicted` `[n, G]` against `survived` `[n]`: `[G]`.

    ECE = Σ_bins |Σ_{i in bin} (predicted_i − survived_i)| / n, bins of equal width.
    """
    predicted = predicted.double()
    return _bin_sums(predicted, predicted - survived.double()[:, None], bins).abs().sum(dim=0) / len(predicted)


class Scale(NamedTuple):
    """How a head's logits are read: σ(logit / temperature + shift) per slot, `[K]` each."""

    temperatures: Tensor
    shifts: Tensor


def prefix_survival(logits: Tensor, scale: Scale | None = None) -> Tensor:
    """Survival of each prefix, `[…, K]`, non-increasing along a block: the product of the slots' probabilities up to each.

    Args:
        logits: `[…, K]` of the confidence head. scale: of at least as many slots; None: as the head says it.
    """
    logits = logits.double()
    if scale is not None:
        slots = logits.shape[-1]
        logits = logits / scale.temperatures[:slots].double() + scale.shifts[:slots].double()
    return torch.sigmoid(logits).cumprod(dim=-1)


def logit(confidence: Tensor) -> Tensor:
    """Logits of the head's probabilities; 0 and 1 give finite ones."""
    return torch.logit(confidence.double(), eps=1e-6)


def _log_losses(predicted: Tensor, survived: Tensor) -> Tensor:
    """Mean log loss of each column of `predicted` `[n, G]` against `survived` `[n]`: `[G]`."""
    p, y = predicted.clamp(1e-9, 1.0 - 1e-9), survived.double()[:, None]
    return -(y * p.log() + (1.0 - y) * torch.log1p(-p)).mean(dim=0)


def fit(logits: Tensor, survived: Tensor, shifted: bool = False, bins: int = BINS) -> Scale:
    """The scale of each slot, from the first on, with the earlier ones fixed.

    That is the one with the least ECE of the prefix survival (equal ones: the nearest to 1, and to 0), with shifts among those of nearly
    the least log loss. A slot of which nothing is known is left as it is.

    Args:
        logits: `[N, K]`, as an engine would see them: along the drafted tokens. survived: `[N, K]`, NaN where unknown.
    """
    logits, survived = logits.double(), survived.double()
    prefix = torch.ones(len(logits), dtype=torch.float64)
    scale = Scale(torch.ones(logits.shape[1], dtype=torch.float64), torch.zeros(logits.shape[1], dtype=torch.float64))
    grid = GRID[torch.argsort(GRID.log().abs(), stable=True)][:: 2 if shifted else 1]
    shifts = SHIFTS[torch.argsort(SHIFTS.abs(), stable=True)] if shifted else SHIFTS.new_zeros(1)
    for k in range(logits.shape[1]):
        known = ~survived[:, k].isnan()
        if known.any():
            scaled, before, after = logits[known, k, None] / grid, prefix[known, None], survived[known, k]
            errors, losses = [], []
            for shift in shifts:
                tried = before * torch.sigmoid(scaled + shift)
                errors.append(calibration_errors(tried, after, bins))
                losses.append(_log_losses(tried, after) if shifted else errors[-1].new_zeros(()).expand_as(errors[-1]))
            error, loss = torch.stack(errors), torch.stack(losses)
            place = int(error.masked_fill(loss > LOSS_MARGIN * loss.min(), float("inf")).argmin())
            scale.temperatures[k], scale.shifts[k] = grid[place % len(grid)], shifts[place // len(grid)]
        prefix = prefix * torch.sigmoid(logits[:, k] / scale.temperatures[k] + scale.shifts[k])
    return scale


class NoiseFloor(NamedTuple):
    """ECE that perfect predictions would show on as many blocks: in 90 of 100 draws it lies between `low` and `high`."""

    low: float
    mean: float
    high: float


def noise_floor(predicted: Tensor, bins: int = BINS) -> NoiseFloor:
    """ECE of predictions `[n]` against outcomes drawn from themselves, independently.

    Each bin's sum of n independent draws is nearly normal with variance Σ p(1 − p); the mean of its absolute value is
    √(2/π) of its deviation. Blocks of one text overlap and are not quite independent: the true floor is somewhat higher.
    """
    predicted = predicted.double()[:, None]
    variance = _bin_sums(predicted, predicted * (1.0 - predicted), bins)[:, 0]
    n = len(predicted)
    mean = float(variance.sqrt().sum()) * math.sqrt(2.0 / math.pi) / n
    spread = 1.645 * math.sqrt(float(variance.sum()) * (1.0 - 2.0 / math.pi)) / n
    return NoiseFloor(max(0.0, mean - spread), mean, mean + spread)


def reliability(predicted: Tensor, survived: Tensor, bins: int = BINS) -> list[dict[str, float]]:
    """The bins that hold something, for a plot: {"count", "predicted", "survived"}, the latter two means over the bin.

    Args:
        predicted, survived: `[n]`.
    """
    predicted, survived = predicted.double()[:, None], survived.double()[:, None]
    counts, p, s = (_bin_sums(predicted, values, bins)[:, 0] for values in (torch.ones_like(predicted), predicted, survived))
    return [{"count": int(n), "predicted": float(a / n), "survived": float(b / n)} for n, a, b in zip(counts, p, s, strict=True) if n]


def report(logits: Tensor, survived: Tensor, scale: Scale | None, bins: int = BINS) -> list[dict[str, Any]]:
    """How right the survivals are at each position, from 1.

    Returns:
        Per position: {"position", "blocks", "survived", "ece_before", "ece_after", "noise_floor": [low, mean, high],
        "reliability_before", "reliability_after"};
        before: as the head says it; after: with `scale` (None: the same). Positions of which nothing is known are left out.
    """
    before, after = prefix_survival(logits), prefix_survival(logits, scale)
    rows: list[dict[str, Any]] = []
    for k in range(logits.shape[1]):
        known = ~survived[:, k].isnan()
        if not known.any():
            continue
        came_true, said, predicted = survived[known, k], before[known, k], after[known, k]
        errors = calibration_errors(torch.stack([said, predicted], dim=1), came_true, bins).tolist()
        rows.append(
            {
                "position": k + 1,
                "blocks": int(known.sum()),
                "survived": float(came_true.double().mean()),
                "ece_before": errors[0],
                "ece_after": errors[1],
                "noise_floor": list(noise_floor(predicted, bins)),
                "reliability_before": reliability(said, came_true, bins),
                "reliability_after": reliability(predicted, came_true, bins),
            }
        )
    return rows


class ModeCalibration(BaseModel):
    """Scale `[K]` of one way of decoding, the number of blocks they were fitted on, and `report` on blocks of other texts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperatures: list[float]
    shifts: list[float]
    fitted_on: int
    held_out: list[dict[str, Any]]


class Calibration(BaseModel):
    """What travels with a drafter as `calibration.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bins: int
    modes: dict[Mode, ModeCalibration]

    def scale(self, mode: Mode) -> Scale:
        """How the head's logits are read under this way of decoding.

        Raises:
            ArtifactError: not calibrated for it.
        """
        if mode not in self.modes:
            raise ArtifactError(f"{CALIBRATION_FILE}: not fitted for {mode} decoding, only for {', '.join(self.modes) or 'none'}")
        entry = self.modes[mode]
        return Scale(torch.tensor(entry.temperatures, dtype=torch.float64), torch.tensor(entry.shifts, dtype=torch.float64))


def read_calibration(directory: Path) -> Calibration:
    """The calibration of the drafter in `directory`.

    Raises:
        ArtifactError: there is none (no confidence head, or no validation data), or it is not one.
    """
    path = directory / CALIBRATION_FILE
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; a drafter has one if it was trained with drafter.confidence_head true and validation data")
    try:
        return Calibration.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise ArtifactError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
