"""Processes for engines, forked from one that has already imported vLLM.

Importing vLLM takes ten times as long as all else that the start of a small engine does (measured: 5.4 s against 0.5 s). So the
first engine of a program starts a *nursery*, a process that imports vLLM and then only forks; it holds no engine itself. Every engine
is still alone in its process: it shares with its siblings nothing but imported modules.

Messages over a Unix socket, JSON, one per packet. To the nursery: {"start": number, "cwd": …} with three file descriptors (the
engine's input, its output, standard error), {"kill": number}. Back: {"ended": number, "status": exit code, negative for a signal}.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TextIO

from stages.process import die_with_parent

POLL_SECONDS = 0.05
"""How often the nursery looks for ended engines."""

PACKET_BYTES = 1 << 16


class Nursery:
    """The parent's side: starts engines and learns how they ended."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        """Start the process; it imports while the caller goes on. `module` calls `serve` at its end."""
        self.environment = environment
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Warnings about libraries' own deprecations: nothing that a user of the pipeline can act on.
        command = [sys.executable, "-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning", "-m", module]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=[theirs.fileno()]
            )
        self._started = 0
        self._ended: dict[int, int] = {}

    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self) -> tuple[int, TextIO, TextIO]:
        """Start an engine's process; returns its number and the ends of its input and output."""
        self._started += 1
        input_end, to_engine = os.pipe()
        from_engine, output_end = os.pipe()
        # An error: the nursery is gone. The engine's output is at its end then, and `wait` tells how.
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [json.dumps({"start": self._started, "cwd": os.getcwd()}).encode()], [input_end, output_end, 2])
        os.close(input_end)
        os.close(output_end)
        return self._started, os.fdopen(to_engine, "w", encoding="utf-8"), os.fdopen(from_engine, encoding="utf-8")

    def wait(self, number: int, seconds: float | None = None) -> int | None:
        """Exit status of an engine's process, negative for a signal; None if it has not ended after `seconds`."""
        self._control.settimeout(seconds)
        while number not in self._ended:
            try:
                packet = self._control.recv(PACKET_BYTES)
            except TimeoutError:
                return None
            except OSError:
                packet = b""
            if not packet:
                # Engines do not outlive their nursery.
                return self._process.wait()
            message = json.loads(packet)
            self._ended[message["ended"]] = message["status"]
        return self._ended[number]

    def kill(self, number: int) -> None:
        """SIGKILL an engine's process, and wait for its end. The nursery does it: to us the process id may have passed on."""
        try:
            self._control.send(json.dumps({"kill": number}).encode())
        except OSError:
            return
        self.wait(number)

    def close(self) -> None:
        """End the nursery and with it any engine that is left."""
        self._control.close()
        self._process.terminate()
        self._process.wait()


_NURSERIES: dict[tuple[int, str], Nursery] = {}


def nursery(module: str, environment: dict[str, str]) -> Nursery:
    """This process's nursery of a module, a new one if the environment has changed: libraries read it when they are imported."""
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    key = (os.getpid(), module)
    known = _NURSERIES.get(key)
    if known is not None and (known.environment != environment or not known.alive()):
        known.close()
        known = None
    if known is None:
        known = _NURSERIES[key] = Nursery(module, environment)
        atexit.register(known.close)
    return known


def serve(prepare: Callable[[], None], work: Callable[[TextIO, TextIO], int]) -> NoReturn:
    """The nursery's side: fork an engine for each request until the parent ends or hangs up.

    Args:
        prepare: imports what every engine needs.
        work: an engine's life: reads its input, writes its output, returns the exit status.
    """
    parent = int(sys.argv[1])
    control = socket.socket(fileno=int(sys.argv[2]))
    # Ctrl-C reaches the whole terminal group; the parent decides what it means for engines.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    prepare()
    # What is imported stays: collections in the engines need not look through it, nor copy its pages.
    gc.freeze()
    engines: dict[int, int] = {}
    while os.getppid() == parent:
        if select.select([control], [], [], POLL_SECONDS)[0]:
            packet, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 3)
            if not packet:
                break
            message = json.loads(packet)
            if "kill" in message:
                for process in [process for process, number in engines.items() if number == message["kill"]]:
                    os.kill(process, signal.SIGKILL)
            else:
                process = os.fork()
                if process == 0:
                    control.close()
                    _live(descriptors, message["cwd"], work)
                engines[process] = message["start"]
                for descriptor in descriptors:
                    os.close(descriptor)
        for process in list(engines):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    control.send(json.dumps({"ended": engines.pop(process), "status": os.waitstatus_to_exitcode(status)}).encode())
    # Not an orderly end: there is nothing to save, and bindings complain about objects that are left.
    os._exit(0)


def _live(descriptors: list[int], cwd: str, work: Callable[[TextIO, TextIO], int]) -> NoReturn:
    """An engine's process, from the fork to its end."""
    status = 1
    try:
        requests = os.fdopen(descriptors[0], encoding="utf-8")
        results = os.fdopen(descriptors[1], "w", encoding="utf-8")
        # Whatever libraries print goes to the caller's standard error.
        os.dup2(descriptors[2], 2)
        os.dup2(descriptors[2], 1)
        os.close(descriptors[2])
        os.chdir(cwd)
        gc.enable()
        die_with_parent()
        status = work(requests, results)
        results.close()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    # Everything is delivered. An orderly end of the interpreter would free the engine piece by piece, for seconds.
    os._exit(status)
