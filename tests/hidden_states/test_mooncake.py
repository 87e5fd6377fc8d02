"""Mooncake itself: one-sided reads, runs that share a master, and every way in which it can be absent, within seconds and in one line."""

from __future__ import annotations

import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from stages.hidden_states import mooncake as mooncake_module
from stages.hidden_states.envelope import make_key
from stages.hidden_states.mooncake import MooncakeStore, load_library, split_address
from stages.hidden_states.receive import LateError, take
from stages.hidden_states.server import Running
from stages.hidden_states.stores import Store, StoreError, StoreFullError
from stages.servers import free_port
from tests.hidden_states.samples import make_origin, make_publisher
from tests.paths import REPOSITORY

ORIGIN = make_origin()


def data(size: int, value: int = 1) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def until_full(write: Callable[[int], None]) -> tuple[int, str]:
    """Write 0, 1, … until there is no room; returns how many there was room for, and what was said then."""
    for index in range(100):
        try:
            write(index)
        except StoreFullError as full:
            return index, str(full)
    raise AssertionError("there was room for 100")


def test_samples_are_read_while_the_producer_s_python_stands_still(clients: Callable[[int], MooncakeStore], master: str) -> None:
    """The engine's process computes with the interpreter held; readers need nothing of it but its memory."""
    samples, tokens, seconds = 20, 500, 10
    reader = clients(0)
    command = [sys.executable, "-m", "tests.hidden_states.block", master, str(samples), str(tokens), str(seconds)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as producer:
        try:
            assert producer.stdout is not None
            assert producer.stdout.readline() == "published\n"
            for index in range(samples):
                states, token_ids, _ = take(reader, make_key("block", str(index)), ORIGIN, 5)
                assert bool((states == index).all())
                assert token_ids.tolist() == [index] * tokens
            assert not select.select([producer.stdout], [], [], 0)[0], "all were taken before it woke up"
            producer.communicate("", timeout=60)
            assert producer.returncode == 0
        finally:
            producer.kill()


def test_two_runs_on_one_master_do_not_see_each_other(clients: Callable[[int], MooncakeStore]) -> None:
    """Interleaved; each keeps to its own budget, and the end of one takes nothing from the other."""
    budget = 1 << 20
    writers, readers = [clients(1 << 24) for _ in range(2)], [clients(0) for _ in range(2)]
    publishers = [make_publisher(writer, budget_bytes=budget) for writer in writers]

    def key(run: int, index: int) -> str:
        return make_key(f"run{run}", str(index))

    def value(run: int, index: int) -> float:
        return float(100 * run + index)

    for index in range(40):
        for run, publisher in enumerate(publishers):
            publisher.put(key(run, index), torch.full((100, 2, 100), value(run, index)), torch.arange(100))
        for run, reader in enumerate(readers):
            if index % 2 == run:
                continue
            for past in (index - 1, index):
                if past >= 0:
                    states, _, _ = take(reader, key(run, past), ORIGIN, 5)
                    assert bool((states == value(run, past)).all())
        for writer in writers:
            assert sum(item.bytes for item in writer.held().values()) <= budget
    assert all(name.startswith("run1-") for name in writers[1].held())
    assert until_full(lambda index: publishers[0].put(key(0, 100 + index), torch.zeros(100, 2, 100), torch.arange(100)))[1].startswith("the store is full")
    publishers[1].put(key(1, 100), torch.zeros(100, 2, 100), torch.arange(100))
    readers[0].remove_run("run0")
    assert not writers[0].held()
    assert take(readers[1], key(1, 100), ORIGIN, 5)[0].shape == (100, 2, 100)
    with pytest.raises(LateError):
        take(readers[0], key(0, 100), ORIGIN, 0)


def test_a_full_segment_refuses_and_evicts_nothing(own_master: tuple[str, Running]) -> None:
    """By default Mooncake drops what nobody has read yet."""
    address, _ = own_master
    writer, reader = MooncakeStore(address, segment_bytes=1 << 24), MooncakeStore(address)
    fitted, said = until_full(lambda index: writer.write(f"full-{index}", [data(1 << 20, index)]))
    assert 10 <= fitted <= 16
    assert said == f"Mooncake at {address} has no room for full-{fitted}"
    for index in range(fitted):
        read = reader.read(f"full-{index}")
        assert read is not None
        assert bool((read == index).all())
    reader.remove("full-0")
    writer.write("full-100", [data(1 << 20, 100)])
    reader.remove_run("full")
    assert not writer.held()
    reader.close()
    writer.close()


CALLS: dict[str, Callable[[Store], object]] = {
    "reading": lambda store: store.read("a-1"),
    "writing": lambda store: store.write("a-2", [data(10)]),
    "listing": lambda store: store.held(),
    "removing a-1": lambda store: store.remove("a-1"),
    r"removing a-\*": lambda store: store.remove_run("a"),
}


@pytest.mark.parametrize(("number", "most"), [(signal.SIGKILL, 7.0), (signal.SIGSTOP, 10.0)], ids=["killed", "frozen"])
def test_a_master_that_is_gone_or_frozen_fails_every_call_in_time(own_master: tuple[str, Running], number: signal.Signals, most: float) -> None:
    address, running = own_master
    store = MooncakeStore(address, segment_bytes=1 << 24)
    store.write("a-1", [data(10)])
    running.process.send_signal(number)
    for doing, call in CALLS.items():
        started = time.monotonic()
        with pytest.raises(StoreError, match=f"^Mooncake at {address}: the master does not answer .{doing}"):
            call(store)
        assert time.monotonic() - started < most, doing
    if number == signal.SIGSTOP:
        running.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        store.write("a-3", [data(10, 3)])
        assert store.read("a-3") is not None, "it goes on where the master does"
    else:
        assert "ended with status -9" in (running.ended() or "")
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("listening", [False, True])
def test_a_master_that_cannot_be_reached_is_one_line_with_its_knob(mooncake: None, listening: bool) -> None:
    """Nothing listens there, or something that never answers."""
    with socket.create_server(("127.0.0.1", 0)) if listening else socket.socket() as listener:
        address = f"127.0.0.1:{listener.getsockname()[1] if listening else free_port()}"
        started = time.monotonic()
        with pytest.raises(StoreError, match=rf"^extraction\.master = '{address}': ") as failed:
            MooncakeStore(address)
    assert time.monotonic() - started < 15
    assert len(str(failed.value).splitlines()) == 1


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:none", "127.0.0.1:99999", "no-such-host.invalid:1"])
def test_an_address_that_is_none_is_one_line_with_its_knob(mooncake: None, address: str) -> None:
    with pytest.raises(StoreError, match=rf"^extraction\.master = '{address}': cannot connect: "):
        MooncakeStore(address)


def test_addresses_of_either_protocol_are_split() -> None:
    assert split_address("host:1") == ("host", 1)
    assert split_address("[::1]:2") == ("::1", 2)


def test_missing_system_libraries_are_one_line_with_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_module, "PACKAGES", {"libno-such.so.9": "libno-such9", "libc.so.6": "libc6", "libnor-this.so.1": "libnor-this1"})
    message = "extraction.transport = 'mooncake': libno-such.so.9, libnor-this.so.1 not found; install the system packages libno-such9 libnor-this1 (Debian)"
    with pytest.raises(StoreError, match=f"^{re.escape(message)}$"):
        load_library()
    with pytest.raises(StoreError, match="libno-such9"):
        MooncakeStore("127.0.0.1:1")


def test_a_missing_wheel_is_one_line_with_its_name(mooncake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreError, match=r"^extraction\.transport = 'mooncake': .*; install mooncake-transfer-engine$"):
        load_library()
