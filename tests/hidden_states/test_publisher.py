"""A producer never holds more than its budget, drops nothing before its time, and publishes whole samples."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.hidden_states.envelope import DATA, MANIFEST, MANIFEST_BYTES, from_bytes, make_key, unpack
from stages.hidden_states.publisher import Publisher, budget_for, usable_bytes
from stages.hidden_states.receive import RefusedError, take
from stages.hidden_states.stores import FileStore, Store, StoreFullError
from tests.hidden_states.conftest import Ends
from tests.hidden_states.samples import make_origin, make_publisher

HIDDEN = 64
TOKEN_BYTES = 2 * HIDDEN * 4 + 8
ORIGIN = make_origin()


def key(index: int) -> str:
    return make_key("run", str(index))


def put(publisher: Publisher, index: int, tokens: int = 8) -> None:
    """Publish a sample whose every value is its index."""
    publisher.put(key(index), torch.full((tokens, 2, HIDDEN), float(index)), torch.full((tokens,), index))


def take_whole(store: Store, index: int, seconds: float = 10) -> None:
    """Take a sample and look at every value."""
    states, token_ids, _ = take(store, key(index), ORIGIN, seconds)
    assert bool((states == index).all())
    assert bool((token_ids == index).all())


class WatchedStore(FileStore):
    """Remembers the most bytes that the directory ever held; the time of each object is the test's."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.peak = 0

    def write(self, name: str, parts: Sequence[torch.Tensor]) -> None:
        super().write(name, parts)
        self.peak = max(self.peak, self.bytes)

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.held().values())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 60)),
        st.tuples(st.sampled_from(["take", "expire"]), st.integers(0, 9)),
        st.tuples(st.just("refuse"), st.just(0)),
    ),
    max_size=40,
)
BUDGET, TTL = 1 << 16, 1000.0


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_the_budget_holds_and_only_expired_samples_go_and_only_for_room(steps: list[tuple[str, int]]) -> None:
    """Whatever is published, read, refused or left lying about."""
    with TemporaryDirectory(prefix="draftline-test-", dir="/dev/shm") as folder:
        store = WatchedStore(Path(folder))
        publisher = make_publisher(store, budget_bytes=BUDGET, ttl_seconds=TTL)
        born = time.time() - TTL / 2
        alive: dict[int, bool] = {}  # index → expired; oldest first
        for index, (what, number) in enumerate(steps):
            if what == "put":
                before, needed = store.bytes, number * TOKEN_BYTES + MANIFEST_BYTES
                try:
                    put(publisher, index, number)
                    alive[index] = False
                except StoreFullError:
                    assert store.bytes + needed > usable_bytes(BUDGET), "there was room"
                here = {place for place in alive if (Path(folder) / f"{key(place)}{DATA}").exists()}
                gone = [place for place in alive if place not in here]
                assert not gone or before + needed > usable_bytes(BUDGET), "nothing goes while there is room"
                for place in gone:
                    assert alive.pop(place), "what nobody has had time to read stays"
                    assert all(other > place for other in here), "the oldest go first"
                    with pytest.raises(RefusedError, match=r"unread for .* removed to make room") as refused:
                        take(store, key(place), ORIGIN, 0)
                    assert refused.value.again
            elif what == "take" and number < len(alive):
                place = list(alive)[number]
                take_whole(store, place, 0)
                del alive[place]
            elif what == "refuse":
                publisher.refuse(key(index), "x")
            elif what == "expire":
                for place in list(alive)[:number]:
                    alive[place] = True
            for path in Path(folder).glob("*.*"):
                owner = next((place for place in alive if path.name.startswith(key(place))), None)
                age = born + (0 if owner is None else owner - (2 * TTL if alive[owner] else 0))
                os.utime(path, (age, age))
        for place in alive:
            take_whole(store, place, 0)
        assert store.peak <= BUDGET


def test_expired_samples_that_are_in_nobody_s_way_stay(ends: Ends) -> None:
    publisher = make_publisher(ends.writer, budget_bytes=BUDGET, ttl_seconds=0)
    for index in range(8):
        put(publisher, index)
    assert publisher.evicted == 0
    for index in range(8):
        take_whole(ends.reader, index)


