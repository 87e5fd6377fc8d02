"""An engine in a process of its own: its memory, threads and log handlers end with it.

    run = run_isolated(EngineConfig(...), [[Request(...), ...], ...], desc="gate: fp32, plain")

`EngineProcess` is the same, asked batch by batch. The parent writes JSON lines to the child's input (the engine's
configuration, then the batches) and reads JSON lines from its output; whatever libraries print goes to standard error,
like the progress bar. The child ends at the end of its input, and when its parent does.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, NoReturn, TextIO

from pydantic import ValidationError

from stages.decoding.engine import Completion, Engine, EngineConfig, EngineError, Request, Round, check_requests
from stages.decoding.nursery import nursery, serve
from stages.decoding.speculative import ngram_config as ngram_config
from stages.decoding.speculative import spec_config as spec_config
from stages.environment import engine_environment
from stages.errors import DraftlineError

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


def _completion(data: dict[str, Any], name: str) -> Completion:
    """A completion from its JSON form; JSON turns the token ids of `logprobs` into strings."""
    logprobs = data["logprobs"]
    return Completion(
        name,
        data["token_ids"],
        data["finish_reason"],
        [Round(**item) for item in data["rounds"]],
        None if logprobs is None else [{int(token): value for token, value in position.items()} for position in logprobs],
    )


def _numbered(batch: list[Request]) -> list[dict[str, Any]]:
    """Requests for the child, under their places in the batch: the callers' own ids need not be unique."""
    return [{**asdict(request), "id": str(index)} for index, request in enumerate(batch)]


def _request(data: dict[str, Any]) -> Request:
    return Request(**{**data, "stop_token_ids": tuple(data["stop_token_ids"])})


def cause(error: BaseException, kv_cache_bytes: int = 0) -> str:
    """The first error of a chain, on one line: vLLM wraps what went wrong in a more general one."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ValidationError):
        text = "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors())
    else:
        text = " ".join(str(error).split()) or "no message"
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

    def __init__(self, config: EngineConfig, desc: str | None = None, module: str = "stages.decoding.isolated") -> None:
        """Start it.

        Args:
            desc: name of the progress bars on stderr; None: no bars.
            module: the child's; another one prepares its process and then calls our `main`.
        """
        self.config = config
        self.desc = desc
        self.seconds = 0.0
        self.load_seconds = 0.0
        self._started = time.perf_counter()
        self._nursery = nursery(module, {**engine_environment(config.model), **os.environ})
        self._number, self._requests, self._results = self._nursery.start()
        self._send({"config": asdict(config)})

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the process: in order after the work, at once after an error."""
        if kind is not None:
            self._nursery.kill(self._number)
        # End of file tells it to go. It may have gone already.
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        if self._nursery.wait(self._number, END_SECONDS) is None:
            self._nursery.kill(self._number)
        self._results.close()

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
        self._send({"batch": _numbered(requests), "desc": self.desc})
        done: dict[int, Completion] = {}
        while "completion" in (message := self._receive()):
            index = int(message["completion"]["id"])
            done[index] = _completion(message["completion"], requests[index].id)
            if on_finished is not None:
                on_finished(done[index])
        self.seconds = message["seconds"]
        return [done[index] for index in range(len(requests))]

    def _send(self, message: dict[str, Any]) -> None:
        # A broken pipe: it has ended already, and what `_receive` finds tells why.
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(message) + "\n")
            self._requests.flush()

    def _receive(self) -> dict[str, Any]:
        line = self._results.readline()
        if line:
            message: dict[str, Any] = json.loads(line)
            if "error" in message:
                raise EngineError(f"{describe(self.config)}: {message['error']}")
            return message
        status = self._nursery.wait(self._number) or 0
        how = f"ended by signal {-status}" + (" (out of memory?)" if status == -9 else "") if status < 0 else f"ended with status {status}"
        raise EngineError(f"{describe(self.config)}: its process {how}; what it printed is above")


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


_ALIVE: list[Engine] = []
"""Keeps an engine from being taken apart when its work is done: that takes seconds, and the process ends anyway."""


def _prepare() -> None:
    """Import what an engine of this device needs."""
    for module in ("vllm.engine.arg_utils", "vllm.v1.engine.llm_engine", "vllm.sampling_params", "vllm.v1.executor.uniproc_executor"):
        import_module(module)
    if import_module("vllm.platforms").current_platform.is_cpu():
        import_module("vllm.v1.worker.cpu_worker")


def _work(requests: TextIO, results: TextIO) -> int:
    """An engine's life: load what the first line describes, decode the batch of each later one; one JSON line per result."""

    def send(message: dict[str, Any]) -> None:
        results.write(json.dumps(message) + "\n")
        results.flush()

    config = EngineConfig(**json.loads(requests.readline())["config"])
    try:
        engine = Engine(config)
        _ALIVE.append(engine)
        send({"ready": True})
        for line in requests:
            message = json.loads(line)
            engine.generate([_request(item) for item in message["batch"]], lambda done: send({"completion": asdict(done)}), message["desc"])
            send({"seconds": engine.seconds})
    except BrokenPipeError:
        return 1  # Nobody listens any more.
    except Exception as error:
        if not isinstance(error, DraftlineError):
            traceback.print_exc()
        send({"error": cause(error, config.kv_cache_bytes)})
        return 1
    return 0


def main() -> NoReturn:
    """What a nursery's module calls."""
    serve(_prepare, _work)


if __name__ == "__main__":
    main()
