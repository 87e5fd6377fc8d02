"""Runs that flows ask for: each is found again by its tags, and made once however often it is asked for. And whether one would ever start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, StateType, WorkPoolStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from flows.decision import Attempts
from flows.errors import FlowError
from flows.registry import DrafterVersion, VerifierVersion

RETRAIN = "retrain/default"
PROMOTE = "promote/default"
DEPLOYED = ("watch-verifier/default", RETRAIN, PROMOTE, "serve/default")
FAILED = (StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)
ENDED = (*FAILED, StateType.COMPLETED)


@contextmanager
def _prefect() -> Iterator[SyncPrefectClient]:
    """Prefect's server, to be asked inside the block. Raises FlowError: it does not answer."""
    try:
        with get_client(sync_client=True) as client:
            yield client
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        raise FlowError(f"Prefect does not answer at {PREFECT_API_URL.value()} (PREFECT_API_URL): {' '.join(str(error).split())}") from None


def _tags(kind: str, verifier: VerifierVersion) -> list[str]:
    return [kind, f"verifier:{verifier.name}", f"identity:{verifier.digest[:16]}"]


def _runs(tags: list[str]) -> list[FlowRun]:
    """The newest first."""
    with _prefect() as client:
        return client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=tags)), sort=FlowRunSort.START_TIME_DESC)


def last_run(name: str) -> FlowRun | None:
    """The newest retrain run for a verifier, of any identity."""
    return next(iter(_runs([RETRAIN, f"verifier:{name}"])), None)


@dataclass(frozen=True)
class Unready:
    """Why runs do not start. `lost`: one that is asked for now never will, whatever is mended."""

    why: str
    lost: bool

    def __str__(self) -> str:
        return self.why


def unready(deployed: Sequence[str] = DEPLOYED) -> Unready | None:
    """Why runs that are asked for would not start; None: a worker takes them. Prefect takes a run without a word that nothing will ever start.

    Args:
        deployed: the deployments that are looked at.
    Raises:
        FlowError: Prefect does not answer.
    """
    pools = set()
    with _prefect() as client:
        for name in deployed:
            try:
                deployment = client.read_deployment_by_name(name)
            except ObjectNotFound:
                return Unready(f"{name} is not deployed; deploy the flows (make up, or prefect deploy --all)", lost=True)
            if deployment.work_pool_name is None:
                return Unready(
                    f"the work pool of {name} was deleted: its runs stay scheduled; deploy the flows anew (make up, or prefect deploy --all)", lost=True
                )
            pools.add(deployment.work_pool_name)
        for pool in sorted(pools):
            status = client.read_work_pool(pool).status
            if status is not WorkPoolStatus.READY:
                why = "is paused" if status is WorkPoolStatus.PAUSED else "has no worker"
                return Unready(f"work pool {pool} {why}: runs stay scheduled until one takes them (make up, or prefect worker start --pool {pool})", lost=False)
    return None


def retrain_attempts(serving: VerifierVersion) -> Attempts:
    """The retrain runs that Prefect knows for this identity."""
    runs = _runs(_tags(RETRAIN, serving))
    return Attempts(
        failed=sum(run.state_type in FAILED for run in runs),
        completed=sum(run.state_type is StateType.COMPLETED for run in runs),
        running=any(run.state_type not in ENDED for run in runs),
    )


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
