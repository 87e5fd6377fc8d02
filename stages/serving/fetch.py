"""The registered checkpoint, brought here from the registry and held against its digests.

It lands in `outputs/deploy/served/<content>/`, which `dvc repro` never removes: what serves never comes from the
workspace, where a failing stage has already deleted its outputs. `prune` keeps what the plan needs and the one before.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from stages.artifacts import digest_json, read_manifest, staged_directory
from stages.errors import ArtifactError, DraftlineError
from stages.process import OUTPUTS
from stages.tracking import TrackingError, connect, tracking_errors

SERVED = OUTPUTS / "deploy" / "served"
KEPT = 2
"""Checkpoints that stay: the plan's, and the one before it, which a server may still be starting with."""


class VersionError(DraftlineError):
    """The registry does not hold the version, or holds something else under its number."""


def _name(registered: dict[str, Any]) -> str:
    return f"{registered['name']} version {registered['version']}"


def _check(directory: Path, content: str) -> None:
    """Raises ArtifactError unless `directory` is the checkpoint with this content digest."""
    found = digest_json(read_manifest(directory)["files"])
    if found != content:
        raise ArtifactError(f"{directory}: content {found[:12]}, registered is {content[:12]}")


def _is_complete(directory: Path, content: str) -> bool:
    try:
        _check(directory, content)
    except ArtifactError:
        return False
    return True


def _source(uri: str, registered: dict[str, Any]) -> str:
    """Where the registry keeps the version's files.

    Raises:
        VersionError: the version is gone, or another content has its number.
        TrackingError: the registry cannot be asked.
    """
    from mlflow.exceptions import MlflowException

    client = connect(uri)
    with tracking_errors(uri):
        try:
            version = client.get_model_version(registered["name"], str(registered["version"]))
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise VersionError(f"{_name(registered)} is not in the registry (deleted?); register again: dvc repro -f -s register deploy") from None
            raise
        found = version.tags.get("content")
        if found != registered["content"]:
            raise VersionError(f"{_name(registered)}: the registry's content tag is {found!r}, the plan's is {registered['content']!r}; run dvc repro")
        return str(client.get_model_version_download_uri(registered["name"], str(registered["version"])))


def _download(uri: str, source: str, directory: Path) -> None:
    """Download all files below `source` into `directory`. Raises ArtifactError: there are none; TrackingError."""
    import mlflow

    with tracking_errors(uri):
        # A server's answer to a download of what is gone looks like that of one with a fault; its list of files does not.
        if not mlflow.artifacts.list_artifacts(artifact_uri=source, tracking_uri=uri):
            raise ArtifactError(f"there are no files at {source}")
        got = Path(mlflow.artifacts.download_artifacts(artifact_uri=source, dst_path=str(directory), tracking_uri=uri))
    if got != directory:
        for entry in got.iterdir():
            entry.rename(directory / entry.name)
        got.rmdir()


def bring(uri: str, source: str, directory: Path, label: str, content: str) -> None:
    """Download a registered checkpoint into the empty `directory` and hold it against its content digest.

    Args:
        source: where the registry keeps its files.
        label: the version, for messages.
    Raises:
        VersionError: its files are missing, truncated or altered.
        TrackingError: the registry cannot be asked.
    """
    try:
        _download(uri, source, directory)
        _check(directory, content)
    except (ArtifactError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise VersionError(f"{label}: its files in the registry are damaged or missing: {error}") from None


def fetch(registered: dict[str, Any], served: Path = SERVED) -> Path:
    """The directory of a registered version, downloaded unless it is here already; always verified.

    An unreachable registry does not stop what is here and complete; a version that was deleted there does.

    Args:
        registered: content of outputs/register/version.json. The environment's MLFLOW_TRACKING_URI goes before its
            `tracking_uri`, which holds no credentials.
    Raises:
        VersionError: gone from the registry, or its files are missing, truncated or altered.
        TrackingError: the registry cannot be asked, and the files are not here.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or registered["tracking_uri"]
    directory: Path = served / registered["content"][:16]
    complete = _is_complete(directory, registered["content"])
    if complete:
        os.utime(directory)  # used last: see `prune`
    try:
        source = _source(uri, registered)
    except TrackingError as error:
        if not complete:
            raise
        print(f"draftline deploy: {error}; using the verified copy in {directory}", file=sys.stderr)
        return directory
    if not complete:
        with staged_directory(directory) as temporary:
            bring(uri, source, temporary, _name(registered), registered["content"])
    return directory


def prune(current: Path) -> list[Path]:
    """Remove the fetched checkpoints beside `current`, but for the ones fetched last, `KEPT` altogether; returns what was removed."""
    others = [entry for entry in current.parent.iterdir() if entry.is_dir() and not entry.name.startswith(".") and entry != current]
    removed = sorted(others, key=lambda entry: entry.stat().st_mtime_ns, reverse=True)[KEPT - 1 :]
    for entry in removed:
        # Half removed it fails its digests, and is fetched again.
        shutil.rmtree(entry)
    return removed
