"""A spool is its run's own, in memory where there is room, and gone afterwards, however the run ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stages.hidden_states import spool as spool_module
from stages.hidden_states.spool import SPOOL_PREFIX, file_system, memory_spool, spool_directory
from stages.hidden_states.stores import StoreError
from tests.paths import REPOSITORY


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(spool_module, "SHARED_MEMORY", folder)
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
        "import sys; from pathlib import Path; from stages.hidden_states import spool; spool.SHARED_MEMORY = Path(sys.argv[1])\n"
        "with spool.spool_directory(Path(sys.argv[2]), 10) as place: (place / 'x').write_text('x'); print('there', flush=True); sys.stdin.read()"
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
    monkeypatch.setattr(spool_module, "SHARED_MEMORY", tmp_path / "absent")
    with spool_directory(output, 10) as spool:
        assert spool.is_relative_to(output)
        assert not list(spool.iterdir())
    assert not spool.exists()


def test_a_memory_spool_is_refused_where_memory_does_not_hold_the_budget(shared_memory: Path) -> None:
    with memory_spool(10) as spool:
        assert spool.parent == shared_memory
        assert spool.name.startswith(SPOOL_PREFIX)
    with (
        pytest.raises(StoreError, match=r"^params\.yaml: extraction\.budget_bytes = 1152921504606846976: .* has room for \d+; lower it"),
        memory_spool(1 << 60),
    ):
        pass
    assert not list(shared_memory.iterdir())


def test_the_file_system_of_a_path_that_does_not_exist_yet_is_that_of_its_nearest_folder() -> None:
    assert file_system(Path("/dev/shm/not/there/yet")) == "tmpfs"
    assert file_system(Path("/proc/self")) == "proc"
