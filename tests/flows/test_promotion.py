"""Which drafter may be champion: never one of another verifier, never one without its gate, never a worse one than the policy allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.errors import FlowError
from flows.promotion import best_for, judge, require_alias
from tests.flows.versions import drafter, serving


@pytest.mark.parametrize(
    ("candidate", "champion", "min_ratio", "promote", "says"),
    [
        ({}, None, 1.0, True, "lock and gate hold"),
        ({"verifier": "b" * 64}, None, 1.0, False, "belongs to verifier bbbb"),
        ({"gate": "fail"}, None, 1.0, False, "gate = 'fail'"),
        ({}, {"version": 1, "acceptance_length": 1.6}, 1.0, False, "needed are 1.600"),
        ({}, {"version": 1, "acceptance_length": 1.6}, 0.9, True, "lock and gate hold"),
        ({}, {"version": 1, "acceptance_length": 9.0, "verifier": "b" * 64}, 1.0, True, "lock and gate hold"),
        ({}, {"version": 2}, 0.0, False, "champion already"),
    ],
)
def test_the_policy(candidate: dict[str, Any], champion: dict[str, Any] | None, min_ratio: float, promote: bool, says: str) -> None:
    verdict = judge(drafter(version=2, **candidate), drafter(**champion) if champion is not None else None, serving(), min_ratio)
    assert (verdict.promote, says in verdict.reason) == (promote, True), verdict


@pytest.mark.parametrize("alias", ["Champion", "CHAMPION", "latest", "v1", "champion ", ""])
def test_aliases_are_ours_and_lower_case(alias: str) -> None:
    with pytest.raises(FlowError, match="allowed are candidate, champion, previous"):
        require_alias(alias)


DRAFTERS = st.lists(
    st.builds(
        drafter,
        version=st.integers(1, 50),
        verifier=st.sampled_from(["a" * 64, "b" * 64]),
        gate=st.sampled_from(["pass", "fail"]),
        acceptance_length=st.floats(1.0, 4.0),
        aliases=st.sampled_from([(), ("champion",), ("previous",), ("candidate",)]),
    ),
    max_size=8,
)


@given(DRAFTERS)
def test_what_is_found_for_a_verifier_belongs_to_it_and_has_passed(drafters: Sequence[Any]) -> None:
    found = best_for(list(drafters), "a" * 64)
    fitting = [item for item in drafters if item.verifier == "a" * 64 and item.gate == "pass"]
    assert (found in fitting) if fitting else found is None
    if found is not None and not any(item.aliases in (("champion",), ("previous",)) for item in fitting):
        assert found.acceptance_length == max(item.acceptance_length for item in fitting)
