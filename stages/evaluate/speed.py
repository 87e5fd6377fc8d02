"""Tokens per second with and without the drafter, measured so that the machine's mood hits both alike.

Both engines are alive; every prompt is decoded by one and then by the other, the first of the two changing each time.
One prompt at a time: the case that speculative decoding is for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from stages.decoding.engine import Request

Timed = tuple[int, float]
"""Tokens decoded and the seconds it took."""


@dataclass(frozen=True)
class Pair:
    """One repeat: all prompts with (`drafted`) and without (`baseline`) the drafter."""

    baseline: Timed
    drafted: Timed

    @property
    def ratio(self) -> float:
        """Rate with the drafter over rate without it."""
        return rate(self.drafted) / rate(self.baseline)


def rate(timed: Timed) -> float:
    """Tokens per second."""
    tokens, seconds = timed
    return tokens / seconds


def measure(baseline: Callable[[Request], Timed], drafted: Callable[[Request], Timed], requests: Sequence[Request], repeats: int, desc: str) -> list[Pair]:
    """Decode `requests` one at a time, `repeats` times, with both engines in turn."""
    pairs = []
    with tqdm(total=repeats * len(requests), desc=desc, unit="prompt") as bar:
        for repeat in range(repeats):
            timed: dict[str, list[Timed]] = {"baseline": [], "drafted": []}
            for index, request in enumerate(requests):
                turns = [("baseline", baseline), ("drafted", drafted)]
                for name, decode in turns if (repeat + index) % 2 == 0 else turns[::-1]:
                    timed[name].append(decode(request))
                bar.update()
            pairs.append(Pair(_total(timed["baseline"]), _total(timed["drafted"])))
    return pairs


def _total(timed: Sequence[Timed]) -> Timed:
    return sum(tokens for tokens, _ in timed), sum(seconds for _, seconds in timed)


def summarise(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians and ranges over the repeats, and every repeat with its tokens and seconds."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    return {
        "baseline": spread([rate(pair.baseline) for pair in pairs]),
        "drafted": spread([rate(pair.drafted) for pair in pairs]),
        "ratio": spread([pair.ratio for pair in pairs]),
        "repeats": [
            {
                "baseline": {"tokens": pair.baseline[0], "seconds": pair.baseline[1]},
                "drafted": {"tokens": pair.drafted[0], "seconds": pair.drafted[1]},
                "ratio": pair.ratio,
            }
            for pair in pairs
        ],
    }