def test_no_more_expired_samples_go_than_must(ends: Ends) -> None:
    """Samples smaller than a manifest's reserve, too."""
    publisher = make_publisher(ends.writer, budget_bytes=20_000, ttl_seconds=0)
    sizes = 0
    for index in range(40):
        evicted = publisher.evicted
        put(publisher, index, tokens=1)
        assert publisher.evicted - evicted <= 2, "the room of one sample and its mark"
        sizes = max(sizes, sum(item.bytes for item in ends.writer.held().values()))
    left = [index for index in range(40) if f"{key(index)}{DATA}" in ends.writer.held()]
    assert sizes <= 20_000
    assert left == list(range(40 - len(left), 40)), "the oldest go first"
    assert len(left) * 1100 > 10_000, "the store stays well filled"


def test_a_late_reader_learns_at_once_that_its_sample_has_gone(ends: Ends) -> None:
    publisher = make_publisher(ends.writer, budget_bytes=BUDGET, ttl_seconds=0)
    for index in range(3):
        put(publisher, index, tokens=40)
    assert publisher.evicted == 1
    started = time.monotonic()
    with pytest.raises(RefusedError, match="removed to make room") as refused:
        take(ends.reader, key(0), ORIGIN, 30)
    assert time.monotonic() - started < 1
    assert refused.value.again
    assert not [name for name in ends.writer.held() if name.startswith(key(0))], "the mark was read, and is gone"


def test_at_the_budget_publishing_waits_and_goes_on_when_a_reader_takes_one(ends: Ends) -> None:
    publisher = make_publisher(ends.writer, budget_bytes=BUDGET, wait_seconds=20)
    put(publisher, 0, tokens=60)
    put(publisher, 1, tokens=40)
    waiting = threading.Thread(target=put, args=(publisher, 2, 50))
    waiting.start()
    try:
        waiting.join(0.4)
        assert waiting.is_alive()
        assert f"{key(2)}{DATA}" not in ends.writer.held()
        take_whole(ends.reader, 0)
        waiting.join(2)
        assert not waiting.is_alive()
        take_whole(ends.reader, 1)
        take_whole(ends.reader, 2)
    finally:
        ends.reader.remove_run("run")
        waiting.join()
    assert (publisher.published, publisher.evicted) == (3, 0)


def test_after_its_time_it_says_how_full_the_store_is(ends: Ends) -> None:
    publisher = make_publisher(ends.writer, budget_bytes=BUDGET, ttl_seconds=100, wait_seconds=0.2)
    put(publisher, 0, tokens=60)
    put(publisher, 1, tokens=40)
    started = time.monotonic()
    with pytest.raises(StoreFullError) as full:
        put(publisher, 2, tokens=50)
    assert 0.2 <= time.monotonic() - started < 2
    said = re.fullmatch(
        r"the store is full: (\d+) bytes of 4 objects that nobody has read yet, (\d+) more do not fit extraction\.budget_bytes = 65536, "
        r"the oldest may be removed in (\d+) s",
        str(full.value),
    )
    assert said is not None, str(full.value)
    assert 100 * TOKEN_BYTES < int(said[1]) < 100 * TOKEN_BYTES + 2 * MANIFEST_BYTES
    assert 50 * TOKEN_BYTES < int(said[2]) < 50 * TOKEN_BYTES + MANIFEST_BYTES
    assert 90 <= int(said[3]) <= 100
    assert publisher.published == 2
    publisher.refuse(key(2), "full", again=True)
    with pytest.raises(RefusedError, match="full"):
        take(ends.reader, key(2), ORIGIN, 0)


def test_refusals_that_nobody_reads_stay_within_the_budget_too(ends: Ends) -> None:
    publisher = make_publisher(ends.writer, budget_bytes=BUDGET)
    for index in range(400):
        publisher.refuse(key(index), "not finite")
    held = sum(item.bytes for item in ends.writer.held().values())
    assert BUDGET - MANIFEST_BYTES < held <= BUDGET
    assert publisher.refused == 400


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 1 << 40))
def test_a_budget_for_so_many_bytes_holds_them_and_no_smaller_one_does(needed: int) -> None:
    budget = budget_for(needed)
    assert needed <= usable_bytes(budget)
    assert usable_bytes(budget - 1) < needed


