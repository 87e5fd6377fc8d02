"""An engine in a process of its own: its memory, threads and log handlers end with it.

    run = run_isolated(EngineConfig(...), [[Request(...), ...], ...], desc="gate: fp32, plain")

`EngineProcess` is the same, asked batch by batch. Its process comes from Python's fork server, which has imported vLLM
(`stages.decoding.preloaded`) and holds no engine itself: engines share nothing but imported modules. Whatever libraries
print there goes to the caller's standard error, like the progress bar. The process ends when its caller hangs up, and when its caller does.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from stages.decoding.engine import Completion, Engine, EngineConfig, EngineError, Request, check_requests
from stages.decoding.speculative import ngram_config as ngram_config
from stages.decoding.speculative import spec_config as spec_config
from stages.environment import engine_environment
from stages.errors import DraftlineError
from stages.process import end_process_tree

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["stages.decoding.preloaded"])

Life = Callable[[EngineConfig, Connection], int]
"""What an engine's process does with its end of the connection; returns the exit status. See `engine_life`."""

END_SECONDS = 20.0
"""Longest wait for an engine's process to end by itself."""

CAUSE_LENGTH = 400
"""Longest cause in an error message, characters; the whole traceback is on standard error."""


@dataclass(frozen=True)
class IsolatedRun:
    """What an isolated engine did: `completions` and `seconds` (wall clock of its decoding) per batch.

    `load_seconds`: from the start of the process to the engine being ready.
    """

    completions: list[list[Completion]]
    seconds: list[float]
    load_seconds: float


def cause(error: BaseException, kv_cache_bytes: int = 0) -> str:
    """The first error of a chain, on one line: vLLM wraps what went wrong in a more general one."""
    while error.__cause__ is not None:
        error = error.__cause__
    details = [str(item["msg"]).removeprefix("Value error, ") for item in error.errors()] if isinstance(error, ValidationError) else [str(error)]
    text = " ".join("; ".join(details).split()) or "no message"
    if "cache blocks" in text or "KV cache is needed" in text:
        text = f"engine.kv_cache_bytes = {kv_cache_bytes} is too small: {text}"
    if len(text) > CAUSE_LENGTH:
        text = text[: CAUSE_LENGTH - 1] + "…"
    return text if isinstance(error, DraftlineError) else f"{type(error).__name__}: {text}"


def describe(config: EngineConfig) -> str:
    """An engine in a few words, for error messages."""
    method = config.speculative["method"] if config.speculative else "no drafter"
    return f"vLLM with {config.model} ({config.dtype}, {method})"


