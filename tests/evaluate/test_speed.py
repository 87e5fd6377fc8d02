"""Speed is measured in pairs, in turn, and reported with every tokens and seconds it was made of."""

from __future__ import annotations

import pytest

from stages.decoding.engine import Request
from stages.evaluate.speed import Pair, grouped, measure, pairs_from_json, pairs_to_json, summarise


def test_both_engines_decode_every_prompt_and_the_first_one_changes() -> None:
    calls: list[tuple[str, str]] = []

    def engine(name: str, seconds: float) -> object:
        def decode(group: list[Request]) -> tuple[int, float]:
            calls.append((name, group[0].id))
            return sum(request.max_tokens for request in group), seconds

        return decode

    groups = [[Request("a", [1], 10)], [Request("b", [1], 5)] * 4]
    pairs = measure(engine("plain", 2.0), engine("drafted", 1.0), groups, 2, "speed")  # type: ignore[arg-type]
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


def test_groups_hold_a_whole_batch_and_enough_prompts() -> None:
    requests = [Request(name, [1], 10) for name in "abc"]
    assert [len(group) for group in grouped(requests, 5, 1)] == [1] * 5
    assert [len(group) for group in grouped(requests, 5, 2)] == [2] * 3
    (large,) = grouped(requests, 5, 8)
    assert len({request.id for request in large}) == 8, "ids within a batch are unique, although prompts come again"


def test_pairs_survive_being_stored() -> None:
    pairs = [Pair((100, 4.0), (100, 2.0)), Pair((100, 5.0), (100, 5.0))]
    assert pairs_from_json(pairs_to_json(pairs)) == pairs
