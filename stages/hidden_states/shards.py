"""A dump of hidden states on disk: shards that are final or absent, and the manifest that makes them readable.

    dumps/<plan digest>/plan.json                     written first: what this directory is for
    dumps/<plan digest>/shard-00000.safetensors       hidden_states [sum T, ids, H], token_ids [sum T] int32, offsets [n+1] int64
    dumps/<plan digest>/shard-00000.json              that shard's row of the manifest: it exists once the shard is final
    dumps/<plan digest>/digests.json                  digests of shards by file signature: unchanged shards are not read again
    manifest.json                                     written last: plan, table of shards, name of the directory

Without a manifest there is no dump: an interrupted one cannot be read, only continued by the same plan.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import platform
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, FailFast, NonNegativeInt, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from stages.artifacts import atomic_path, read_json, write_json
from stages.errors import ArtifactError
from stages.hidden_states.files import remove_leftovers, save_tensors
from stages.hidden_states.format import HiddenSample, Plan, SampleMismatch, UnusableSampleError, all_finite, plan_differences
from stages.pairing.signatures import DigestCache
from stages.params_file import describe

PLAN_FILE = "plan.json"
DIGESTS = "digests.json"
FORMAT = 1
OPEN_SHARDS = 64
"""Shards that a reader keeps open (mapped, not loaded)."""
STORED_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""safetensors' names of the dtypes that a plan may have."""
REDO = "run `dvc repro --force --single-item extract`, then `dvc repro`"
"""What mends a manifest whose shards are gone or altered: the same plan writes those shards again."""
REMAKE = f"delete it, then {REDO}"
"""What mends a shard that is as it was written, and wrong: as long as it is there, extract keeps it."""


class PlanError(ArtifactError):
    """A directory holds a dump that follows another plan."""


@dataclass(frozen=True)
class Shard:
    """One shard's row of the manifest.

    Attributes:
        file: name in the dump's directory.
        bytes, sha256: of the file.
        ids, tokens: sample ids and lengths, in file order.
    """

    file: str
    bytes: int
    sha256: str
    ids: Annotated[list[str], FailFast()]
    tokens: Annotated[list[NonNegativeInt], FailFast()]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.tokens):
            raise ValueError(f"{len(self.ids)} ids, but tokens of {len(self.tokens)} samples")


@dataclass(frozen=True)
class ShardEntry(Shard):
    """What stands next to a shard.

    Attributes:
        rejected: id → reason of the samples that should have been in this shard.
    """

    rejected: dict[str, str]


ENTRY = TypeAdapter(ShardEntry)


