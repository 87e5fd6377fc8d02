"""Room for a dump, and the dumps that are kept."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from stages.artifacts import read_json
from stages.errors import ArtifactError, DraftlineError
from stages.hidden_states.format import Plan, estimate_bytes
from stages.hidden_states.shards import PLAN_FILE

SHARED_MEMORY = Path("/dev/shm")
SPOOL_PREFIX = "draftline-spool-"


class RoomError(DraftlineError):
    """The estimated dump does not fit."""


@contextmanager
def spool_directory(output: Path, shard_bytes: int) -> Iterator[Path]:
    """An empty directory through which one shard's samples go from the engine to its shard file; removed at the end.

    In memory where there is plenty of it (three times the largest shard: spool, samples and shard may be there at once),
    else `output/work/spool`. A spool is locked while it is used, so that those of killed runs are recognised and removed
    by the next one, whichever output it works for: they would hold memory for ever.
    """
    for leftover in SHARED_MEMORY.glob(f"{SPOOL_PREFIX}*"):
        _remove_abandoned(leftover)
    spool = output / "work" / "spool"
    shutil.rmtree(spool, ignore_errors=True)
    if SHARED_MEMORY.is_dir() and min(shutil.disk_usage(SHARED_MEMORY).free, psutil.virtual_memory().available) > 3 * shard_bytes:
        with suppress(OSError):  # not writable: on disk then
            spool = Path(tempfile.mkdtemp(prefix=SPOOL_PREFIX, dir=SHARED_MEMORY))
    spool.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(spool, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        spool.mkdir(exist_ok=True)  # another run may have taken it for an abandoned one before it was locked
        yield spool
    finally:
        os.close(descriptor)
        shutil.rmtree(spool, ignore_errors=True)


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


def check_room(output: Path, plan: Plan, tokens: int, spool_bytes: int, reserve: int, ignore: bool) -> None:
    """Refuse a dump that does not fit, before its first byte.

    Args:
        tokens: tokens that are still to be extracted.
        spool_bytes: what the spool takes from the same file system (0: it is elsewhere).
        reserve: free bytes that must remain.
    Raises:
        RoomError: with the bytes needed and the bytes there are.
    """
    needed = estimate_bytes(plan, tokens) + spool_bytes
    free = shutil.disk_usage(output).free
    if needed <= free - reserve or ignore:
        return
    raise RoomError(
        f"{output}: the dump needs about {needed} bytes ({tokens} tokens x {len(plan.stored_ids)} layers x {plan.hidden_size} x {plan.dtype}), "
        f"there are {max(0, free - reserve)} ({free} free, extraction.disk_reserve_bytes keeps {reserve}); "
        "free some, tap fewer layers, or set extraction.ignore_estimate: true"
    )


def largest_shard_bytes(plan: Plan, lengths: list[int]) -> int:
    """Size of the largest shard. `lengths`: tokens of all samples, in order."""
    return max(estimate_bytes(plan, sum(lengths[position] for position in plan.shard_range(index))) for index in range(plan.shards))


def prune(dumps: Path, current: Path, keep: int) -> list[Path]:
    """Remove all dumps but `current` and the newest finished ones, `keep` altogether; returns what was removed."""
    os.utime(current / PLAN_FILE)
    others = sorted((entry for entry in dumps.iterdir() if entry.is_dir() and entry != current), key=_used, reverse=True)
    finished = [entry for entry in others if _is_finished(entry)]
    removed = [entry for entry in others if entry not in finished[: keep - 1]]
    for entry in removed:
        # Out of the way in one step: a half-removed dump must not be taken for an unfinished one.
        doomed = Path(tempfile.mkdtemp(prefix=".removed-", dir=dumps))
        entry.replace(doomed / entry.name)
        shutil.rmtree(doomed)
    return removed


def _used(dump: Path) -> float:
    plan = dump / PLAN_FILE
    return plan.stat().st_mtime if plan.is_file() else 0.0


def _is_finished(dump: Path) -> bool:
    try:
        plan = Plan.from_json(read_json(dump / PLAN_FILE))
    except (ArtifactError, TypeError, KeyError):
        return False
    return len(list(dump.glob("shard-*.json"))) == plan.shards
