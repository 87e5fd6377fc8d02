"""Where a flow works: the repository, and the registry that all workspaces share."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from flows.errors import FlowError
from flows.registry import Registry
from stages.params import PARAMS_FILE, Params, read_params

ROOT = "DRAFTLINE_ROOT"
TRACKING = "MLFLOW_TRACKING_URI"
SERVE_PORT = "SERVE_PORT"
BASE_PORT = 8000
"""Where the first verifier's users ask, unless SERVE_PORT says otherwise."""


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


def port(name: str, default: int) -> int:
    """A TCP port that the environment may set. Raises FlowError: not one."""
    text = os.environ.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise FlowError(f"{name} = {text!r}: not a TCP port (1 to 65535)")
    return int(text)


def require_free_port(host: str, number: int, name: str) -> None:
    """Raises FlowError if something listens on a port; `name`: what sets it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probing:
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probing.bind((host, number))
        except OSError as error:
            raise FlowError(f"{host}:{number}: {error.strerror or error}; set {name} to another port, or end what listens there") from None
