"""The files that engines load, brought to where nothing else deletes them, and the memory that they will need."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from flows.errors import FlowError
from flows.registry import DrafterVersion, VerifierVersion
from flows.serving.places import Places
from flows.verifiers import SUFFIX
from flows.workspace import WORKSPACES
from stages.artifacts import staged_directory
from stages.errors import DraftlineError
from stages.installed import Device
from stages.pairing.identity import compute_identity
from stages.pairing.store import MODELS
from stages.params import Params
from stages.serving.fetch import fetch

PROCESS_BYTES = 2 << 30
"""What an engine needs beside weights and cache: libraries, activations, its server."""


def verifier_files(places: Places, verifier: VerifierVersion) -> Path:
    """The verifier's directory, hard-linked from the workspace that has it (copied from another file system).

    Raises:
        FlowError: no workspace of this machine has it.
    """
    final = places.models / verifier.digest[:16]
    if _holds(final, verifier, places):
        return final
    stores = [places.root / WORKSPACES / f"{verifier.name}{suffix}" / MODELS for suffix in ("", SUFFIX)] + [places.root / MODELS]
    for source in (store / verifier.digest[:16] for store in stores):
        if _holds(source, verifier, places):
            with staged_directory(final) as temporary:
                _link(source.resolve(), temporary)
            if _holds(final, verifier, places):
                return final
    raise FlowError(
        f"verifier.{verifier.name} version {verifier.version} ({verifier.digest[:12]}): its files are not on this machine; bring them here: "
        f"python -m flows.verifiers add {verifier.name} --source {verifier.source} --quantization {verifier.quantization}"
    )


def _holds(directory: Path, verifier: VerifierVersion, places: Places) -> bool:
    """Whether this verifier, whole and unaltered, lies there."""
    if not directory.is_dir():
        return False
    try:
        return compute_identity(directory, places.digests).digest == verifier.digest
    except DraftlineError:
        return False


def _link(source: Path, target: Path) -> None:
    for entry in sorted(source.rglob("*")):
        relative = entry.relative_to(source)
        if not entry.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        try:
            # The hub's cache holds links to files: the files themselves are wanted.
            os.link(entry.resolve(), target / relative)
        except OSError:
            # Another file system, or another user's file.
            shutil.copy2(entry, target / relative)


def drafter_files(places: Places, verifier: str, drafter: DrafterVersion, uri: str) -> Path:
    """The drafter's directory, fetched from the registry and held against its digests. Raises VersionError, TrackingError."""
    registered = {"name": drafter.name, "version": drafter.version, "content": drafter.content, "tracking_uri": uri}
    return fetch(registered, places.served / verifier)


def engine_bytes(params: Params, verifier: Path, drafter: Path | None) -> int:
    """Memory that an engine on a CPU will need, by the size of what it loads."""
    weights = sum(file.stat().st_size for directory in (verifier, drafter) if directory is not None for file in directory.glob("*.safetensors"))
    # Half as wide on disk as in memory, in the worst case.
    wider = 2 if params.engine.dtype == "float32" else 1
    return wider * weights + params.engine.kv_cache_bytes + PROCESS_BYTES


def require_memory(needed: int, device: Device) -> None:
    """Is there room for one more engine beside what runs?

    On an accelerator the engine itself looks before it loads anything, and ends with its own message if there is none.

    Raises:
        FlowError: there is not.
    """
    available = psutil.virtual_memory().available
    if device == "cpu" and available < needed:
        raise FlowError(
            f"memory: one more engine needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available; "
            "free some, or make engine.kv_cache_bytes smaller"
        )
