"""Speed is measured in pairs, in turn, and reported with every tokens and seconds it was made of."""

from __future__ import annotations

import pytest

from stages.decoding.engine import Request
from stages.evaluate.speed import Pair, measure, summarise


def test_both_engines_decode_every_prompt_and_the_first_one_changes() -> None:
    calls: list[tuple[str, str]] = []

    def engine(name: str, seconds: float) -> object:
        def decode(request: Request) -> tuple[int, float]:
            calls.append((name, request.id))
            return request.max_tokens, seconds

        return decode

    requests = [Request("a", [1], 10), Request("b", [1], 20)]
    pairs = measure(engine("plain", 2.0), engine("drafted", 1.0), requests, 2, "speed")  # type: ignore[arg-type]
    assert pairs == [Pair((30, 4.0), (30, 2.0))] * 2
    assert calls[:4] == [("plain", "a"), ("drafted", "a"), ("drafted", "b"), ("plain", "b")]
    assert calls[4:] == [("drafted", "a"), ("plain", "a"), ("plain", "b"), ("drafted", "b")]


def test_medians_and_ranges_are_of_the_repeats_and_ratios_of_the_pairs() -> None:
    pairs = [Pair((100, 4.0), (100, 2.0)), Pair((100, 5.0), (100, 5.0)), Pair((100, 2.0), (100, 1.6))]
    summary = summarise(pairs)
    assert summary["baseline"] == {"median": 25.0, "min": 20.0, "max": 50.0}
    assert summary["drafted"] == {"median": 50.0, "min": 20.0, "max": 62.5}
    assert summary["ratio"] == {"median": pytest.approx(1.25), "min": 1.0, "max": 2.0}
    assert summary["repeats"][0] == {"baseline": {"tokens": 100, "seconds": 4.0}, "drafted": {"tokens": 100, "seconds": 2.0}, "ratio": 2.0}
