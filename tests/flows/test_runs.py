"""A run is asked for once, however often it is wanted; and again, once it has ended and is wanted again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType

from flows import runs
from tests.flows.versions import drafter, serving


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Prefect's runs by their idempotency keys."""
    made: dict[str, Any] = {}

    def run_deployment(_: str, idempotency_key: str, **__: Any) -> None:
        made.setdefault(idempotency_key, SimpleNamespace(state_type=StateType.SCHEDULED))

    monkeypatch.setattr(runs, "run_deployment", run_deployment)
    monkeypatch.setattr(runs, "_runs", lambda tags: list(made.values()))
    return made


@pytest.mark.parametrize("end", [StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED])
def test_a_promotion_is_made_once_and_again_after_its_end(asked: dict[str, Any], end: StateType) -> None:
    """A verifier that changes to and fro asks for the same promotion, in the place of the same champion."""
    for number in (1, 2, 3):
        for _ in range(2):
            runs.start_promote(serving(), drafter(version=2), drafter(version=1))
            assert len(asked) == number
        for run in asked.values():
            run.state_type = end
