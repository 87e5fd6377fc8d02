"""`models:` sources follow the alias: what the registry points to now is the verifier, and nothing is downloaded twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.pairing.identity import compute_identity
from stages.tracking import connect, experiment_id
from stages.verifier import registry
from stages.verifier.sources import VerifierError
from tests.tiny import make_verifier
from tests.verifier.running import identity_after

URI = "sqlite:///mlflow.db"


def test_an_alias_is_followed_from_version_to_version(tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    models = {"1": tiny_verifier, "2": make_verifier(tmp_path / "other", seed=1)}
    client = connect(URI)
    client.create_registered_model("target")
    experiment = experiment_id(client, URI, "verifiers")
    for folder in ("", "model"):  # as a plain directory, and as mlflow.transformers lays it out
        number = "2" if folder else "1"
        found = client.create_run(experiment)
        client.log_artifacts(found.info.run_id, str(models[number]), f"target/{folder}".rstrip("/"))
        client.create_model_version("target", f"{found.info.artifact_uri}/target", run_id=found.info.run_id)

    downloads = []
    real = registry.download_version
    monkeypatch.setattr(registry, "download_version", lambda source, *rest: downloads.append(source) or real(source, *rest))

    def identity(source: str) -> str:
        return identity_after(tmp_path, source=source).digest

    with pytest.raises(VerifierError, match=r"models:/target@production.*not in the MLflow registry"):
        identity("models:/target@production")
    for number in ("1", "2", "1"):
        client.set_registered_model_alias("target", "production", number)
        assert identity("models:/target@production") == compute_identity(models[number]).digest
        assert identity(f"models:/target/{number}") == compute_identity(models[number]).digest
    assert downloads == ["models:/target/1", "models:/target/2"]
    with pytest.raises(VerifierError, match="models:/target/3"):
        identity("models:/target/3")
