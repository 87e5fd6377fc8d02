"""Directories in memory through which samples travel on one machine, and the removal of those that killed runs have left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from stages.hidden_states.stores import StoreError

SHARED_MEMORY = Path("/dev/shm")
SPOOL_PREFIX = "draftline-spool-"


def _room() -> int:
    """Bytes that fit into shared memory now."""
    return min(shutil.disk_usage(SHARED_MEMORY).free, psutil.virtual_memory().available) if SHARED_MEMORY.is_dir() else 0


def file_system(path: Path) -> str:
    """The kind of file system on which `path` lies, or would."""
    place = path.absolute()
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[str(folder)] for folder in (place, *place.parents) if str(folder) in mounts), "an unknown file system")


@contextmanager
def spool_directory(output: Path, shard_bytes: int) -> Iterator[Path]:
    """An empty directory through which one shard's samples go from the engine to its shard file; removed at the end.

    In memory where there is plenty of it (three times the largest shard: spool, samples and shard may be there at once),
    else `output/work/spool`.
    """
    _remove_all_abandoned()
    spool = output / "work" / "spool"
    shutil.rmtree(spool, ignore_errors=True)
    if _room() > 3 * shard_bytes:
        with suppress(OSError):  # not writable: on disk then
            spool = Path(tempfile.mkdtemp(prefix=SPOOL_PREFIX, dir=SHARED_MEMORY))
    with _locked(spool):
        yield spool


@contextmanager
def memory_spool(budget_bytes: int) -> Iterator[Path]:
    """An empty directory in shared memory, where nothing is ever written to a disk; removed at the end.

    Raises:
        StoreError: shared memory is smaller than the budget.
    """
    _remove_all_abandoned()
    room = _room()
    if room < budget_bytes:
        raise StoreError(f"params.yaml: extraction.budget_bytes = {budget_bytes}: {SHARED_MEMORY} has room for {room}; lower it, or give extraction.spool")
    with _locked(Path(tempfile.mkdtemp(prefix=SPOOL_PREFIX, dir=SHARED_MEMORY))) as spool:
        yield spool


@contextmanager
def _locked(spool: Path) -> Iterator[Path]:
    """A spool is locked while it is used, so that those of killed runs are recognised and removed by the next one: they would hold memory for ever."""
    spool.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(spool, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        spool.mkdir(exist_ok=True)  # another run may have taken it for an abandoned one before it was locked
        yield spool
    finally:
        os.close(descriptor)
        shutil.rmtree(spool, ignore_errors=True)


def _remove_all_abandoned() -> None:
    for leftover in SHARED_MEMORY.glob(f"{SPOOL_PREFIX}*"):
        _remove_abandoned(leftover)


def _remove_abandoned(spool: Path) -> None:
    """Remove a spool that no living process has locked."""
    try:
        descriptor = os.open(spool, os.O_RDONLY)
    except OSError:
        return  # someone else's, or gone by now
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(spool, ignore_errors=True)
    except BlockingIOError:
        return  # in use
    finally:
        os.close(descriptor)
