"""Both stores, their two ends, and what they stand on: a folder in memory, a real Mooncake master, a file system that fills up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from stages.hidden_states.mooncake import MooncakeStore, load_library
from stages.hidden_states.server import Running, mooncake_master
from stages.hidden_states.stores import FileStore, Store, StoreError


class Ends(NamedTuple):
    """A producer's and a reader's view of one store."""

    writer: Store
    reader: Store


@pytest.fixture
def memory() -> Iterator[Path]:
    """An empty folder in shared memory."""
    with TemporaryDirectory(prefix="draftline-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="package")
def mooncake() -> None:
    """Skips the test where Mooncake cannot be used."""
    try:
        load_library()
    except StoreError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="package")
def master(mooncake: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Mooncake master that nobody disturbs."""
    with mooncake_master(tmp_path_factory.mktemp("master") / "master.log") as (address, _):
        yield address


@pytest.fixture
def own_master(mooncake: None, tmp_path: Path) -> Iterator[tuple[str, Running]]:
    """A Mooncake master of the test's own, to be killed or frozen."""
    with mooncake_master(tmp_path / "master.log") as running:
        yield running


@pytest.fixture(scope="package")
def mooncake_ends(master: str) -> Iterator[Ends]:
    """One producer with a segment of 16 MiB, and one reader: a client takes seconds to end."""
    with ExitStack() as stack:
        ends = Ends(MooncakeStore(master, segment_bytes=1 << 24), MooncakeStore(master))
        for end in ends:
            stack.callback(end.close)
        yield ends


@pytest.fixture(params=["file", "mooncake"])
def ends(request: pytest.FixtureRequest, memory: Path) -> Iterator[Ends]:
    """The two ends of an empty store of either kind."""
    if request.param == "file":
        yield Ends(FileStore(memory), FileStore(memory))
        return
    ends: Ends = request.getfixturevalue("mooncake_ends")
    yield ends
    for name in ends.writer.held():
        ends.reader.remove(name)
    assert not ends.writer.held()


@pytest.fixture
def clients(master: str) -> Iterator[Callable[[int], MooncakeStore]]:
    """Makes further clients of the master, given the bytes of their segment, and ends them."""
    with ExitStack() as stack:

        def make(segment_bytes: int) -> MooncakeStore:
            store = MooncakeStore(master, segment_bytes=segment_bytes)
            stack.callback(store.close)
            return store

        yield make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let its root mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
