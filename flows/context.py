"""Where a flow works: the repository, and the registry that all workspaces share."""

from __future__ import annotations

import os
from pathlib import Path

from flows.errors import FlowError
from flows.registry import Registry
from stages.params import PARAMS_FILE, Params, read_params

ROOT = "DRAFTLINE_ROOT"
TRACKING = "MLFLOW_TRACKING_URI"


def repository() -> Path:
    """The repository: `DRAFTLINE_ROOT`, or the current folder."""
    return Path(os.environ.get(ROOT, ".")).absolute()


def tracking_uri(params: Params) -> str:
    """The registry of all flows: `MLFLOW_TRACKING_URI`, or params.yaml.

    Raises:
        FlowError: an SQLite file, which belongs to one folder; flows work in several.
    """
    uri = os.environ.get(TRACKING) or params.mlflow.tracking_uri
    if uri.startswith("sqlite"):
        raise FlowError(f"mlflow.tracking_uri = {uri!r}: flows need a server that all workspaces share; start one (`make up`) and set {TRACKING}, or the key")
    return uri


def registry() -> Registry:
    """The registry, connected. Raises FlowError, TrackingError."""
    params = read_params(repository() / PARAMS_FILE)
    return Registry(tracking_uri(params), params.mlflow.experiment)
