"""The verdict follows from two gains and two limits, and says which number stood against which limit."""

from __future__ import annotations

import pytest

from stages.evaluate.verdict import judge


def ratios(median: float) -> dict[str, float]:
    return {"median": median, "min": median - 0.05, "max": median + 0.1}


@pytest.mark.parametrize(
    ("alone", "lookup", "verdict"),
    [(1.4, 1.2, "ship"), (2.0, 1.5, "ship"), (1.39, 1.3, "tune"), (0.8, 1.25, "tune"), (1.3, 1.19, "drop"), (0.7, 0.9, "drop")],
)
def test_limits_decide(alone: float, lookup: float, verdict: str) -> None:
    assert judge(ratios(alone), ratios(lookup), 0.4, 0.2)["verdict"] == verdict


def test_a_fast_drafter_that_prompt_lookup_nearly_equals_is_dropped() -> None:
    found = judge(ratios(1.8), ratios(1.1), 0.4, 0.2)
    assert found["verdict"] == "drop"
    assert found["reason"] == "+10 % (+5 to +20 %) over guarded prompt lookup, below 20 %; +80 % (+75 to +90 %) over the verifier alone, at least 40 %"


def test_limits_come_from_params() -> None:
    assert judge(ratios(1.1), ratios(1.1), 0.05, 0.02)["verdict"] == "ship"
