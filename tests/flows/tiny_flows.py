"""The flow `serve` as it is, with small processes where engines stand; and a `retrain` that makes nothing. Deployed by a staffed site."""

from __future__ import annotations

from functools import partial
from typing import Any

from prefect import flow

import flows.serve
from flows.serving.reconcile import Reconciler
from tests.flows.tiny_plan import DRAIN_SECONDS, PATIENT_SECONDS, tiny_plan

flows.serve.Reconciler = partial(Reconciler, build=tiny_plan, startup_seconds=PATIENT_SECONDS, drain_seconds=DRAIN_SECONDS)  # type: ignore[misc, assignment]
serve = flows.serve.serve


@flow(name="retrain")
def retrain(verifier: str, overrides: dict[str, Any] | None = None, busy: str = "refuse", reason: str = "") -> None:
    """What `watch-verifier` may ask for; a walk makes its drafters itself."""
