"""Streamed samples kept on disk by mode hybrid, so that later epochs need not stream them: one plan, at most `limit` bytes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from stages.artifacts import read_json, write_json
from stages.errors import ArtifactError
from stages.hidden_states.envelope import (
    DATA,
    MANIFEST,
    ForeignError,
    Producer,
    TornError,
    from_bytes,
    make_key,
    pack,
    plan_origin,
    require_origin,
    to_bytes,
    unpack,
)
from stages.hidden_states.format import HiddenSample, Plan, plan_differences
from stages.hidden_states.shards import PLAN_FILE, PlanError
from stages.hidden_states.stores import FileStore, StoreError

OWNER = "cache"


class SampleCache:
    """Safe to use from several threads. What is torn counts as absent: a checksum stands with every sample."""

    def __init__(self, directory: Path, plan: Plan, limit: int) -> None:
        """
        Raises:
            PlanError: `directory` was made for another plan; the message names every differing field.
        """
        self.directory = directory
        self.plan = plan
        self.limit = limit
        path = directory / PLAN_FILE
        if path.exists():
            differences = plan_differences(read_json(path), plan.to_json())
            if differences:
                raise PlanError(f"{path}: this cache was made for another plan ({'; '.join(differences)})")
        else:
            if directory.is_dir() and any(directory.iterdir()):
                raise PlanError(f"{path}: absent, but {directory} holds a cache of an unknown plan")
            write_json(path, plan.to_json())
        self._store = FileStore(directory)
        self._origin = plan_origin(plan)
        self._lock = threading.Lock()
        held = self._store.held()
        for name in held:
            # Data without a manifest is a killed writer's.
            if name.startswith(".") or (name.endswith(DATA) and f"{name.removesuffix(DATA)}{MANIFEST}" not in held):
                self._store.remove(name)
        self._kept = {name.removesuffix(MANIFEST) for name in held if name.endswith(MANIFEST) and name != PLAN_FILE}
        self.bytes = sum(item.bytes for name, item in self._store.held().items() if name != PLAN_FILE)
        self._full = False

    def read(self, sample: str, token_ids: list[int]) -> HiddenSample | None:
        """A kept sample with states `[T, L+1, H]`; None: not kept, or not intact."""
        key = make_key(OWNER, sample)
        if key not in self._kept:
            return None
        found = self._read(key)
        if found is None or found[1].tolist() != token_ids:
            with self._lock:
                self._kept.discard(key)
            return None
        states, stored = found
        return HiddenSample(sample, stored, self.plan.tapped(states))

    def _read(self, key: str) -> tuple[Tensor, Tensor] | None:
        try:
            raw = self._store.read(f"{key}{MANIFEST}")
            data = self._store.read(f"{key}{DATA}") if raw is not None else None
            if raw is None or data is None:
                return None
            manifest = from_bytes(key, raw)
            require_origin(manifest, self._origin)
            return unpack(manifest, data)
        except (TornError, ForeignError, StoreError):
            return None

    def write(self, sample: HiddenSample) -> None:
        """Keep a sample, if there is room; never fails."""
        key = make_key(OWNER, sample.id)
        stored = sample.hidden_states[:, [self.plan.layer_ids.index(layer) for layer in self.plan.stored_ids]]
        parts, manifest = pack(key, stored, sample.token_ids, self._origin, Producer(name=OWNER))
        raw = to_bytes(manifest)
        size = manifest.bytes + len(raw)
        with self._lock:
            if self._full or key in self._kept or self.bytes + size > self.limit:
                return
            self._kept.add(key)
            self.bytes += size
        try:
            self._store.write(f"{key}{DATA}", parts)
            self._store.write(f"{key}{MANIFEST}", [raw])
        except StoreError as error:
            with self._lock:
                if not self._full:
                    tqdm.write(f"extract: the cache ends at {self.bytes} bytes: {error}")
                self._full = True
                self._kept.discard(key)


def open_cache(directory: Path, plan: Plan, limit: int) -> SampleCache:
    """The cache in `directory`; one that was made for another plan is not used: said, field by field, and made anew."""
    try:
        return SampleCache(directory, plan, limit)
    except (PlanError, ArtifactError) as error:
        tqdm.write(f"extract: {error}: not used, and made anew")
        shutil.rmtree(directory)
        return SampleCache(directory, plan, limit)
