"""Digests of large files, remembered by file signature: a file that nobody wrote to is not read again.

A signature is (device, inode, size, mtime, ctime). Nobody but the kernel sets a ctime, so a write that restores size and
mtime still changes it. A digest is only remembered when the last change is older than the clock's tick at the moment
reading starts; otherwise a second write in the same tick would go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stages.artifacts import canonical_json, sha256_bytes, write_atomic
from stages.errors import ArtifactError

FORMAT = 1
KEEP = 8192
"""Remembered digests; the oldest go first. A model of 100 shards takes 100."""
TICK_NS = 50_000_000
CHUNK = 4 << 20
PROGRESS_BYTES = 4 << 30
"""From here on hashing takes seconds, so it shows a progress bar."""

Progress = Callable[[int], object]
Job = tuple[Path, str]
"""A file and how it is digested: `raw` (its bytes), `json` (its value, see `normalised_json`) or `tokenizer` (as `json`, its main parts checked)."""


def signature(path: Path) -> str:
    """`device:inode:size:mtime_ns:ctime_ns` of the file that `path` leads to."""
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def normalised_json(data: bytes, path: Path) -> object:
    """A JSON file as a value; a tokenizer's merges as pairs, whichever way they are spelt ("a b" or ["a", "b"])."""
    try:
        content = json.loads(data)
    except ValueError as error:
        raise ArtifactError(f"{path}: not valid JSON: {error}") from None
    model = content.get("model") if isinstance(content, dict) else None
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        model["merges"] = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    return content


def _hash_raw(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            progress(count)
    return digest.hexdigest()


def _hash_json(path: Path, progress: Progress, check: Callable[[object, Path], object] = lambda content, path: None) -> str:
    data = path.read_bytes()
    content = normalised_json(data, path)
    check(content, path)
    progress(len(data))
    return sha256_bytes(canonical_json(content).encode("utf-8", "surrogatepass"))


def check_tokenizer(content: object, path: Path) -> None:
    """Refuse a tokenizer.json without the parts that every loader reads.

    Raises:
        ArtifactError: no model or no added_tokens.
    """
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: expected a JSON object, found {type(content).__name__}")
    for field, kind, allowed in (("model", dict, "an object"), ("added_tokens", list, "a list")):
        if not isinstance(content.get(field), kind):
            found = f"a value of type {type(content[field]).__name__}" if field in content else "absent"
            raise ArtifactError(f"{path}: {field} is {found}: expected {allowed}, as the tokenizers library writes it")


def _hash_tokenizer(path: Path, progress: Progress) -> str:
    return _hash_json(path, progress, check_tokenizer)


METHODS: dict[str, Callable[[Path, Progress], str]] = {"raw": _hash_raw, "json": _hash_json, "tokenizer": _hash_tokenizer}


class DigestCache:
    """Digests by signature, kept in a JSON file that is replaced atomically.

    Two processes may write it at the same time: one loses what it remembered, which costs a second reading and nothing else.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.entries: dict[str, str] = {}
        if path is not None:
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
                if stored["format"] == FORMAT:
                    self.entries = dict(stored["digests"])
            except (OSError, ValueError, KeyError, TypeError):
                self.entries = {}  # it only saves time: an absent or damaged file is an empty one

    def remember(self, path: Path, method: str, digest: str) -> None:
        """Take `digest` for the digest of `path` until the file's signature changes."""
        key = f"{method}:{signature(path)}"
        self.entries.pop(key, None)
        self.entries[key] = digest

    def digests(self, jobs: Sequence[Job]) -> list[str]:
        """Digest of each job, in order; files whose signature is unknown are read, several at a time.

        Raises:
            ArtifactError: a file changed while it was being read.
        """
        known = [self.entries.get(f"{method}:{signature(path)}") for path, method in jobs]
        missing = [index for index, digest in enumerate(known) if digest is None]
        if missing:
            for index, (digest, stable) in zip(missing, _hash_all([jobs[index] for index in missing]), strict=True):
                known[index] = digest
                if stable:
                    self.remember(*jobs[index], digest)
            self.save()
        return [digest for digest in known if digest is not None]

    def save(self) -> None:
        if self.path is not None:
            self.entries = dict(list(self.entries.items())[-KEEP:])
            write_atomic(self.path, json.dumps({"format": FORMAT, "digests": self.entries}))  # in order of age: not sorted


def _hash_all(jobs: list[Job]) -> list[tuple[str, bool]]:
    total = sum(path.stat().st_size for path, _ in jobs)
    threads = max(1, min(len(jobs), os.cpu_count() or 1, 8))
    if total < PROGRESS_BYTES:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda job: _hash_one(job, lambda _: None), jobs))
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc="digest") as bar, ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda job: _hash_one(job, bar.update), jobs))


def _hash_one(job: Job, progress: Progress) -> tuple[str, bool]:
    """Digest of one file, and whether its signature can stand for its content from now on."""
    path, method = job
    age = time.time_ns() - path.stat().st_ctime_ns
    if 0 <= age < TICK_NS:
        time.sleep((TICK_NS - age) / 1e9)
    before = signature(path)
    stable = time.time_ns() - path.stat().st_ctime_ns >= TICK_NS  # false where a file server's clock runs ahead
    digest = METHODS[method](path, progress)
    if signature(path) != before:
        raise ArtifactError(f"{path}: changed while it was being read; run again when nothing writes to it")
    return digest, stable