def test_where_a_manifest_is_the_data_are_whole(ends: Ends) -> None:
    """A reader that looks all the time, beside a producer that never rests."""
    publisher = make_publisher(ends.writer, budget_bytes=8 << 20, wait_seconds=20)
    broken: list[str] = []
    count = 60

    def read() -> None:
        deadline = time.monotonic() + 30
        for index in range(count):
            while (raw := ends.reader.read(f"{key(index)}{MANIFEST}")) is None and time.monotonic() < deadline:
                pass
            data = ends.reader.read(f"{key(index)}{DATA}")
            if raw is None or data is None:
                broken.append(f"{index}: data {data is not None}, manifest {raw is not None}")
            else:
                states, _ = unpack(from_bytes(key(index), raw), data)
                assert bool((states == index).all())
            ends.reader.remove(f"{key(index)}{MANIFEST}")
            ends.reader.remove(f"{key(index)}{DATA}")

    reader = threading.Thread(target=read)
    reader.start()
    for index in range(count):
        put(publisher, index, tokens=2000)
    reader.join(30)
    assert not reader.is_alive()
    assert not broken


def test_two_producers_of_one_directory_share_one_budget(memory: Path) -> None:
    """As two servers of one machine do: together they stay below it, and each frees the other's expired samples."""
    stores = [WatchedStore(memory) for _ in range(2)]
    publishers = [make_publisher(store, budget_bytes=BUDGET, ttl_seconds=0.05, wait_seconds=20) for store in stores]

    def produce(which: int) -> None:
        for index in range(60):
            put(publishers[which], 100 * which + index, tokens=5 + index % 20)

    threads = [threading.Thread(target=produce, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [publisher.published for publisher in publishers] == [60, 60]
    assert all(publisher.evicted > 0 for publisher in publishers)
    assert max(store.peak for store in stores) <= BUDGET


def test_a_file_system_below_the_budget_refuses_frees_what_has_expired_and_keeps_no_halves(small_disk: Path) -> None:
    store = FileStore(small_disk)
    publisher = make_publisher(store, budget_bytes=1 << 30, ttl_seconds=60)
    for index in range(3):
        put(publisher, index, tokens=600)
    with pytest.raises(StoreFullError, match="No space left"):
        put(publisher, 3, tokens=600)
    assert not [name for name in store.held() if key(3) in name]
    for path in small_disk.glob(f"{key(0)}*"):
        os.utime(path, (0, 0))
    patient = make_publisher(store, budget_bytes=1 << 30, ttl_seconds=60, wait_seconds=5)
    put(patient, 4, tokens=600)
    assert patient.evicted == 1
    for index in (1, 2, 4):
        take_whole(store, index)
    with pytest.raises(RefusedError, match="removed to make room"):
        take(store, key(0), ORIGIN, 0)


def test_the_last_bytes_of_a_file_system_may_hold_data_without_their_manifest_for_no_longer_than_a_moment(small_disk: Path) -> None:
    store = FileStore(small_disk)
    (small_disk / "other").write_bytes(b"x" * ((1 << 20) - (1 << 14)))
    publisher = make_publisher(store)
    with pytest.raises(StoreFullError, match="No space left"):
        publisher.put(key(0), torch.zeros(16, 2, 120), torch.zeros(16, dtype=torch.int64))
    assert set(store.held()) == {"other"}


def test_a_mixture_of_samples_refusals_and_readings_stays_within_the_budget(ends: Ends) -> None:
    publisher = make_publisher(ends.writer, budget_bytes=BUDGET, ttl_seconds=0.02, wait_seconds=5)
    for index in range(30):
        put(publisher, index, tokens=1 + 7 * index % 60)
        if index % 3 == 0:
            publisher.refuse(key(1000 + index), "x")
        if index % 4 == 0:
            take_whole(ends.reader, index)
        assert sum(item.bytes for item in ends.writer.held().values()) <= BUDGET
    assert publisher.evicted > 0
