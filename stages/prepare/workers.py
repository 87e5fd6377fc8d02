"""Jobs on every core, results in the order of what was given.

A few inputs per process are under way at a time, so memory does not grow with their number. What a job reports as an
error is raised where its input stands: the same input gives the same error, however many processes work.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Protocol, TypeVar

from stages.errors import DraftlineError
from stages.prepare.jobs import JobContext
from stages.prepare.lines import PrepareError

BYTES_PER_PROCESS = 4 << 20
"""Input that one more process pays for: it takes seconds to start and to load a tokenizer."""
AHEAD = 3
"""Inputs per process that are handed out before their results are taken."""
PRELOADED = ["stages.prepare.jobs", "transformers.models.auto.tokenization_auto"]
"""What the processes share: imported once, in the process that they are forked from."""

Given = TypeVar("Given")
Made = TypeVar("Made")


class Workers(Protocol):
    """Whoever does the jobs."""

    def in_order(self, job: Callable[[JobContext, Given], Made], inputs: Iterable[Given]) -> Iterator[Made]:
        """`job(context, input)` for each input, in order."""


class ThisProcess:
    """Nothing to start, for little input."""

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def in_order(self, job: Callable[[JobContext, Given], Made], inputs: Iterable[Given]) -> Iterator[Made]:
        return (job(self._context, given) for given in inputs)


class Processes:
    """A pool of processes, each with the context."""

    def __init__(self, pool: ProcessPoolExecutor, ahead: int) -> None:
        self._pool = pool
        self._ahead = ahead

    def in_order(self, job: Callable[[JobContext, Given], Made], inputs: Iterable[Given]) -> Iterator[Made]:
        """Raises: PrepareError: a process was ended from outside."""
        waiting: deque[Future[Made]] = deque()
        source = iter(inputs)
        failed: DraftlineError | StopIteration | None = None
        while True:
            try:
                while failed is None and len(waiting) < self._ahead:
                    waiting.append(self._pool.submit(_do, job, next(source)))
            except StopIteration as end:
                failed = end
            except DraftlineError as error:
                # Raised after the results of what came before it, one of which may be an error that stands earlier.
                failed = error
            except BrokenProcessPool:
                raise _ended() from None
            if not waiting:
                break
            try:
                yield waiting.popleft().result()
            except BrokenProcessPool:
                raise _ended() from None
        if isinstance(failed, DraftlineError):
            raise failed


def _ended() -> PrepareError:
    return PrepareError("a process that reads chats was ended from outside (out of memory?); run again")


def process_count(size: int) -> int:
    """How many processes `size` bytes of input pay for: at most one per core that this process may use."""
    return max(1, min(len(os.sched_getaffinity(0)), size // BYTES_PER_PROCESS))


@contextmanager
def workers(context: JobContext, count: int) -> Iterator[Workers]:
    """`count` processes; for 1 this one does the work itself."""
    if count == 1:
        yield ThisProcess(context)
        return
    method = multiprocessing.get_context("forkserver")
    method.set_forkserver_preload(PRELOADED)
    pool = ProcessPoolExecutor(count, method, _start, (context,))
    try:
        yield Processes(pool, AHEAD * count)
    finally:
        pool.shutdown(cancel_futures=True)


_context: JobContext | None = None


def _start(context: JobContext) -> None:
    global _context
    _context = context
    gc.freeze()  # what was imported before the fork stays shared, and is looked through no more
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent says what there is to say
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(job: Callable[[JobContext, Given], Made], given: Given) -> Made:
    assert _context is not None
    return job(_context, given)
