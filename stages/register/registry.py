"""One version per content, whatever was interrupted before.

Everything is found again by the digest of the checkpoint's files: the run that holds the artifacts (run tag
`content`) and the version (version tag `content`). Each step looks at what is there and adds what is missing, so a
second call repairs what a killed first one left, and a call on finished work changes nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import MANIFEST, canonical_json, digest_json, file_table, read_manifest
from stages.errors import ArtifactError
from stages.tracking import TrackingError, connect, experiment_id, redacted, tracking_errors

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

ARTIFACT = "checkpoint"
ALIAS = "candidate"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint directory that has passed lock and gate, and what is known of it.

    Attributes:
        files: the manifest's table, relative path → {"bytes", "sha256"}.
        verifier: digest of the verifier identity.
        lock: content of verifier_lock.json.
        gate: the gate's verdict.
        acceptance: acceptance length (macro, per kind) and acceptance per position.
        data: digest of the prepared data.
        costs: what the evaluation measured a round to take (`stages.decoding.costs`); None: nothing.
    """

    directory: Path
    files: Mapping[str, Any]
    verifier: str
    lock: Mapping[str, Any]
    gate: str
    acceptance: Mapping[str, Any]
    data: str
    costs: Mapping[str, Any] | None = None

    @property
    def content(self) -> str:
        return digest_json(dict(self.files))

    def tags(self) -> dict[str, str]:
        return {
            "content": self.content,
            "verifier": self.verifier,
            "lock": canonical_json(dict(self.lock)),
            "files": canonical_json(dict(self.files)),
            "gate": self.gate,
            "acceptance_length": f"{self.acceptance['macro']:.4f}",
            "acceptance": canonical_json(dict(self.acceptance)),
            "data": self.data,
            "costs": canonical_json(self.costs),
        }


def register(uri: str, experiment: str, name: str, candidate: Candidate) -> ModelVersion:
    """The version of `candidate` in the registry at `uri`, made, completed or found; `candidate` is its alias.

    Raises:
        TrackingError: MLflow is unreachable, refuses, or does not give back what was uploaded.
    """
    client = connect(uri)
    experiment = experiment_id(client, uri, experiment)
    with tracking_errors(uri):
        version = _find_version(client, name, candidate.content)
        run = _live_run(client, version.run_id) if version else _find_or_create_run(client, experiment, name, candidate.content)
        _ensure_artifacts(client, uri, run, candidate)
        if version is None:
            version = _version_of_run(client, name, run) or _create_version(client, name, run, candidate.tags())
        for key, value in candidate.tags().items():
            if version.tags.get(key) != value:
                client.set_model_version_tag(name, version.version, key, value)
        client.set_registered_model_alias(name, ALIAS, version.version)
        return client.get_model_version(name, version.version)


def _find_version(client: MlflowClient, name: str, content: str) -> ModelVersion | None:
    """The oldest version with this content whose run still exists."""
    found = client.search_model_versions(f"name = '{name}' and tag.`content` = '{content}'")
    for version in sorted(found, key=lambda item: int(item.version)):
        if version.run_id and _live_run(client, version.run_id) is not None:
            return version
    return None


def _live_run(client: MlflowClient, run_id: str) -> Run | None:
    """The run, restored if it was deleted; None if it is gone for good."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    if run.info.lifecycle_stage == "deleted":
        client.restore_run(run_id)
    return run


def _find_or_create_run(client: MlflowClient, experiment: str, name: str, content: str) -> Run:
    """The registration's run of this content; the tag is written together with the run, so an interrupted one is found."""
    runs = client.search_runs([experiment], f"tags.content = '{content}' and tags.model = '{name}'", order_by=["attributes.start_time ASC"], max_results=1)
    if runs:
        return runs[0]
    return client.create_run(experiment, run_name=f"register {name}", tags={"content": content, "model": name})


def _version_of_run(client: MlflowClient, name: str, run: Run) -> ModelVersion | None:
    """A version of this run that lost its content tag."""
    found = client.search_model_versions(f"name = '{name}' and run_id = '{run.info.run_id}'")
    return min(found, key=lambda item: int(item.version), default=None)


def _create_version(client: MlflowClient, name: str, run: Run, tags: dict[str, str]) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return client.create_model_version(name, f"{run.info.artifact_uri}/{ARTIFACT}", run.info.run_id, tags=tags)


@contextmanager
def _stored(client: MlflowClient, uri: str, run: Run, near: Path) -> Iterator[Path]:
    """The run's stored checkpoint as a local directory: the store itself where it is local, else a download."""
    import mlflow

    where = f"{run.info.artifact_uri}/{ARTIFACT}"
    if where.startswith(("file:", "/")):
        yield Path(mlflow.artifacts.download_artifacts(artifact_uri=where, tracking_uri=uri))
        return
    with tempfile.TemporaryDirectory(prefix=".verify.", dir=near) as temporary:
        yield Path(mlflow.artifacts.download_artifacts(artifact_uri=where, dst_path=temporary, tracking_uri=uri))


def _differing(client: MlflowClient, uri: str, run: Run, candidate: Candidate) -> list[str]:
    """Relative paths whose stored content is not the candidate's (read back, not believed)."""
    if not client.list_artifacts(run.info.run_id, ARTIFACT):
        return [*candidate.files]
    with _stored(client, uri, run, candidate.directory.parent) as stored:
        table = file_table(stored)
        differing = [path for path, entry in candidate.files.items() if table.get(path) != entry]
        # The manifest is no part of its own table, and whoever downloads the directory checks it by its manifest.
        manifest = stored / MANIFEST
        if not manifest.is_file() or manifest.read_bytes() != (candidate.directory / MANIFEST).read_bytes():
            differing.append(MANIFEST)
    return differing


def _ensure_artifacts(client: MlflowClient, uri: str, run: Run, candidate: Candidate) -> None:
    """Bring the run's artifacts to the candidate's content and read them back."""
    run_id = run.info.run_id
    if _differing(client, uri, run, candidate):
        client.log_artifacts(run_id, str(candidate.directory), ARTIFACT)
        try:
            read_manifest(candidate.directory)
        except ArtifactError as error:
            raise ArtifactError(f"{error} (it changed while it was uploaded)") from None
        left = _differing(client, uri, run, candidate)
        if left:
            raise TrackingError(f"mlflow.tracking_uri = {redacted(uri)!r}: run {run_id}: {left[0]} was uploaded but reads back differently")
    if run.info.status != "FINISHED":
        client.set_terminated(run_id)
