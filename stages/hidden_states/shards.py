"""A dump of hidden states on disk: shards that are final or absent, and the manifest that makes them readable.

    dumps/<plan digest>/plan.json                     written first: what this directory is for
    dumps/<plan digest>/shard-00000.safetensors       hidden_states [sum T, ids, H], token_ids [sum T] int32, offsets [n+1] int64
    dumps/<plan digest>/shard-00000.json              that shard's row of the manifest: it exists once the shard is final
    manifest.json                                     written last: plan, table of shards, name of the directory

Without a manifest there is no dump: an interrupted one cannot be read, only continued by the same plan.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stages.artifacts import atomic_path, read_json, sha256_file, write_json
from stages.errors import ArtifactError
from stages.hidden_states.files import remove_leftovers, save_tensors
from stages.hidden_states.format import HiddenSample, Plan, SampleMismatch, UnusableSampleError, plan_differences

PLAN_FILE = "plan.json"
FORMAT = 1
OPEN_SHARDS = 64
"""Shards that a reader keeps open (mapped, not loaded)."""


class PlanError(ArtifactError):
    """A directory holds a dump that follows another plan."""


@dataclass(frozen=True)
class ShardEntry:
    """One shard's row of the manifest.

    Attributes:
        file: name in the dump's directory.
        bytes, sha256: of the file.
        ids, tokens: sample ids and lengths, in file order.
        rejected: id → reason of the samples that should have been in this shard.
    """

    file: str
    bytes: int
    sha256: str
    ids: list[str]
    tokens: list[int]
    rejected: dict[str, str]


class ShardWriter:
    """Writes the shards of one plan into `directory` and knows which are already final."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        """
        Raises:
            PlanError: `directory` follows another plan; the message names every differing field.
        """
        self.directory = directory
        self.plan = plan
        directory.mkdir(parents=True, exist_ok=True)
        wanted = plan.to_json()
        path = directory / PLAN_FILE
        if path.exists():
            differences = plan_differences(read_json(path), wanted)
            if differences:
                raise PlanError(f"{path}: this dump follows another plan ({'; '.join(differences)}); use another directory or delete this one")
        else:
            if any(directory.glob("shard-*")):
                raise PlanError(f"{path}: absent, but {directory} holds shards of an unknown plan; delete the directory")
            write_json(path, wanted)
        remove_leftovers(directory)
        self.finished: dict[int, ShardEntry] = {}
        for index in range(plan.shards):
            entry = self._final(index)
            if entry is not None:
                self.finished[index] = entry

    def _final(self, index: int) -> ShardEntry | None:
        row = self.directory / f"{shard_name(index)}.json"
        if not row.is_file():
            return None
        entry = ShardEntry(**read_json(row))
        file = self.directory / entry.file
        return entry if file.is_file() and file.stat().st_size == entry.bytes else None

    def write(self, index: int, samples: Iterable[HiddenSample], rejected: Mapping[str, str] | None = None) -> ShardEntry:
        """Make shard `index` final.

        Args:
            samples: with `hidden_states` `[T, stored ids, H]` (each id once), in data set order.
            rejected: id → reason of the samples that are left out.
        """
        samples = list(samples)
        tokens = [len(sample.token_ids) for sample in samples]
        offsets = torch.tensor([0, *tokens], dtype=torch.int64).cumsum(0)
        states = torch.empty((int(offsets[-1]), len(self.plan.stored_ids), self.plan.hidden_size), dtype=getattr(torch, self.plan.dtype))
        token_ids = torch.empty(int(offsets[-1]), dtype=torch.int32)
        for sample, start, end in zip(samples, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            states[start:end] = sample.hidden_states
            token_ids[start:end] = sample.token_ids
        path = self.directory / f"{shard_name(index)}.safetensors"
        with atomic_path(path) as temporary:
            save_tensors(temporary, {"hidden_states": states, "token_ids": token_ids, "offsets": offsets})
        entry = ShardEntry(path.name, path.stat().st_size, sha256_file(path), [sample.id for sample in samples], tokens, dict(rejected or {}))
        write_json(self.directory / f"{shard_name(index)}.json", dataclasses.asdict(entry))
        self.finished[index] = entry
        return entry

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.plan.shards

    def write_manifest(self, path: Path) -> dict[str, Any]:
        """Make the dump readable; call it when all shards are final."""
        assert self.complete
        entries = [self.finished[index] for index in range(self.plan.shards)]
        manifest = {
            "format": FORMAT,
            "verifier": self.plan.verifier,
            "plan": self.plan.to_json(),
            "directory": Path(os.path.relpath(self.directory, path.parent)).as_posix(),
            "samples": sum(len(entry.ids) for entry in entries),
            "tokens": sum(sum(entry.tokens) for entry in entries),
            "rejected": {sample: reason for entry in entries for sample, reason in entry.rejected.items()},
            "shards": [{key: value for key, value in dataclasses.asdict(entry).items() if key != "rejected"} for entry in entries],
        }
        write_json(path, manifest)
        return manifest


def shard_name(index: int) -> str:
    return f"shard-{index:05d}"


class Dump:
    """A finished dump, read sample by sample. Safe to use from several threads."""

    def __init__(self, directory: Path, plan: Plan, shards: list[Mapping[str, Any]]) -> None:
        self.directory = directory
        self.plan = plan
        self._places: dict[str, tuple[str, int, int]] = {}
        for shard in shards:
            start = 0
            for sample, tokens in zip(shard["ids"], shard["tokens"], strict=True):
                self._places[sample] = (shard["file"], start, start + tokens)
                start += tokens
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def ids(self) -> list[str]:
        """Ids of the samples that can be read, in data set order."""
        return list(self._places)

    def __contains__(self, sample: str) -> bool:
        return sample in self._places

    def __len__(self) -> int:
        return len(self._places)

    def tokens(self, sample: str) -> int:
        """Length of a sample."""
        _, start, end = self._places[sample]
        return end - start

    def read(self, sample: str, expected_token_ids: list[int] | None) -> HiddenSample:
        """Read one sample: a slice of a mapped file, copied once, nothing else of its shard is touched.

        Args:
            expected_token_ids: the data set's tokens, compared with the stored ones; None compares nothing.
        Returns:
            States `[T, L+1, H]` that the caller owns.
        Raises:
            UnusableSampleError: the dump holds no such sample.
            SampleMismatch: other tokens under its id.
        """
        place = self._places.get(sample)
        if place is None:
            raise UnusableSampleError(f"{self.directory}: no hidden states of sample {sample} (rejected when they were extracted, or of other data)")
        file, start, end = place
        with self._lock:
            shard = self._shard(file)
            stored = shard.get_slice("token_ids")[start:end]
            states = shard.get_slice("hidden_states")[start:end]
        token_ids = stored.to(torch.int64)
        if expected_token_ids is not None:
            if len(expected_token_ids) != end - start:
                raise SampleMismatch(f"{self.directory / file}: sample {sample} has {end - start} tokens, the data set's has {len(expected_token_ids)}")
            if token_ids.tolist() != expected_token_ids:
                raise SampleMismatch(f"{self.directory / file}: sample {sample} was extracted from other tokens than the data set's")
        # The copy is what reads the disk; it happens outside the lock and leaves no view of the mapping behind.
        tapped = self.plan.tapped(states)
        return HiddenSample(sample, token_ids, states.clone() if tapped is states else tapped)

    def _shard(self, file: str) -> Any:
        handle = self._open.get(file)
        if handle is None:
            try:
                handle = safe_open(self.directory / file, framework="pt")
            except FileNotFoundError:
                raise ArtifactError(f"{self.directory / file}: missing; {REDO}") from None
            self._open[file] = handle
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(file)
        return handle


REDO = "run `dvc repro --force --single-item extract`, then `dvc repro`"
"""What mends a manifest whose shards are gone: the same plan writes the same shards again."""


def open_dump(manifest_path: Path, verifier: str) -> Dump:
    """Open the dump that a manifest names.

    Args:
        verifier: digest of the identity that the states must have come from.
    Raises:
        ArtifactError: no manifest (an interrupted dump has none), another verifier, a shard that is missing or has another size.
    """
    if not manifest_path.is_file():
        raise ArtifactError(f"{manifest_path}: no such file; the extraction is not finished (dvc repro extract)")
    manifest = read_json(manifest_path)
    if manifest.get("format") != FORMAT:
        raise ArtifactError(f"{manifest_path}: format {manifest.get('format')!r}, this version reads {FORMAT}; {REDO}")
    if manifest["verifier"] != verifier:
        raise ArtifactError(f"{manifest_path}: states of verifier {manifest['verifier'][:12]}, the current one is {verifier[:12]}; run dvc repro")
    directory = manifest_path.parent / manifest["directory"]
    for shard in manifest["shards"]:
        file = directory / shard["file"]
        if not file.is_file():
            raise ArtifactError(f"{file}: missing, but listed in {manifest_path}; {REDO}")
        if file.stat().st_size != shard["bytes"]:
            raise ArtifactError(f"{file}: {file.stat().st_size} bytes, {manifest_path} says {shard['bytes']}; {REDO}")
    return Dump(directory, Plan.from_json(manifest["plan"]), manifest["shards"])
