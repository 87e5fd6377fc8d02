"""From the paged cache to the spool: the right tokens, nothing lost, bounded memory, and no waiting for what will not come."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest
import torch

from stages.hidden_states.receive import RefusedError, take
from stages.hidden_states.stores import FileStore, StoreFullError
from stages.hidden_states.writer import Writer, copy_out
from tests.hidden_states.samples import make_origin, make_publisher

BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN = 9, 3, 4, 5


def paged(states: torch.Tensor, block_ids: list[int], device: str = "cpu", heads_first: bool = True) -> torch.Tensor:
    """A cache full of NaN that holds `states` `[T, L, H]` in the given blocks, in either order in memory."""
    if heads_first:
        cache = torch.full((BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN), float("nan"), device=device)
    else:
        cache = torch.full((BLOCKS, BLOCK_SIZE, LAYERS, HIDDEN), float("nan"), device=device).permute(0, 2, 1, 3)
    for token, state in enumerate(states):
        cache[block_ids[token // BLOCK_SIZE], :, token % BLOCK_SIZE] = state
    return cache


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 12])
@pytest.mark.parametrize("heads_first", [True, False])
def test_the_copy_follows_the_block_table_and_stops_at_the_last_token(tokens: int, heads_first: bool) -> None:
    states = torch.randn(tokens, LAYERS, HIDDEN)
    blocks = [7, 2, 5][: -(-tokens // BLOCK_SIZE)]
    cache = paged(states, blocks, heads_first=heads_first)
    copied, ready = copy_out(cache, blocks, tokens, None)
    assert ready is None
    cache.zero_()  # the blocks go to another request
    assert copied.is_contiguous()
    assert torch.equal(copied, states)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_copy_is_not_disturbed_by_what_comes_after_it() -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for _ in range(20):
        states = torch.randn(12, LAYERS, HIDDEN, device="cuda")
        cache = paged(states, [7, 2, 5], "cuda")
        copied, ready = copy_out(cache, [7, 2, 5], 12, stream)
        cache.zero_()
        ready.synchronize()
        assert torch.equal(copied, states.cpu())


class SlowSink:
    """A sink that waits for `go` before each sample."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.keys: list[str] = []
        self.refused: dict[str, tuple[str, int | None, bool]] = {}
        self.closed = False

    def put(self, key: str, states: torch.Tensor, token_ids: torch.Tensor) -> None:
        self.go.acquire()
        if key == "broken":
            raise StoreFullError("No space left on device", errno.ENOSPC)
        self.keys.append(key)

    def refuse(self, key: str, reason: str, number: int | None = None, again: bool = False) -> None:
        self.refused[key] = (reason, number, again)

    def close(self) -> None:
        self.closed = True


def test_a_slow_sink_pauses_the_producer_and_loses_nothing() -> None:
    sink = SlowSink()
    writer = Writer(sink, queue_samples=4)
    submitted: list[str] = []

    def produce() -> None:
        for index in range(20):
            writer.submit(str(index), torch.zeros(1, 1, 1), [index], None)
            submitted.append(str(index))

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    deadline = time.monotonic() + 10
    while len(submitted) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    # One is with the sink, four wait, and the producer stands still.
    assert len(submitted) == 5
    for _ in range(20):
        sink.go.release()
    producer.join(10)
    writer.close()
    assert sink.keys == [str(index) for index in range(20)]
    assert sink.closed


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_marked_by_the_producer(tmp_path: Path, value: float) -> None:
    store, origin = FileStore(tmp_path), make_origin("bfloat16")
    writer = Writer(make_publisher(store, origin), queue_samples=2)
    states = torch.zeros(4, len(origin.layer_ids), 3, dtype=torch.bfloat16)
    writer.submit("good", states, [1, 2, 3, 4], None)
    writer.submit("bad", states.index_fill(0, torch.tensor([2]), value), [1, 2, 3, 4], None)
    writer.close()
    assert take(store, "good", origin, 5)[1].tolist() == [1, 2, 3, 4]
    with pytest.raises(RefusedError, match="not finite") as refused:
        take(store, "bad", origin, 5)
    assert not refused.value.again, "another attempt would give the same"
    assert not store.held()


def fail_once(sink: SlowSink, tolerant: bool) -> Writer:
    """A writer whose first sample could not be put."""
    writer = Writer(sink, queue_samples=2, tolerant=tolerant)
    writer.submit("broken", torch.zeros(1, 1, 1), [1], None)
    sink.go.release()
    deadline = time.monotonic() + 10
    while not sink.refused and time.monotonic() < deadline:
        time.sleep(0.01)
    return writer


def test_a_sink_that_fails_is_reported_to_the_waiting_side_and_to_the_engine() -> None:
    sink = SlowSink()
    writer = fail_once(sink, tolerant=False)
    assert sink.refused["broken"] == ("could not be written: No space left on device", errno.ENOSPC, False)
    with pytest.raises(RuntimeError, match=r"could not be written.*No space left"):
        writer.submit("next", torch.zeros(1, 1, 1), [1], None)
    writer.close()


def test_a_server_outlives_a_store_that_is_full_for_a_while() -> None:
    """It refuses that sample, for another attempt, and serves the next one."""
    sink = SlowSink()
    writer = fail_once(sink, tolerant=True)
    assert sink.refused["broken"] == ("could not be written: No space left on device", errno.ENOSPC, True)
    writer.submit("next", torch.zeros(1, 1, 1), [1], None)
    sink.go.release()
    writer.close()
    assert sink.keys == ["next"]
