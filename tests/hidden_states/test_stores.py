"""Both stores do the same: objects are there whole or not at all, and what fails says so in time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.hidden_states.stores import FileStore, StoreError, StoreFullError
from tests.hidden_states.conftest import Ends
from tests.paths import REPOSITORY


def data(size: int, value: int = 1) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_what_one_end_writes_the_other_reads_until_it_is_removed(ends: Ends) -> None:
    assert ends.reader.read("a-1.data") is None
    ends.writer.write("a-1.data", [data(3, 7), data(5, 9)])
    read = ends.reader.read("a-1.data")
    assert read is not None
    assert read.tolist() == [7] * 3 + [9] * 5
    ends.reader.remove("a-1.data")
    ends.reader.remove("a-1.data")
    assert ends.reader.read("a-1.data") is None
    ends.writer.write("a-1.data", [data(2, 4)])
    again = ends.reader.read("a-1.data")
    assert again is not None
    assert again.tolist() == [4, 4]
    assert read.tolist() == [7] * 3 + [9] * 5, "what was read is the reader's own"


def test_a_run_s_objects_are_removed_and_no_other_s(ends: Ends) -> None:
    for name in ("ab-1.data", "ab-1.json", "ab-2.data", "abc-1.data", "a-1.data", "xab-1.data"):
        ends.writer.write(name, [data(1)])
    ends.reader.remove_run("ab")
    assert set(ends.writer.held()) == {"abc-1.data", "a-1.data", "xab-1.data"}
    ends.reader.remove_run("ab")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(["write", "remove", "remove_run"]), st.sampled_from(["a-1", "a-2", "b-1"]), st.integers(1, 9000)), max_size=25))
def test_a_store_holds_what_was_written_and_not_removed(ends: Ends, steps: list[tuple[str, str, int]]) -> None:
    """Against a dictionary, whatever the order; names are used again only after they were removed."""
    expected: dict[str, int] = {}
    for what, name, size in [*steps, ("remove_run", "a", 1), ("remove_run", "b", 1)]:
        if what == "write" and name not in expected:
            ends.writer.write(name, [data(size, size % 251)])
            expected[name] = size
        elif what == "remove":
            ends.reader.remove(name)
            expected.pop(name, None)
        elif what == "remove_run":
            ends.reader.remove_run(name[0])
            expected = {kept: value for kept, value in expected.items() if kept[0] != name[0]}
        held = ends.writer.held()
        assert {name: item.bytes for name, item in held.items()} == expected
        assert all(-0.1 < item.age < 60 for item in held.values())
        for kept in ("a-1", "a-2", "b-1"):
            read = ends.reader.read(kept)
            assert read is None if kept not in expected else read is not None and torch.equal(read, data(expected[kept], expected[kept] % 251))


def test_ages_tell_which_object_is_the_oldest(ends: Ends) -> None:
    for index in range(4):
        ends.writer.write(f"a-{index}", [data(1)])
        threading.Event().wait(0.02)
    ages = [ends.writer.held()[f"a-{index}"].age for index in range(4)]
    assert all(older > younger for older, younger in pairwise(ages))
    assert ages[0] < 10


def test_a_reader_never_sees_half_an_object(ends: Ends) -> None:
    """4 MiB each, read as often as possible while they are written one after the other."""
    count, size = 12, 1 << 22
    failures: list[str] = []
    done = threading.Event()

    def read() -> None:
        for index in range(count):
            while (seen := ends.reader.read(f"a-{index}")) is None and not done.is_set():
                pass
            if seen is None or len(seen) != size or not bool((seen == index).all()):
                failures.append(f"a-{index}: {None if seen is None else len(seen)}")
            ends.reader.remove(f"a-{index}")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for index in range(count):
            while len(ends.writer.held()) > 1:
                pass
            ends.writer.write(f"a-{index}", [data(size // 2, index), data(size // 2, index)])
    finally:
        reader.join(20)
        done.set()
        reader.join(5)
    assert not failures


def test_a_full_file_system_is_named_and_leaves_no_part_of_an_object(small_disk: Path) -> None:
    store = FileStore(small_disk)
    for index in range(3):
        store.write(f"a-{index}", [data(300_000, index)])
    with pytest.raises(StoreFullError, match="No space left on device") as full:
        store.write("a-8", [data(300_000)])
    assert full.value.number == errno.ENOSPC
    assert sorted(path.name for path in small_disk.iterdir()) == ["a-0", "a-1", "a-2"]
    store.remove("a-1")
    store.write("a-8", [data(300_000, 8)])
    assert {name: int(store.read(name)[-1]) for name in ("a-0", "a-2", "a-8")} == {"a-0": 0, "a-2": 2, "a-8": 8}  # type: ignore[index]


def test_a_killed_writer_s_leftover_goes_with_its_run(memory: Path) -> None:
    store = FileStore(memory)
    (memory / ".ab-1.data.tmp").write_bytes(b"half")
    store.write("abc-1.data", [data(1)])
    assert set(store.held()) == {".ab-1.data.tmp", "abc-1.data"}, "it takes room"
    assert store.read("ab-1.data") is None
    store.remove_run("ab")
    assert set(store.held()) == {"abc-1.data"}


def test_a_spool_that_cannot_be_made_is_one_line_with_its_knob(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=rf"^extraction\.spool = '{tmp_path}/file/spool': Not a directory$"):
        FileStore(tmp_path / "file" / "spool")


@pytest.mark.parametrize("what", [lambda store: store.remove("a"), lambda store: store.held(), lambda store: store.write("a", [data(1)])])
def test_a_directory_that_is_no_more_one_is_the_store_s_error(tmp_path: Path, what: Callable[[FileStore], object]) -> None:
    """Only a StoreError costs the sample alone; anything else would end an engine that others use too."""
    store = FileStore(tmp_path / "spool")
    (tmp_path / "spool").rmdir()
    (tmp_path / "spool").touch()
    with pytest.raises(StoreError, match=rf"^{tmp_path}/spool: Not a directory$"):
        what(store)


def test_a_spool_that_is_removed_and_comes_back_is_used_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "spool")
    (tmp_path / "spool").rmdir()
    with pytest.raises(StoreError, match="spool: No such file or directory"), store.exclusive():
        pass
    FileStore(tmp_path / "spool")
    with store.exclusive():
        store.write("a", [data(1)])
    assert list(store.held()) == ["a"]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which root can")
def test_a_spool_of_another_user_is_refused_at_once(memory: Path) -> None:
    memory.chmod(0o755)
    script = f"from pathlib import Path; from stages.hidden_states.stores import FileStore; import os; os.setuid(65534); FileStore(Path({str(memory)!r}))"
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=60)
    assert f"StoreError: extraction.spool = '{memory}': this user may not write there" in done.stderr
