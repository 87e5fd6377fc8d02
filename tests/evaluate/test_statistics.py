"""Acceptance length is a ratio of sums averaged over kinds; the paired bootstrap finds what is there and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.evaluate.statistics import PromptCount, acceptance_length, macro_interval, paired_difference


def counts(kind: str, pairs: list[tuple[int, int]]) -> list[PromptCount]:
    return [PromptCount(f"{kind}-{index}", kind, tokens, passes) for index, (tokens, passes) in enumerate(pairs)]


def test_a_short_answer_does_not_weigh_as_much_as_a_long_one() -> None:
    length = acceptance_length(counts("story", [(3, 1), (100, 100)]))
    assert length["per_kind"]["story"] == {"value": pytest.approx(103 / 101), "tokens": 103, "passes": 101, "prompts": 2}


def test_kinds_weigh_the_same_whatever_their_size() -> None:
    length = acceptance_length(counts("code", [(20, 10)] * 9) + counts("fact", [(10, 10)]))
    assert length["macro"] == pytest.approx(1.5)
    assert list(length["per_kind"]) == ["code", "fact"]


def test_a_prompt_without_a_pass_saved_nothing() -> None:
    assert acceptance_length(counts("code", [(0, 0)]))["macro"] == 1.0


def drawn(generator: np.random.Generator, lengths: dict[str, float], shared: dict[str, list[float]]) -> list[PromptCount]:
    """Prompts of some difficulty (shared by both systems) decoded by a system of given acceptance length per kind."""
    out = []
    for kind, values in shared.items():
        for index, difficulty in enumerate(values):
            passes = int(generator.integers(60, 100))
            tokens = int(passes * max(1.0, lengths[kind] + difficulty + generator.normal(0, 0.02)))
            out.append(PromptCount(f"{kind}{index}", kind, tokens, passes))
    return out


def test_a_small_lead_is_found_although_prompts_differ_much_more() -> None:
    generator = np.random.default_rng(1)
    shared = {kind: list(generator.normal(0, 0.3, 12)) for kind in ("code", "math", "story")}
    ours = drawn(generator, {"code": 1.9, "math": 2.1, "story": 1.5}, shared)
    theirs = drawn(generator, {"code": 1.8, "math": 2.0, "story": 1.5}, shared)
    difference = paired_difference(ours, theirs)
    assert difference.macro.low > 0
    assert difference.macro.low < difference.macro.estimate < difference.macro.high
    assert difference.macro.estimate == pytest.approx(acceptance_length(ours)["macro"] - acceptance_length(theirs)["macro"])
    assert difference.per_kind["story"].low <= 0
    assert difference.relative.estimate == pytest.approx(acceptance_length(ours)["macro"] / acceptance_length(theirs)["macro"] - 1)
    assert 0 < difference.relative.low < difference.relative.estimate < difference.relative.high
    # Unpaired, the same lead would drown in the spread of the prompts.
    assert difference.macro.high - difference.macro.low < 0.15


def test_the_interval_holds_the_truth_as_often_as_it_claims() -> None:
    generator = np.random.default_rng(2)
    hits = 0
    for seed in range(120):
        shared = {kind: list(generator.normal(0, 0.2, 15)) for kind in ("code", "math")}
        lead = paired_difference(
            drawn(generator, {"code": 1.8, "math": 1.8}, shared), drawn(generator, {"code": 1.7, "math": 1.7}, shared), resamples=400, seed=seed
        ).macro
        hits += lead.low <= 0.1 <= lead.high
    assert 0.85 <= hits / 120 <= 1.0


def test_the_interval_of_one_drafter_holds_its_macro_average() -> None:
    many = counts("code", [(20, 10), (30, 12), (18, 11)] * 6) + counts("fact", [(20, 15), (30, 22), (18, 11)] * 6)
    interval = macro_interval(many)
    assert interval.low < interval.estimate == acceptance_length(many)["macro"] < interval.high
    alike = counts("code", [(20, 10)] * 5)
    assert (macro_interval(alike).low, macro_interval(alike).high) == (2.0, 2.0)


PAIRS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 100)), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(PAIRS, PAIRS, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_a_drafter_does_not_beat_itself(first: list[tuple[int, int]], second: list[tuple[int, int]], random: object) -> None:
    everything = counts("code", first) + counts("fact", second)
    same = paired_difference(everything, list(reversed(everything)), resamples=50)
    assert (same.macro.estimate, same.macro.low, same.macro.high) == (0.0, 0.0, 0.0)
    better = [PromptCount(c.prompt, c.kind, c.tokens + c.passes, c.passes) for c in everything]
    lead = paired_difference(better, everything, resamples=50)
    assert lead.macro.low == pytest.approx(1.0)
    assert lead.macro.high == pytest.approx(1.0)
    back = paired_difference(everything, better, resamples=50)
    assert back.macro.estimate == pytest.approx(-lead.macro.estimate)
    assert paired_difference(better, everything, resamples=50) == lead


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (counts("code", [(2, 1)]), counts("code", [(2, 1), (3, 1)])),
        (counts("code", [(2, 1)]), counts("fact", [(2, 1)])),
        ([], []),
        (counts("code", [(2, 1)]) * 2, counts("code", [(2, 1)]) * 2),
    ],
)
def test_what_is_not_paired_is_refused(first: list[PromptCount], second: list[PromptCount]) -> None:
    with pytest.raises(ValueError, match=r"same prompts|counted twice"):
        paired_difference(first, second)
