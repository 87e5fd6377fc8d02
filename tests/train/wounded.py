"""`python -m stages.train` with a wound of its own, for tests of streaming.

    python -m tests.train.wounded slow=0.1 flip=4

`slow=S`: each step takes S seconds more. `flip=N`: one bit of the N-th sample read is another. `kill_reading=N`,
`kill_acknowledging=N`: SIGKILL while the N-th sample is read; when it was read and is not yet acknowledged.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from stages.hidden_states import receive
from stages.hidden_states.envelope import DATA
from stages.hidden_states.mooncake import MooncakeStore
from stages.hidden_states.stores import FileStore
from stages.train import loop


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by `wrapper(original, *arguments)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments: wrapper(original, *arguments))


def wrap_nth_read(number: int, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(read, store, name)` do the N-th read of a sample's data."""
    count = itertools.count(1)
    for store in (FileStore, MooncakeStore):
        wrap(store, "read", lambda read, self, name: wrapper(read, self, name) if name.endswith(DATA) and next(count) == number else read(self, name))


def flip(number: int) -> None:
    def flipped(read: Callable[..., Any], *arguments: Any) -> Any:
        data = read(*arguments)
        data[len(data) // 2] ^= 1
        return data

    wrap_nth_read(number, flipped)


def kill_reading(number: int) -> None:
    def reading(read: Callable[..., Any], *arguments: Any) -> Any:
        threading.Thread(target=die).start()
        while True:
            read(*arguments)

    wrap_nth_read(number, reading)


def kill_acknowledging(number: int) -> None:
    count = itertools.count(1)
    wrap(receive, "acknowledge", lambda acknowledge, *arguments: die() if next(count) == number else acknowledge(*arguments))


def slow(seconds: float) -> None:
    def slowly(step_made: Callable[..., Any], *arguments: Any) -> Any:
        time.sleep(seconds)
        return step_made(*arguments)

    wrap(loop, "step_made", slowly)


WOUNDS: dict[str, Callable[[Any], None]] = {wound.__name__: wound for wound in (slow, flip, kill_reading, kill_acknowledging)}

if __name__ == "__main__":
    for name, _, value in (argument.partition("=") for argument in sys.argv[1:]):
        WOUNDS[name](float(value) if "." in value else int(value))
    sys.argv[1:] = []
    runpy.run_module("stages.train", run_name="__main__", alter_sys=True)
