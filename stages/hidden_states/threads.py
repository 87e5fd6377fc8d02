"""Threads beside the one that computes."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch


def stay_aside() -> None:
    """Keep the calling thread out of the way of the one that computes; call it first in a thread of its own.

    Whatever torch does in this thread, it does alone. With OpenMP each thread that computes gets a team of its own, and
    as soon as all teams together have more threads than there are cores, GNU's runtime lets none of them spin: the
    computing thread's team then sleeps and wakes at every operation. (Measured on two cores: a step of training takes
    1.25 times as long, after one sum in another thread.) torch.set_num_threads would change the other threads too.
    """
    torch.get_num_threads()  # torch sets a thread's number the first time it is asked for it
    for library in (None, "libgomp.so.1"):  # what is preloaded goes before what torch brings along
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(library).omp_set_num_threads(1)
            break


def leave_core() -> None:
    """Let the calling thread run wherever the parent process may.

    vLLM binds its threads to a core each, and a thread inherits the core of the one that starts it: that which computes.
    """
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
