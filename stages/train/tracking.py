"""Training curves in MLflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from stages.params import Mlflow
from stages.tracking import connect, experiment_id, tracking_errors


class Log(Protocol):
    """Receives the metrics of a step."""

    def __call__(self, metrics: dict[str, float], step: int) -> None: ...


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


@contextmanager
def tracked(settings: Mlflow, name: str, params: dict[str, Any], tags: dict[str, str]) -> Iterator[Log]:
    """An MLflow run around a training; an exception marks it failed.

    Raises:
        TrackingError: the tracking server cannot be reached.
    """
    uri = settings.tracking_uri
    experiment = experiment_id(connect(uri), uri, settings.experiment)
    import mlflow

    with tracking_errors(uri):
        mlflow.set_tracking_uri(uri)
        run = mlflow.start_run(experiment_id=experiment, run_name=name, tags=tags)
    with run:
        mlflow.log_params(_flat(params))
        yield lambda metrics, step: mlflow.log_metrics(metrics, step=step)
