"""From the engine's paged cache to a sink: the copy, and the thread that writes. Needs no vLLM."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, Protocol

import torch

from stages.hidden_states.format import all_finite
from stages.hidden_states.stores import StoreError
from stages.hidden_states.threads import leave_core, stay_aside

QUEUE_SAMPLES = 8
CLOSE_SECONDS = 60.0


class Sink(Protocol):
    """Where finished samples go (`Publisher`). Called from one writer thread; may block, which in the end pauses the engine."""

    def put(self, key: str, states: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Publish a sample whole or not at all: states `[T, ids, H]` and token ids `[T]` int64, contiguous, on the CPU."""

    def refuse(self, key: str, reason: str, number: int | None = None, again: bool = False) -> None:
        """Publish that there will be no such sample. `number`: errno, where the system refused; `again`: another attempt can succeed."""

    def close(self) -> None:
        """Nothing more will come."""


def gather(cache: torch.Tensor, block_ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Copy one request's states out of the paged cache.

    Args:
        cache: `[blocks, L, block size, H]` (as a view; the order in memory is the engine's choice).
        block_ids: `[n]`, the request's blocks in order, on the cache's device.
        tokens: `T`.
    Returns:
        `[T, L, H]`, contiguous.
    """
    blocks = cache.permute(0, 2, 1, 3).index_select(0, block_ids)
    return blocks.reshape(-1, cache.shape[1], cache.shape[3])[:tokens].contiguous()


def copy_out(cache: torch.Tensor, block_ids: list[int], tokens: int, stream: Any) -> tuple[torch.Tensor, Any]:
    """Copy one request's states to the CPU; whatever overwrites its blocks afterwards does not disturb the copy.

    Args:
        cache: as for `gather`, on the CPU or on a CUDA device.
        stream: CUDA stream for the copy over the bus; unused on the CPU, where no CUDA call is made.
    Returns:
        `[T, L, H]` on the CPU, and the event after which it is filled (None: it is).
    """
    indices = torch.tensor(block_ids, dtype=torch.int64)
    if not cache.is_cuda:
        return gather(cache, indices, tokens), None
    # The gather runs on the compute stream: after this step's writes, before the next step can reuse the blocks.
    # Only the slow copy over the bus goes to the other stream.
    staged = gather(cache, indices.pin_memory().to(cache.device, non_blocking=True), tokens)
    host = torch.empty(staged.shape, dtype=staged.dtype, pin_memory=True)
    stream.wait_stream(torch.cuda.current_stream(cache.device))
    with torch.cuda.stream(stream):
        host.copy_(staged, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(stream)
    # The allocator must not hand `staged` out again while the copy reads it.
    staged.record_stream(stream)
    return host, ready


class Writer:
    """The writer thread and its bounded queue."""

    def __init__(self, sink: Sink, queue_samples: int, tolerant: bool = False) -> None:
        """`tolerant`: a store that is full or away costs the sample, not the engine: whoever asked can ask again."""
        self._sink = sink
        self._tolerant = tolerant
        self._queue: queue.Queue[tuple[str, torch.Tensor, list[int], Any] | None] = queue.Queue(maxsize=queue_samples)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="draftline-hidden-states", daemon=True)
        self._thread.start()

    def submit(self, key: str, states: torch.Tensor, token_ids: list[int], ready: Any) -> None:
        """Queue one sample; blocks while the queue is full.

        Args:
            states: `[T, L, H]` on the CPU, possibly still being filled by a copy.
            ready: an event whose `synchronize` returns when `states` is filled; None: it is.
        """
        if self._failure is not None:
            raise RuntimeError(f"hidden states could not be written: {self._failure}") from self._failure
        self._queue.put((key, states, token_ids, ready))

    def close(self) -> None:
        """Write what is queued, then end; a sink that is stuck is given up after a bounded time."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)
        self._sink.close()

    def _run(self) -> None:
        stay_aside()
        leave_core()
        while (job := self._queue.get()) is not None:
            key, states, token_ids, ready = job
            try:
                if ready is not None:
                    ready.synchronize()
                if all_finite(states):
                    self._sink.put(key, states, torch.tensor(token_ids, dtype=torch.int64))
                else:
                    self._sink.refuse(key, "hidden states that are not finite")
            except Exception as error:  # whatever it is, the thread goes on: the engine must not block on a queue that nobody empties
                passing = self._tolerant and isinstance(error, StoreError)
                if not passing:
                    self._failure = error
                with contextlib.suppress(Exception):
                    self._sink.refuse(key, f"could not be written: {error}", getattr(error, "number", None) or getattr(error, "errno", None), passing)
