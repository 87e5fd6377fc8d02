"""Where the seconds of a decoding run go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch


@dataclass
class Seconds:
    """Wall clock of verify rounds; the pass that reads the prompts is counted apart.

    Attributes:
        prompts: reading the prompts, by both models. verifier: its forwards. drafter: everything inside the proposer, heads included.
        head: the part of `drafter` spent in sequential heads (the Markov chain). other: the loop itself: verification, sampling, stops,
            bookkeeping. rounds: verify rounds, of the whole batch at once.
    """

    prompts: float = 0.0
    verifier: float = 0.0
    drafter: float = 0.0
    head: float = 0.0
    other: float = 0.0
    rounds: int = 0

    @property
    def round_seconds(self) -> float:
        """All rounds together."""
        return self.verifier + self.drafter + self.other

    @property
    def overhead(self) -> float:
        """Share of a round that is neither model's; 0 before the first round."""
        return self.other / self.round_seconds if self.rounds else 0.0

    @property
    def head_share(self) -> float:
        """The sequential head's share of a round; 0 before the first round."""
        return self.head / self.round_seconds if self.rounds else 0.0

    def report(self) -> dict[str, float]:
        """For a report: every value by name."""
        return asdict(self) | {"overhead": self.overhead, "head_share": self.head_share}


def now(device: torch.device) -> float:
    """Seconds, after everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Stopwatch:
    """Splits one round's wall clock into the parts of `Seconds`."""

    def __init__(self, seconds: Seconds, device: torch.device) -> None:
        self.seconds, self.device = seconds, device
        self._inside = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The time inside belongs to `name`, a field of `Seconds`."""
        started = now(self.device)
        try:
            yield
        finally:
            spent = now(self.device) - started
            self._inside += spent
            setattr(self.seconds, name, getattr(self.seconds, name) + spent)

    @contextmanager
    def round(self) -> Iterator[None]:
        """One round; what no part inside takes is `other`."""
        self._inside = 0.0
        started = now(self.device)
        try:
            yield
        finally:
            self.seconds.other += now(self.device) - started - self._inside
            self.seconds.rounds += 1
