"""Runs that flows ask for: each is found again by its tags, and made once however often it is asked for."""

from __future__ import annotations

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment

from flows.decision import Attempts
from flows.registry import DrafterVersion, VerifierVersion

RETRAIN = "retrain/default"
PROMOTE = "promote/default"
FAILED = (StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)
ENDED = (*FAILED, StateType.COMPLETED)


def _tags(kind: str, verifier: VerifierVersion) -> list[str]:
    return [kind, f"verifier:{verifier.name}", f"identity:{verifier.digest[:16]}"]


def _runs(tags: list[str]) -> list[FlowRun]:
    """The newest first."""
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=tags)), sort=FlowRunSort.START_TIME_DESC)


def last_run(name: str) -> FlowRun | None:
    """The newest retrain run for a verifier, of any identity."""
    return next(iter(_runs([RETRAIN, f"verifier:{name}"])), None)


def retrain_attempts(serving: VerifierVersion) -> Attempts:
    """The retrain runs that Prefect knows for this identity."""
    runs = _runs(_tags(RETRAIN, serving))
    return Attempts(sum(run.state_type in FAILED for run in runs), any(run.state_type not in ENDED for run in runs))


def start_retrain(serving: VerifierVersion, attempt: int, reason: str) -> None:
    """Have one retrain run made for this identity and attempt."""
    run_deployment(
        RETRAIN,
        parameters={
            "verifier": serving.name,
            "overrides": {"verifier": {"source": serving.source, "quantization": serving.quantization}},
            "busy": "wait",
            "reason": reason,
        },
        timeout=0,
        tags=_tags(RETRAIN, serving),
        idempotency_key=f"retrain:{serving.name}:{serving.digest}:{attempt}",
        as_subflow=False,
    )


def start_promote(serving: VerifierVersion, drafter: DrafterVersion, replaces: DrafterVersion | None) -> None:
    """Have one promotion made of `drafter`, in the place of `replaces`; another is made once that has ended.

    Also once it has completed: a verifier that comes, goes and comes again asks for the same promotion each time.
    """
    tags = [*_tags(PROMOTE, serving), f"version:{drafter.version}"]
    ended = sum(run.state_type in ENDED for run in _runs(tags))
    run_deployment(
        PROMOTE,
        parameters={"verifier": serving.name, "version": drafter.version},
        timeout=0,
        tags=tags,
        idempotency_key=f"promote:{serving.name}:{drafter.version}:{replaces.version if replaces else 0}:{ended}",
        as_subflow=False,
    )
