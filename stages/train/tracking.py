"""Training curves in MLflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from stages.errors import DraftlineError
from stages.params import Mlflow


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
        DraftlineError: the tracking server cannot be reached.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        mlflow.set_tracking_uri(settings.tracking_uri)
        mlflow.set_experiment(settings.experiment)
        run = mlflow.start_run(run_name=name, tags=tags)
    except (MlflowException, OSError) as error:
        raise DraftlineError(f"params.yaml: mlflow.tracking_uri = {settings.tracking_uri!r}: not reachable: {str(error).splitlines()[0]}") from None
    with run:
        mlflow.log_params(_flat(params))
        yield lambda metrics, step: mlflow.log_metrics(metrics, step=step)
