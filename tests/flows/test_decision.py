"""What a change of a verifier leads to: nothing twice, no training where a drafter is known, and an end to failing."""

from __future__ import annotations

from typing import Any

import pytest

from flows.decision import Attempts, decide
from tests.flows.versions import drafter, identity, serving

OLD, NOW = "b" * 64, "a" * 64


@pytest.mark.parametrize(
    ("champion", "others", "attempts", "expected"),
    [
        ({"verifier": NOW}, [], Attempts(), ("nothing", None, None)),
        ({"verifier": OLD}, [], Attempts(), ("retrain", None, 1)),
        (None, [], Attempts(), ("retrain", None, 1)),
        ({"verifier": OLD}, [], Attempts(failed=1), ("retrain", None, 2)),
        ({"verifier": OLD}, [], Attempts(failed=2), ("nothing", None, None)),
        ({"verifier": OLD}, [], Attempts(completed=1), ("retrain", None, 2)),
        ({"verifier": OLD}, [], Attempts(completed=3), ("nothing", None, None)),
        ({"verifier": OLD}, [], Attempts(running=True), ("nothing", None, None)),
        ({"verifier": OLD}, [{"version": 7, "verifier": NOW}], Attempts(failed=2), ("promote", 7, None)),
        ({"verifier": OLD}, [{"version": 7, "verifier": NOW, "gate": "fail"}], Attempts(), ("retrain", None, 1)),
    ],
    ids=[
        "same",
        "changed",
        "none yet",
        "failed once",
        "failed too often",
        "its drafter was deleted",
        "deleted too often",
        "on its way",
        "a rollback",
        "known but not gated",
    ],
)
def test_the_table(champion: dict[str, Any] | None, others: list[dict[str, Any]], attempts: Attempts, expected: tuple[Any, ...]) -> None:
    now = drafter(version=3, **champion) if champion is not None else None
    drafters = [*([now] if now is not None else []), *(drafter(**other) for other in others)]
    action = decide(serving(), now, drafters, None, attempts, max_attempts=2)
    assert (action.kind, action.version, action.attempt) == expected, action.reason


def test_it_says_what_changed_field_by_field() -> None:
    before = identity(quantization={"method": "int8"}, chat_template="")
    action = decide(serving(), drafter(verifier=OLD), [drafter(verifier=OLD)], before, Attempts(), max_attempts=2)
    assert "quantization" in action.reason
    assert "chat_template" in action.reason
    assert "weights" not in action.reason
