"""An engine in a process of its own: its memory, threads and log handlers end with it.

    run = run_isolated(EngineConfig(...), [[Request(...), ...], ...], desc="gate: fp32, plain")

The parent writes one JSON document to the child's standard input (the engine's configuration and the batches) and reads
JSON lines from its standard output; whatever libraries print goes to standard error, like the progress bar. The child
ends when its parent does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TextIO

from stages.decoding.engine import Completion, Engine, EngineConfig, EngineError, Request, Round, check_requests
from stages.errors import DraftlineError
from stages.process import die_with_parent

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


def cause(error: BaseException) -> str:
    """The first error of a chain, on one line: vLLM wraps what went wrong in a more general one."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or "no message"
    if len(text) > CAUSE_LENGTH:
        text = text[: CAUSE_LENGTH - 1] + "…"
    return text if isinstance(error, DraftlineError) else f"{type(error).__name__}: {text}"


def describe(config: EngineConfig) -> str:
    """An engine in a few words, for error messages."""
    method = config.speculative["method"] if config.speculative else "no drafter"
    return f"vLLM with {config.model} ({config.dtype}, {method})"


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
    started = time.perf_counter()
    # Warnings about libraries' own deprecations: nothing that a user of the pipeline can act on.
    command = [sys.executable, "-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning", "-m", "stages.decoding.isolated", str(os.getpid())]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert child.stdin is not None
    assert child.stdout is not None
    done: list[dict[int, Completion]] = [{} for _ in batches]
    seconds: list[float] = []
    load_seconds = 0.0
    failure: str | None = None
    try:
        try:
            with child.stdin as stream:
                json.dump({"config": asdict(config), "batches": [_numbered(batch) for batch in batches], "desc": desc}, stream)
        except BrokenPipeError:
            pass  # It has ended already: its exit status tells why.
        for line in child.stdout:
            message = json.loads(line)
            if "completion" in message:
                batch, index = message["batch"], int(message["completion"]["id"])
                finished = _completion(message["completion"], batches[batch][index].id)
                done[batch][index] = finished
                if on_finished is not None:
                    on_finished(batch, finished)
            elif "seconds" in message:
                seconds.append(message["seconds"])
            elif "ready" in message:
                load_seconds = time.perf_counter() - started
            else:
                failure = message["error"]
        status = child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()
    if failure is not None:
        raise EngineError(f"{describe(config)}: {failure}")
    if status != 0:
        how = f"ended by signal {-status}" + (" (out of memory?)" if status == -9 else "") if status < 0 else f"ended with status {status}"
        raise EngineError(f"{describe(config)}: its process {how}; what it printed is above")
    return IsolatedRun([[finished[index] for index in range(len(finished))] for finished in done], seconds, load_seconds)


def _send_completion(send: Callable[[dict[str, Any]], None], batch: int, completion: Completion) -> None:
    send({"batch": batch, "completion": asdict(completion)})


def _work(spec: dict[str, Any], results: TextIO) -> None:
    """Run what the parent asked for; one JSON line per result."""

    def send(message: dict[str, Any]) -> None:
        results.write(json.dumps(message) + "\n")
        results.flush()

    engine = Engine(EngineConfig(**spec["config"]))
    send({"ready": True})
    for number, batch in enumerate(spec["batches"]):
        engine.generate([_request(item) for item in batch], partial(_send_completion, send, number), spec["desc"])
        send({"seconds": engine.seconds})


def main() -> int:
    """The child: see the module."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        return 143
    spec = json.load(sys.stdin)
    try:
        _work(spec, results)
        status = 0
    except Exception as error:
        if not isinstance(error, DraftlineError):
            traceback.print_exc()
        results.write(json.dumps({"error": cause(error)}) + "\n")
        status = 1
    results.close()
    sys.stderr.flush()
    # Everything is delivered. An orderly end of the interpreter would free the engine piece by piece, for seconds.
    os._exit(status)


if __name__ == "__main__":
    raise SystemExit(main())