class EngineProcess:
    """An engine in a process of its own, asked batch by batch; use it in a `with` statement.

    It loads while the caller goes on, so two of them can start at the same time.

    Attributes:
        desc: name of the progress bars of the next batches.
        seconds: wall clock of the last batch's decoding.
        load_seconds: from the start of the process to the engine being ready, once `wait_ready` or `generate` returned.
    """

    def __init__(self, config: EngineConfig, desc: str | None = None, live: Life | None = None) -> None:
        """Start it; the first one of a program waits until the fork server has imported vLLM.

        Args:
            desc: name of the progress bars on stderr; None: no bars.
            live: the process's work, importable by name; None: an engine's.
        Raises:
            EngineError: no process can be started.
        """
        self.config = config
        self.desc = desc
        self.seconds = 0.0
        self.load_seconds = 0.0
        self._started = time.perf_counter()
        self._connection, theirs = PROCESSES.Pipe()
        with theirs, Connection(os.dup(2), readable=False) as stderr:
            self._process = PROCESSES.Process(target=_begin, args=(live or engine_life, config, theirs, stderr), daemon=True)
            try:
                with _environment(engine_environment(config.model)):
                    forkserver.ensure_running()
                self._process.start()
            except (EOFError, OSError) as error:
                raise EngineError(f"{describe(config)}: the process that imports vLLM ended ({cause(error)}); what it printed is above") from None

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid or 0

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the process: in order after the work, at once after an error."""
        # End of file tells it to go. It may have gone already.
        self._connection.close()
        if kind is None:
            self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def wait_ready(self) -> None:
        """Return when the engine has been loaded.

        Raises:
            EngineError: it could not be; names the engine and the cause.
        """
        if not self.load_seconds:
            self._receive()
            self.load_seconds = time.perf_counter() - self._started

    def generate(self, requests: list[Request], on_finished: Callable[[Completion], None] | None = None) -> list[Completion]:
        """Decode a batch: see `Engine.generate`.

        Raises:
            EngineError: a prompt does not fit, or the engine failed; names the engine and the cause.
        """
        check_requests(self.config, requests)
        self.wait_ready()
        # A broken pipe: it has ended already, and what `_receive` finds tells why.
        with contextlib.suppress(BrokenPipeError):
            # Under their places in the batch: the callers' own ids need not be unique.
            self._connection.send(([replace(request, id=str(index)) for index, request in enumerate(requests)], self.desc))
        done: dict[int, Completion] = {}
        while isinstance(message := self._receive(), Completion):
            index = int(message.id)
            done[index] = replace(message, id=requests[index].id)
            if on_finished is not None:
                on_finished(done[index])
        self.seconds = message
        return [done[index] for index in range(len(requests))]

    def ask(self, message: Any) -> Any:
        """Send a message to a process that lives another life than `engine_life`; returns its answer. Raises EngineError as `generate` does."""
        self.wait_ready()
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(message)
        return self._receive()

    def _receive(self) -> Any:
        """A completion, or the seconds of a finished batch (0 when the engine is ready)."""
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            status = self._process.exitcode or 0
            how = f"ended by signal {-status}" + (" (out of memory?)" if status == -9 else "") if status < 0 else f"ended with status {status}"
            raise EngineError(f"{describe(self.config)}: its process {how}; what it printed is above") from None
        if isinstance(message, EngineError):
            raise message
        return message


def run_isolated(
    config: EngineConfig,
    batches: list[list[Request]],
    desc: str | None = None,
    on_finished: Callable[[int, Completion], None] | None = None,
) -> IsolatedRun:
    """Start an engine in its own process, decode each batch in one timed `generate`, and end it.

    Args:
        desc: name of the progress bar on stderr; None: no bar.
        on_finished: called with the batch's index and each completion as soon as it is done.
    Raises:
        EngineError: the engine could not be started, or failed while decoding; names the engine and the cause.
    """
    for batch in batches:
        check_requests(config, batch)
    completions: list[list[Completion]] = []
    seconds: list[float] = []
    with EngineProcess(config, desc) as engine:
        for number, batch in enumerate(batches):
            completions.append(engine.generate(batch, partial(on_finished, number) if on_finished else None))
            seconds.append(engine.seconds)
        engine.wait_ready()
        return IsolatedRun(completions, seconds, engine.load_seconds)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """`variables` in the environment, for a process that starts inside; what the user has set stays."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _end_with_owner() -> None:
    """End this process, and what it has started, when the one that asked for it is gone, killed or not."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    end_process_tree(os.getpid(), own=False)
    os._exit(143)


def _begin(live: Life, config: EngineConfig, connection: Connection, stderr: Connection) -> None:
    """An engine's process, from the fork to its end."""
    status = 1
    try:
        # Whatever libraries print goes to the caller's standard error.
        os.dup2(stderr.fileno(), 2)
        os.dup2(stderr.fileno(), 1)
        # Libraries' locks are nameless then; named ones would be left behind where a process does not end in order.
        multiprocessing.set_start_method("fork", force=True)
        threading.Thread(target=_end_with_owner, daemon=True).start()
        gc.enable()
        status = live(config, connection)
        connection.close()
    except BaseException:
        traceback.print_exc()
    # Everything is delivered. An orderly end of the interpreter would free the engine piece by piece, for seconds.
    os._exit(status)


_ALIVE: list[Engine] = []
"""Keeps an engine from being taken apart when its work is done: that takes seconds, and the process ends anyway."""


def _decode(engine: Engine, connection: Connection, message: Any) -> None:
    requests, desc = message
    engine.generate(requests, connection.send, desc)
    connection.send(engine.seconds)


def engine_life(config: EngineConfig, connection: Connection, work: Callable[[Engine, Connection, Any], None] = _decode) -> int:
    """Load an engine, do `work` for each message until the caller hangs up; returns the exit status."""
    try:
        engine = Engine(config)
        _ALIVE.append(engine)
        connection.send(0.0)
        while True:
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                return 0
            work(engine, connection, message)
    except BrokenPipeError:
        return 1  # Nobody listens any more.
    except Exception as error:
        if not isinstance(error, DraftlineError):
            traceback.print_exc()
        connection.send(EngineError(f"{describe(config)}: {cause(error, config.kv_cache_bytes)}"))
        return 1
