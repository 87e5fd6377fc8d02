"""A dump that does not fit is refused before its first byte, and old dumps do not pile up."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from stages.extract.dumps import RoomError, check_room, largest_shard_bytes, prune
from stages.hidden_states.format import estimate_bytes
from tests.hidden_states.samples import make_plan, make_samples, write_shards


def test_what_does_not_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    plan = make_plan([1000] * 200, hidden_size=576)
    needed = estimate_bytes(plan)
    free = shutil.disk_usage(tmp_path).free
    reserve = free - needed // 2
    with pytest.raises(RoomError, match=rf"needs about {needed} bytes .* there are \d+ .*extraction\.disk_reserve_bytes keeps {reserve}"):
        check_room(tmp_path, plan, plan.tokens, 0, reserve, ignore=False)
    check_room(tmp_path, plan, plan.tokens, 0, reserve, ignore=True)
    check_room(tmp_path, plan, plan.tokens // 4, 0, reserve, ignore=False)  # the rest of an interrupted dump fits
    with pytest.raises(RoomError):
        check_room(tmp_path, plan, plan.tokens // 4, needed, reserve, ignore=False)  # not with the spool beside it


def test_the_largest_shard_is_found() -> None:
    lengths = [1, 1, 9, 9, 2]
    plan = make_plan(lengths, samples_per_shard=2)
    assert largest_shard_bytes(plan, lengths) == estimate_bytes(plan, 18)


def test_the_newest_finished_dumps_are_kept_and_unfinished_ones_go(tmp_path: Path) -> None:
    lengths = [1, 2, 3]
    for age, name in enumerate(["current", "newer", "older", "oldest"]):
        plan = make_plan(lengths, data=name, samples_per_shard=2)
        write_shards(tmp_path / name, plan, make_samples(plan, lengths))
        os.utime(tmp_path / name / "plan.json", (1e9 - age, 1e9 - age))
    half = make_plan(lengths, data="half", samples_per_shard=2)
    write_shards(tmp_path / "half", half, make_samples(half, lengths), shards=1)
    removed = prune(tmp_path, tmp_path / "current", keep=3)
    assert {path.name for path in removed} == {"oldest", "half"}
    assert {path.name for path in tmp_path.iterdir()} == {"current", "newer", "older"}
    # Used again, an old one is the newest.
    prune(tmp_path, tmp_path / "older", keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"current", "older"} or {path.name for path in tmp_path.iterdir()} == {"newer", "older"}
    prune(tmp_path, tmp_path / "older", keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["older"]