class DumpManifest(BaseModel):
    """What is read of a dump's manifest."""

    verifier: str
    plan: Plan
    directory: str
    shards: Annotated[list[Shard], FailFast()]


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold a lock file. It only saves work: where there can be none (read-only, a file system without locks), the block runs all the same."""
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield


def shard_digests(directory: Path, files: Sequence[str]) -> list[str]:
    """sha256 of each shard; those that nobody wrote to since they were last read are not read again.

    The processes of one node take turns: the first reads, the others find what it has remembered. Nodes do not wait for each
    other: to each the same file can have another signature.

    Raises:
        ArtifactError: a shard cannot be read, or changes while it is.
    """
    try:
        with _turn(directory / f"{DIGESTS}.{platform.node()}.lock"):
            return DigestCache(directory / DIGESTS).digests([(directory / file, "raw") for file in files])
    except OSError as error:
        raise ArtifactError(f"{error.filename or directory}: cannot be read: {error.strerror or error}; make it readable, or {REMAKE}") from None


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
            try:
                differences = plan_differences(read_json(path), wanted)
            except ArtifactError:
                raise PlanError(f"{path}: not valid JSON; delete {directory}") from None
            if differences:
                raise PlanError(f"{path}: this dump follows another plan ({'; '.join(differences)}); use another directory or delete this one")
        else:
            if any(directory.glob("shard-*")):
                raise PlanError(f"{path}: absent, but {directory} holds shards of an unknown plan; delete the directory")
            write_json(path, wanted)
        remove_leftovers(directory)
        rows = {index: row for index in range(plan.shards) if (row := self._row(index)) is not None}
        digests = shard_digests(directory, [row.file for row in rows.values()])
        self.finished = {index: row for (index, row), digest in zip(rows.items(), digests, strict=True) if digest == row.sha256}

    def _row(self, index: int) -> ShardEntry | None:
        """What stands next to a shard; None unless both are there, and of the right size. A shard without is written again."""
        file = self.directory / f"{shard_name(index)}.safetensors"
        try:
            row = ENTRY.validate_json((self.directory / f"{shard_name(index)}.json").read_bytes(), strict=True)
        except (FileNotFoundError, ValidationError):
            return None
        return row if row.file == file.name and file.is_file() and file.stat().st_size == row.bytes else None

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
        # Remembered with it, so that whoever opens the dump need not read it for that.
        (digest,) = shard_digests(self.directory, [path.name])
        entry = ShardEntry(path.name, path.stat().st_size, digest, [sample.id for sample in samples], tokens, dict(rejected or {}))
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

    def __init__(self, directory: Path, plan: Plan, shards: Sequence[Shard]) -> None:
        self.directory = directory
        self.plan = plan
        self._places: dict[str, tuple[str, int, int]] = {}
        self._tokens = {shard.file: sum(shard.tokens) for shard in shards}
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
            ArtifactError: the shard is gone or does not hold what the plan says; or the sample's states are not finite, which
                training would only notice as a loss that is not.
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
        owned = states.clone() if tapped is states else tapped
        if not all_finite(owned):
            raise ArtifactError(f"{self.directory / file}: sample {sample}: hidden states that are not finite; {REMAKE}")
        return HiddenSample(sample, token_ids, owned)

    def _shard(self, file: str) -> Any:
        handle = self._open.get(file)
        if handle is None:
            handle = self._opened(file)
            self._open[file] = handle
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(file)
        return handle

    def _opened(self, file: str) -> Any:
        path, tokens = self.directory / file, self._tokens[file]
        wanted = {
            "hidden_states": (STORED_DTYPES.get(self.plan.dtype, self.plan.dtype), [tokens, len(self.plan.stored_ids), self.plan.hidden_size]),
            "token_ids": ("I32", [tokens]),
        }
        try:
            handle: Any = safe_open(path, framework="pt")
            for name, (dtype, shape) in wanted.items():
                stored = handle.get_slice(name)
                if (stored.get_dtype(), stored.get_shape()) != (dtype, shape):
                    raise ArtifactError(f"{path}: {name} is {stored.get_dtype()} {stored.get_shape()}, expected {dtype} {shape}; {REMAKE}")
        except FileNotFoundError:
            raise ArtifactError(f"{path}: missing; {REDO}") from None
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{path}: {error}; {REMAKE}") from None
        return handle


def open_dump(manifest_path: Path, verifier: str) -> Dump:
    """Open the dump that a manifest names.

    Contents are compared here and not when a shard is first read: a flipped byte stops training before its first step, and
    several shards are hashed at a time. That reads the dump once; as long as no shard changes, opening it again (also by another
    process, and right after extract has written it) compares file signatures alone.

    Args:
        verifier: digest of the identity that the states must have come from.
    Raises:
        ArtifactError: no manifest (an interrupted dump has none) or none that extract writes, another verifier, a shard that is
            missing or altered.
    """
    if not manifest_path.is_file():
        raise ArtifactError(f"{manifest_path}: no such file; the extraction is not finished (dvc repro extract)")
    found = read_json(manifest_path)
    if not isinstance(found, dict):
        raise ArtifactError(f"{manifest_path}: {type(found).__name__} there, an object wanted; {REDO}")
    if found.get("format") != FORMAT:
        raise ArtifactError(f"{manifest_path}: format {found.get('format')!r}, this version reads {FORMAT}; {REDO}")
    try:
        # As JSON: a plan's tuple is a list there, which strict Python values may not be.
        manifest = DumpManifest.model_validate_json(manifest_path.read_bytes(), strict=True)
    except ValidationError as error:
        raise ArtifactError(f"{describe(error, manifest_path)}; {REDO}") from None
    if manifest.verifier != verifier:
        raise ArtifactError(f"{manifest_path}: states of verifier {manifest.verifier[:12]}, the current one is {verifier[:12]}; run dvc repro")
    directory = manifest_path.parent / manifest.directory
    for shard in manifest.shards:
        file = directory / shard.file
        if not file.is_file():
            raise ArtifactError(f"{file}: missing, but listed in {manifest_path}; {REDO}")
        if file.stat().st_size != shard.bytes:
            raise ArtifactError(f"{file}: {file.stat().st_size} bytes, {manifest_path} says {shard.bytes}; {REDO}")
    for shard, digest in zip(manifest.shards, shard_digests(directory, [shard.file for shard in manifest.shards]), strict=True):
        if digest != shard.sha256:
            raise ArtifactError(f"{directory / shard.file}: content differs from the sha256 in {manifest_path}; {REDO}")
    return Dump(directory, manifest.plan, manifest.shards)
