"""Atomic writes, content digests and manifests: the only code that knows how a file becomes final.

A file is final or absent: it is written to a temporary sibling, flushed to disk and renamed. A directory
carries a `manifest.json` that is written last and holds each file's size and sha256 and the verifier
identity it was made from; a reader refuses a directory without one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.errors import ArtifactError

MANIFEST = "manifest.json"


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content, read in a fixed amount of memory."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def canonical_json(value: object) -> str:
    """The one spelling of `value` that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_json(value: object) -> str:
    """Hex sha256 of a JSON value, independent of key order and white space."""
    return sha256_bytes(canonical_json(value).encode("utf-8"))


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` that becomes `path` if the block ends well and is removed if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes 0600; a final file has the permissions that the user's umask gives.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        fsync_path(temporary)
        temporary.replace(path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file, or leave what was there."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file for people and programs: indented, sorted, no NaN."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file that a stage wrote.

    Raises:
        ArtifactError: absent or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; run the stage that writes it (dvc repro)") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not valid JSON: {error}; run the stage that writes it (dvc repro)") from None


def read_object(path: Path, *required: str) -> dict[str, Any]:
    """Read a JSON object that a stage wrote.

    Raises:
        ArtifactError: absent, not JSON, not an object, or one without a key of `required`.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: expected a JSON object, found {type(value).__name__}; run the stage that writes it again")
    for key in required:
        if key not in value:
            raise ArtifactError(f"{path}: {key} is missing; run the stage that writes it again")
    return value


@contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """A fresh temporary sibling of `final` that replaces it if the block ends well.

    A directory cannot be replaced by one rename: the old one is renamed away first, so a crash in between
    leaves no `final` at all, never a mixture.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for leftover in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
    temporary.chmod(0o755)
    try:
        yield temporary
        for entry in sorted(temporary.rglob("*")):
            fsync_path(entry)
        if final.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
            final.replace(old / "old")
            temporary.replace(final)
            shutil.rmtree(old)
        else:
            temporary.replace(final)
        fsync_path(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def file_table(directory: Path) -> dict[str, dict[str, Any]]:
    """Relative POSIX path → {"bytes", "sha256"} of every file below `directory`, the manifest excepted."""
    return {
        entry.relative_to(directory).as_posix(): {"bytes": entry.stat().st_size, "sha256": sha256_file(entry)}
        for entry in sorted(directory.rglob("*"))
        if entry.is_file() and entry.relative_to(directory).as_posix() != MANIFEST
    }


def write_manifest(directory: Path, verifier: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write `manifest.json` over the files now in `directory`; call it last.

    Args:
        verifier: digest of the verifier identity that the files were made from.
        extra: further keys of the manifest (counts, plan, …).
    """
    manifest: dict[str, Any] = {**(extra or {}), "verifier": verifier, "files": file_table(directory)}
    write_json(directory / MANIFEST, manifest)
    return manifest


def read_manifest(directory: Path, verifier: str | None = None, verify: bool = True, alone: bool = True) -> dict[str, Any]:
    """Read a directory's manifest and hold the files against it.

    Args:
        verifier: digest of the verifier identity that the directory must have been made from.
        verify: also compare contents (sha256); otherwise sizes alone.
        alone: no other file may lie there. vLLM loads every *.safetensors that it finds in a checkpoint.

    Raises:
        ArtifactError: no manifest, another verifier, a file that is missing, altered or not listed.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ArtifactError(f"{directory}: incomplete (no {MANIFEST}); run the stage that writes it again")
    manifest = read_object(path, "verifier", "files")
    table = manifest["files"]
    if not isinstance(table, dict) or not all(isinstance(entry, dict) and {"bytes", "sha256"} <= set(entry) for entry in table.values()):
        raise ArtifactError(f"{path}: files does not hold bytes and sha256 of each; run the stage that writes it again")
    if verifier is not None and manifest["verifier"] != verifier:
        raise ArtifactError(f"{path}: made for verifier {manifest['verifier'][:12]}, the current one is {verifier[:12]}; run dvc repro")
    for name, entry in manifest["files"].items():
        file = directory / name
        if not file.is_file():
            raise ArtifactError(f"{file}: missing, but listed in {path}")
        if file.stat().st_size != entry["bytes"]:
            raise ArtifactError(f"{file}: {file.stat().st_size} bytes, {path} says {entry['bytes']}")
        if verify and sha256_file(file) != entry["sha256"]:
            raise ArtifactError(f"{file}: content differs from the sha256 in {path}")
    if alone:
        for file in sorted(directory.rglob("*")):
            if not file.is_dir() and file != path and file.relative_to(directory).as_posix() not in manifest["files"]:
                raise ArtifactError(f"{file}: not listed in {path}; remove it, or run the stage that writes {directory} again")
    return manifest
