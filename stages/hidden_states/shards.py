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
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from safetensors import safe_open

from stages.artifacts import atomic_path, read_json, sha256_file, write_json
from stages.errors import ArtifactError
from stages.hidden_states.files import remove_leftovers, save_tensors
from stages.hidden_states.format import HiddenSample, Plan, SampleMismatch, UnusableSampleError, plan_differences
from stages.pairing.signatures import DigestCache
from stages.params_file import describe

PLAN_FILE = "plan.json"
FORMAT = 1
DIGESTS = "digests.json"
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
        rows = {index: row for index in range(plan.shards) if (row := self._row(index)) is not None}
        digests = DigestCache(None).digests([(directory / row.file, "raw") for row in rows.values()])
        self.finished = {index: row for (index, row), digest in zip(rows.items(), digests, strict=True) if digest == row.sha256}

    def _row(self, index: int) -> ShardEntry | None:
        """The row of a shard whose file is there; one that cannot be read is none."""
        try:
            row = ShardEntry(**read_json(self.directory / f"{shard_name(index)}.json"))
        except (ArtifactError, TypeError):
            return None
        return row if (self.directory / row.file).is_file() else None

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


class ShardRow(BaseModel):
    """What the manifest says of a shard: `ShardEntry` without the samples that are missing."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    file: str
    bytes: int
    sha256: str
    ids: list[str]
    tokens: list[int]

    @model_validator(mode="after")
    def _one_length_each(self) -> ShardRow:
        if len(self.ids) != len(self.tokens):
            raise ValueError(f"{len(self.ids)} ids and {len(self.tokens)} tokens: one of each per sample")
        return self


class DumpManifest(BaseModel):
    """`outputs/extract/manifest.json` of a dump."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: int
    verifier: str
    plan: dict[str, Any]
    directory: str
    samples: int
    tokens: int
    rejected: dict[str, str]
    shards: list[ShardRow]


class Dump:
    """A finished dump, read sample by sample. Safe to use from several threads."""

    def __init__(self, directory: Path, plan: Plan, shards: list[ShardRow]) -> None:
        self.directory = directory
        self.plan = plan
        self._places: dict[str, tuple[str, int, int]] = {}
        for shard in shards:
            start = 0
            for sample, tokens in zip(shard.ids, shard.tokens, strict=True):
                self._places[sample] = (shard.file, start, start + tokens)
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

    Every shard is held against its digest; the digests are remembered beside the manifest, and a shard that nobody wrote to is not
    read again.

    Args:
        verifier: digest of the identity that the states must have come from.
    Raises:
        ArtifactError: no manifest (an interrupted dump has none), one that extract has not written, another verifier, a shard that is
            missing or has other content.
    """
    if not manifest_path.is_file():
        raise ArtifactError(f"{manifest_path}: no such file; the extraction is not finished (dvc repro extract)")
    manifest = read_json(manifest_path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = f"format {manifest.get('format')!r}" if isinstance(manifest, dict) else f"a {type(manifest).__name__}"
        raise ArtifactError(f"{manifest_path}: {found}, this version reads format {FORMAT}; {REDO}")
    try:
        listed = DumpManifest.model_validate(manifest)
        plan = Plan.from_json(listed.plan)
    except ValidationError as error:
        raise ArtifactError(f"{describe(error, manifest_path)}; {REDO}") from None
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{manifest_path}: plan: {error}; {REDO}") from None
    if listed.verifier != verifier:
        raise ArtifactError(f"{manifest_path}: states of verifier {listed.verifier[:12]}, the current one is {verifier[:12]}; run dvc repro")
    directory = manifest_path.parent / listed.directory
    for shard in listed.shards:
        file = directory / shard.file
        if not file.is_file():
            raise ArtifactError(f"{file}: missing, but listed in {manifest_path}; {REDO}")
        if file.stat().st_size != shard.bytes:
            raise ArtifactError(f"{file}: {file.stat().st_size} bytes, {manifest_path} says {shard.bytes}; {REDO}")
    digests = DigestCache(manifest_path.parent / DIGESTS).digests([(directory / shard.file, "raw") for shard in listed.shards])
    for shard, digest in zip(listed.shards, digests, strict=True):
        if digest != shard.sha256:
            raise ArtifactError(f"{directory / shard.file}: content differs from the sha256 in {manifest_path}; {REDO}")
    return Dump(directory, plan, listed.shards)
