"""The next step's data, made while the step before is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def made_ahead(make: Callable[[int], T], steps: Iterable[int]) -> Iterator[T]:
    """`make(step)` of all steps in order, the next one in a thread while the caller works on the last.

    An exception of `make` comes out in its step's turn.
    """
    # The number of threads is each thread's own: with another one the sums of its products would have another order.
    with ThreadPoolExecutor(1, "data", torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        coming: deque[Future[T]] = deque()
        for step in steps:
            coming.append(pool.submit(make, step))
            if len(coming) > 1:
                yield coming.popleft().result()
        for last in coming:
            yield last.result()
