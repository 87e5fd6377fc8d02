"""A proven tiny pair per test, and MLflow on SQLite without the seconds that its migrations take."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stages.tracking import connect
from tests.register.proven import make_bigram_verifier, write_proven


@pytest.fixture(scope="session")
def proven_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with outputs/, params.yaml and an empty mlflow.db; never written to again."""
    root = tmp_path_factory.mktemp("proven")
    verifier = make_bigram_verifier(tmp_path_factory.mktemp("bigram") / "verifier")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write_proven(root, verifier)
        connect("sqlite:///mlflow.db").search_experiments()
    return root


@pytest.fixture
def proven(proven_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current directory."""
    root = tmp_path / "repository"
    shutil.copytree(proven_template, root, symlinks=True)
    monkeypatch.chdir(root)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return root
