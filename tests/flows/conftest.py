"""A site that serves, for each test its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.serving.reconcile import PlanBuilder
from stages.servers import free_port
from stages.tracking import connect
from tests.flows.site import Site


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty registry; its migrations take seconds."""
    folder = tmp_path_factory.mktemp("registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        connect("sqlite:///mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def build() -> PlanBuilder | None:
    """What makes the engines' commands; None: a small process stands in vLLM's place."""
    return None


@pytest.fixture
def site(build: PlanBuilder | None, database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    # pytest's own folders have paths too long for sockets.
    with tempfile.TemporaryDirectory(prefix="dl-") as folder:
        monkeypatch.chdir(folder)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with Site(Path(folder).resolve(), database, free_port(), build) as found:
            yield found
