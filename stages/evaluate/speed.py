"""Tokens per second with and without the drafter, measured so that the machine's mood hits both alike.

Both are alive; every group of prompts is decoded by one and then by the other, the first of the two changing each time.
One prompt at a time is the case that speculative decoding is for; larger groups show where it stops paying.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


Decode = Callable[[Sequence[Request]], Timed]
"""Decodes a group of prompts together."""


def measure(baseline: Decode, drafted: Decode, groups: Sequence[Sequence[Request]], repeats: int, desc: str) -> list[Pair]:
    """Decode `groups` one after another, `repeats` times, with both in turn."""
    pairs = []
    with tqdm(total=repeats * len(groups), desc=desc, unit="group") as bar:
        for repeat in range(repeats):
            timed: dict[str, list[Timed]] = {"baseline": [], "drafted": []}
            for index, group in enumerate(groups):
                turns = [("baseline", baseline), ("drafted", drafted)]
                for name, decode in turns if (repeat + index) % 2 == 0 else turns[::-1]:
                    timed[name].append(decode(group))
                bar.update()
            pairs.append(Pair(_total(timed["baseline"]), _total(timed["drafted"])))
    return pairs


def grouped(requests: Sequence[Request], prompts: int, batch_size: int) -> list[list[Request]]:
    """Groups of `batch_size`, just enough for `prompts`; from the first again where there are fewer requests."""
    count = -(-prompts // batch_size)
    return [
        [replace(requests[place % len(requests)], id=str(place)) for place in range(group * batch_size, (group + 1) * batch_size)] for group in range(count)
    ]


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
        "repeats": [{**entry, "ratio": pair.ratio} for entry, pair in zip(pairs_to_json(pairs), pairs, strict=True)],
    }


def pairs_to_json(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    return [{name: {"tokens": timed[0], "seconds": timed[1]} for name, timed in (("baseline", pair.baseline), ("drafted", pair.drafted))} for pair in pairs]


def pairs_from_json(values: Sequence[dict[str, Any]]) -> list[Pair]:
    return [Pair(*((value[name]["tokens"], value[name]["seconds"]) for name in ("baseline", "drafted"))) for value in values]
