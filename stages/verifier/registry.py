"""`models:/<name>@<alias>` and `models:/<name>/<version>`: a verifier kept in the MLflow registry."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from stages.artifacts import staged_directory
from stages.tracking import connect, tracking_errors
from stages.verifier.sources import one_line, refused


def model_version(source: str, tracking_uri: str) -> tuple[str, str]:
    """Name and version number that `source` means now.

    Raises:
        VerifierError: no such model, version or alias.
        TrackingError: MLflow cannot be reached.
    """
    match = re.fullmatch(r"models:/([^/@]+)(?:/(\d+)|@([^/@]+))", source)
    if match is None:
        raise refused(source, "expected models:/<name>@<alias> or models:/<name>/<version number>")
    name, version, alias = match.groups()
    client = connect(tracking_uri)
    from mlflow.exceptions import MlflowException

    with tracking_errors(tracking_uri):
        try:
            found = client.get_model_version(name, version) if version else client.get_model_version_by_alias(name, alias)
        except MlflowException as error:
            raise refused(source, f"not in the MLflow registry at {tracking_uri}: {one_line(error)}") from None
    return name, str(found.version)


def download_version(source: str, directory: Path, tracking_uri: str) -> Path:
    """Download a registered model and write its Hugging Face directory to `directory`, atomically.

    A version may hold the directory itself, or what `mlflow.transformers` saves: `model/` beside `components/tokenizer/`.
    """
    name, version = model_version(source, tracking_uri)
    client = connect(tracking_uri)
    import mlflow

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download.", dir=directory.parent) as scratch, staged_directory(directory) as staged:
        with tracking_errors(tracking_uri):
            location = client.get_model_version_download_uri(name, version)
            try:
                root = Path(mlflow.artifacts.download_artifacts(artifact_uri=location, dst_path=scratch, tracking_uri=tracking_uri))
            except OSError as error:
                raise refused(source, f"version {version} of {name}: cannot download {location}: {one_line(error)}") from None
        for part in _parts(source, root):
            shutil.copytree(part, staged, dirs_exist_ok=True)
    return directory


def _parts(source: str, root: Path) -> list[Path]:
    if (root / "config.json").is_file():
        return [root]
    if (root / "model" / "config.json").is_file():
        tokenizer = root / "components" / "tokenizer"
        return [root / "model", *([tokenizer] if tokenizer.is_dir() else [])]
    raise refused(source, "its artifact is not a Hugging Face directory (no config.json at its top or in model/)")
