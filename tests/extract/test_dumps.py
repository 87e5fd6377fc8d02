"""A dump that does not fit is refused before its first byte, and old dumps do not pile up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stages.extract import dumps
from stages.extract.dumps import RoomError, check_room, largest_shard_bytes, prune, spool_directory
from stages.hidden_states.format import estimate_bytes
from tests.hidden_states.samples import make_plan, make_samples, write_shards
from tests.paths import REPOSITORY


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


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(dumps, "SHARED_MEMORY", folder)
    return folder


def test_a_spool_is_empty_its_own_and_gone_afterwards(tmp_path: Path, shared_memory: Path) -> None:
    with spool_directory(tmp_path / "a", 10) as first, spool_directory(tmp_path / "b", 10) as second:
        assert first != second
        assert first.parent == second.parent == shared_memory
        assert first.is_dir(), "the second run must not take the first's for an abandoned one"
        assert not list(first.iterdir())
        (first / "sample").write_text("x")
    assert not list(shared_memory.iterdir())


def test_the_spool_of_a_killed_run_is_removed_by_the_next_run(tmp_path: Path, shared_memory: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stages.extract import dumps; dumps.SHARED_MEMORY = Path(sys.argv[1])\n"
        "with dumps.spool_directory(Path(sys.argv[2]), 10) as spool: (spool / 'x').write_text('x'); print('there', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(shared_memory), str(tmp_path / "killed")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        (held,) = shared_memory.iterdir()
        with spool_directory(tmp_path / "other", 10):
            assert held.is_dir(), "its process is alive"
        process.kill()
    with spool_directory(tmp_path / "other", 10):
        assert not held.exists()


def test_without_enough_memory_the_spool_is_on_disk(tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "extract"
    with spool_directory(output, 1 << 60) as spool:
        assert spool.is_relative_to(output)
        (spool / "left").write_text("x")
        shutil.copytree(spool, tmp_path / "killed")
    shutil.copytree(tmp_path / "killed", spool)
    monkeypatch.setattr(dumps, "SHARED_MEMORY", tmp_path / "absent")
    with spool_directory(output, 10) as spool:
        assert spool.is_relative_to(output)
        assert not list(spool.iterdir())
    assert not spool.exists()


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
