"""vLLM's OpenAI server as a child process that never outlives us, and the few questions we ask it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.errors import DraftlineError
from stages.process import end_process_tree

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 10.0
ERROR_LINE = re.compile(r"(?:^|\s|\))([A-Za-z_][\w.]*(?:Error|Exception)): (\S.*)")
CONSEQUENCES = ("Engine core initialization failed", "EngineCore encountered an issue")
"""vLLM's own messages about an error that stands further up in its log."""


class ServerError(DraftlineError):
    """The server did not start, did not answer, or ended."""


def base_url(plan: Mapping[str, Any]) -> str:
    """Where a client on this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(plan["host"], plan["host"])
    return f"http://[{host}]:{plan['port']}" if ":" in host else f"http://{host}:{plan['port']}"


def require_free_port(plan: Mapping[str, Any]) -> None:
    """Raises ServerError if something listens on the plan's port already."""
    family = socket.AF_INET6 if ":" in plan["host"] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((plan["host"], plan["port"]))
        except OSError as error:
            raise ServerError(f"params.yaml: deploy.host = {plan['host']!r}, deploy.port = {plan['port']}: {error.strerror or error}") from None


def _die_with_starter() -> None:
    """In the child, before it becomes the server: SIGTERM once the starting process is gone, killed or not; no signal held back."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(plan: Mapping[str, Any], log: Path) -> subprocess.Popen[bytes]:
    """Start the plan's command; all it prints goes to `log`."""
    environment = {**os.environ, **plan["env"]}
    # "python" and "vllm" of the plan are those of this environment, activated or not.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        # A session of its own: Ctrl-C reaches us alone, and we end the server in order.
        return subprocess.Popen(
            plan["argv"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_starter,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and everything it has started; asked first, killed after `GRACE_SECONDS`."""
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            end_process_tree(process.pid)
            process.wait()
    # An engine process whose server has died is nobody's child any more.
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


def cause(log: Path) -> str:
    """The line of a failed server's log that says why: the last error that is not the report of another one."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    found = lines[-1] if lines else "it printed nothing"
    for number, line in enumerate(lines):
        match = ERROR_LINE.search(line)
        if match is None or any(text in line for text in CONSEQUENCES):
            continue
        found = f"{match[1]}: {match[2]}"
        if "validation error" in match[2]:
            # pydantic says what is wrong on the lines after its headline.
            found = " ".join([found, *(detail for detail in lines[number + 1 : number + 3] if not detail.startswith("For further information"))])
    return found


def _get(url: str, seconds: float) -> str:
    with urllib.request.urlopen(url, timeout=seconds) as response:
        return str(response.read().decode("utf-8"))


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, seconds: float, log: Path) -> None:
    """Return once the server answers its health check.

    Raises:
        ServerError: it ended (with the cause from its log), or `seconds` went by.
    """
    deadline = time.monotonic() + seconds
    with tqdm(desc="waiting for the server", unit="s", bar_format="{desc}: {elapsed}", leave=False, disable=None) as bar:
        while True:
            status = process.poll()
            if status is not None:
                raise ServerError(f"the server ended with status {status} before it was ready: {cause(log)} (log: {log})")
            try:
                _get(f"{url}/health", 5.0)
                return
            except OSError:
                pass  # Not listening yet, or not ready: urllib's errors are OSErrors.
            if time.monotonic() > deadline:
                raise ServerError(f"params.yaml: deploy.startup_seconds = {seconds:g}: the server was not ready by then (log: {log})")
            time.sleep(0.5)
            bar.update()


def chat(url: str, model: str, question: str, max_tokens: int, seconds: float = 300.0) -> tuple[str, int]:
    """Ask one greedy question; returns the answer and its number of tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}/v1/chat/completions: HTTP {error.code}: {' '.join(error.read().decode('utf-8', 'replace').split())[:300]}") from None
    except OSError as error:
        raise ServerError(f"{url}/v1/chat/completions: {error}") from None
    return str(answer["choices"][0]["message"]["content"]), int(answer["usage"]["completion_tokens"])


@dataclass(frozen=True)
class Acceptance:
    """The engine's own counters since its start.

    Attributes:
        drafts: draft blocks verified; drafted, accepted: tokens in them.
        per_position: `[K]`, accepted tokens at each position.
    """

    drafts: int
    drafted: int
    accepted: int
    per_position: list[int]

    def __str__(self) -> str:
        if not self.drafts:
            return "no draft was verified"
        rates = " ".join(f"{count / self.drafts:.2f}" for count in self.per_position)
        length = 1 + self.accepted / self.drafts
        return f"acceptance length {length:.2f} ({self.drafts} drafts, {self.accepted} of {self.drafted} drafted tokens accepted; per position {rates})"


def acceptance(url: str) -> Acceptance:
    """Read the counters of speculative decoding from the server's /metrics."""
    counters: dict[str, float] = {}
    positions: dict[int, float] = {}
    try:
        text = _get(f"{url}/metrics", 10.0)
    except OSError as error:
        raise ServerError(f"{url}/metrics: {error}") from None
    for line in text.splitlines():
        match = re.match(r"vllm:spec_decode_(num_\w+?)(?:_total)?\{(.*)\} (\S+)$", line)
        if match is None:
            continue
        position = re.search(r'position="(\d+)"', match[2])
        if position and match[1] == "num_accepted_tokens_per_pos":
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + float(match[3])
        else:
            counters[match[1]] = counters.get(match[1], 0.0) + float(match[3])
    return Acceptance(
        drafts=int(counters.get("num_drafts", 0)),
        drafted=int(counters.get("num_draft_tokens", 0)),
        accepted=int(counters.get("num_accepted_tokens", 0)),
        per_position=[int(positions[position]) for position in sorted(positions)],
    )
