"""Room for a dump, and the dumps that are kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from stages.artifacts import read_json
from stages.errors import ArtifactError, DraftlineError
from stages.hidden_states.format import Plan, estimate_bytes
from stages.hidden_states.shards import PLAN_FILE


class RoomError(DraftlineError):
    """The estimated dump does not fit."""


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
