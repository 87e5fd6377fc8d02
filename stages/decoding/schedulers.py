"""The prefix scheduler as the decoding loop asks for it: how much is drafted before a round, how much of it is verified.

    scheduler = StaticScheduler(0.3, calibration.scale("sampling"))
    scheduler = HardwareScheduler(table, calibration.scale("sampling"), acceptance={7: [0.71, 0.52, …]})

Both read the confidence head through its calibration (`stages.drafters.calibration`): sorting by what the head itself says
would spend the verifier's tokens where they are not worth it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from stages.decoding.costs import CostTable
from stages.decoding.schedule import ScheduleError, choose_at, hardware_lengths, static_lengths
from stages.drafters.calibration import Mode, Scale, logit, prefix_survival, read_calibration
from stages.drafters.checkpoint import read_drafter_config


class Offered(Protocol):
    """What a scheduler reads of an offer: `available` `[R]` drafts of each row, `confidence` `[R, K]` in 0 … 1 or None."""

    @property
    def available(self) -> Tensor: ...

    @property
    def confidence(self) -> Tensor | None: ...


def read_scale(checkpoint: Path, mode: Mode) -> Scale:
    """How the confidence head of a checkpoint is read under a way of decoding.

    Raises:
        ScheduleError: the drafter has no confidence head.
        ArtifactError: it was never calibrated, or not for this way of decoding.
    """
    config = read_drafter_config(checkpoint)
    if not getattr(config, "confidence_head", False):
        raise ScheduleError(
            f"{checkpoint}: confidence scheduling needs a confidence head, this {config.algorithm} drafter has none; verify whatever is drafted"
        )
    return read_calibration(checkpoint).scale(mode)


def _survival(offer: Offered, scale: Scale) -> Tensor:
    """`[R, K]` calibrated. Raises ScheduleError: the drafter says nothing of its confidence."""
    if offer.confidence is None:
        raise ScheduleError("confidence scheduling needs a confidence head, this drafter has none; verify whatever is drafted")
    slots = offer.confidence.shape[1]
    if slots > len(scale.temperatures):
        raise ScheduleError(f"{slots} drafts per row, calibrated are {len(scale.temperatures)}")
    return prefix_survival(logit(offer.confidence), scale)


class StaticScheduler:
    """Cuts each row's drafts at the first whose survival is below `threshold`."""

    def __init__(self, threshold: float, scale: Scale) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ScheduleError(f"threshold {threshold}: a survival, from 0 to 1")
        self.threshold, self.scale = threshold, scale

    def limit(self, context_lengths: Tensor, draft_tokens: int) -> int:
        """As many as the drafter makes."""
        return draft_tokens

    def lengths(self, offer: Offered) -> Tensor:
        """`[R]` drafts to verify."""
        return static_lengths(_survival(offer, self.scale), self.threshold, offer.available)


class HardwareScheduler:
    """Spends verifier tokens over the whole batch as long as they pay on this machine."""

    def __init__(self, table: CostTable, scale: Scale, acceptance: Mapping[int, Sequence[float]]) -> None:
        """
        Args:
            acceptance: draft tokens → survival to each position, measured before: what drafting is expected to give.
        """
        self.table, self.scale, self.acceptance = table, scale, acceptance
        self._pays: dict[int, bool] = {}
        self._seconds: dict[tuple[int, int], Tensor] = {}

    def limit(self, context_lengths: Tensor, draft_tokens: int) -> int:
        """0 where the table says that drafting costs more than it gives at this batch size.

        Decided by what was measured before, never by this round's drafts: that would bias what is sampled.
        """
        requests = len(context_lengths)
        if requests not in self._pays:
            choice = choose_at(self.table, self.acceptance, requests)
            self._pays[requests] = choice.draft_tokens > 0 and choice.rate > choice.alone
        return draft_tokens if self._pays[requests] else 0

    def lengths(self, offer: Offered) -> Tensor:
        """`[R]` drafts to verify. Raises CostError: the table does not reach this batch."""
        survival = _survival(offer, self.scale)
        requests, slots = survival.shape
        if (requests, slots) not in self._seconds:
            seconds = self.table.round_seconds(requests, range(requests, requests * (1 + slots) + 1))
            self._seconds[requests, slots] = torch.tensor(seconds, dtype=torch.float64, device=survival.device)
        return hardware_lengths(survival, self._seconds[requests, slots], offer.available)
