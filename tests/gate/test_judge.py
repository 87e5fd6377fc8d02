"""The gate's judgement as tables: what is identical, what is a near-tie, and that all doubt counts as wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.gate.judge import NEAR_TIE, WRONG, Divergence, Finding, Verdict, first_divergence, judge, margin_between, tally

TOKENS = st.lists(st.integers(0, 5), max_size=12)


@pytest.mark.parametrize(
    ("baseline", "drafted", "expected"),
    [
        ([], [], None),
        ([4, 5, 2], [4, 5, 2], None),
        ([4, 5, 2], [4, 6, 2], Divergence(1, 5, 6)),
        ([4, 5], [4, 5, 2], Divergence(2, None, 2)),
        ([4, 5, 2], [4, 5], Divergence(2, 2, None)),
        ([4], [5, 4], Divergence(0, 4, 5)),
        ([], [7], Divergence(0, None, 7)),
    ],
)
def test_the_first_difference_is_found_and_a_missing_end_is_one(baseline: list[int], drafted: list[int], expected: Divergence | None) -> None:
    assert first_divergence(baseline, drafted) == expected


@given(TOKENS, TOKENS)
def test_a_divergence_is_exactly_where_the_common_prefix_ends(baseline: list[int], drafted: list[int]) -> None:
    found = first_divergence(baseline, drafted)
    if found is None:
        assert baseline == drafted
        return
    assert baseline[: found.position] == drafted[: found.position]
    assert found.baseline != found.drafted
    assert found.baseline == (baseline[found.position] if found.position < len(baseline) else None)
    assert found.drafted == (drafted[found.position] if found.position < len(drafted) else None)


@given(TOKENS, TOKENS)
def test_swapping_the_runs_swaps_only_the_tokens(baseline: list[int], drafted: list[int]) -> None:
    found, swapped = first_divergence(baseline, drafted), first_divergence(drafted, baseline)
    assert (found is None) == (swapped is None)
    if found is not None and swapped is not None:
        assert (swapped.position, swapped.baseline, swapped.drafted) == (found.position, found.drafted, found.baseline)


LIKELIEST = {7: -1.0, 8: -1.0005, 9: -1.5, 3: -5.0}


@pytest.mark.parametrize(
    ("divergence", "near_tie", "expected", "spread"),
    [
        pytest.param(Divergence(3, 7, 8), 1e-3, NEAR_TIE, 0.0005, id="first against second, closer than the threshold"),
        pytest.param(Divergence(3, 8, 7), 1e-3, NEAR_TIE, 0.0005, id="the order of the runs does not matter"),
        pytest.param(Divergence(3, 7, 8), 1e-4, WRONG, 0.0005, id="closer is not close enough"),
        pytest.param(Divergence(3, 7, 9), 1e-3, WRONG, 0.5, id="the verifier prefers the first clearly"),
        pytest.param(Divergence(3, 7, 9), 0.75, NEAR_TIE, 0.5, id="same, with the served threshold"),
        pytest.param(Divergence(3, 8, 9), 0.5, WRONG, 0.5, id="neither is the first: measured from the first, and the threshold itself is wrong"),
        pytest.param(Divergence(3, 7, 3), 0.75, WRONG, 4.0, id="a token that the verifier would never choose"),
        pytest.param(Divergence(3, 7, 55), 0.75, WRONG, None, id="a token below the listed ones is not assumed to be close"),
        pytest.param(Divergence(3, 7, None), 9.0, WRONG, None, id="an early end is never a tie"),
        pytest.param(Divergence(3, None, 7), 9.0, WRONG, None, id="nor is an output that goes on"),
    ],
)
def test_verdicts(divergence: Divergence, near_tie: float, expected: Verdict, spread: float | None) -> None:
    verdict, margin = judge(divergence, LIKELIEST, near_tie)
    assert verdict == expected
    measured = margin.spread if margin is not None else None
    assert measured == (None if spread is None else pytest.approx(spread))


def test_without_a_verifier_to_ask_a_divergence_is_wrong() -> None:
    assert judge(Divergence(0, 1, 2), None, 1.0) == (WRONG, None)


@given(
    st.dictionaries(st.integers(0, 30), st.floats(-20, 0), min_size=2, max_size=20),
    st.integers(0, 40),
    st.integers(0, 40),
    st.floats(1e-6, 5.0),
)
def test_a_near_tie_is_always_backed_by_both_tokens_being_close_to_the_best(logprobs: dict[int, float], baseline: int, drafted: int, near_tie: float) -> None:
    verdict, margin = judge(Divergence(0, baseline, drafted), logprobs, near_tie)
    best = max(logprobs.values())
    close = all(token in logprobs and best - logprobs[token] < near_tie for token in (baseline, drafted))
    assert (verdict == NEAR_TIE) == close
    assert margin is not None
    assert margin.top2 >= 0
    if baseline != drafted and margin.spread is not None:
        # The worse of two different tokens is never better than the second choice.
        assert margin.spread >= margin.top2 or math.isclose(margin.spread, margin.top2)


def test_margins_are_those_of_the_list() -> None:
    margin = margin_between(LIKELIEST, Divergence(0, 7, 9))
    assert margin.top2 == pytest.approx(0.0005)
    assert margin.spread == pytest.approx(0.5)


def finding(verdict: Verdict) -> Finding:
    return Finding("float32", "p", "story", 3, 7, None, 0.1, None, verdict)


def test_counts_add_up() -> None:
    assert tally(5, [finding(WRONG), finding(NEAR_TIE), finding(NEAR_TIE)]) == {"prompts": 5, "identical": 2, "near_tie": 2, "wrong": 1}
    assert tally(2, []) == {"prompts": 2, "identical": 2, "near_tie": 0, "wrong": 0}


def test_a_finding_reads_as_one_line() -> None:
    line = finding(WRONG).line()
    assert line == "float32 p position 3: token 7 without, the end with the drafter, not in the verifier's likeliest tokens: wrong"
