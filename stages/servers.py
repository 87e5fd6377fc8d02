"""Servers as child processes that never outlive us: vLLM's and others'. Their start, their health, their end, and what they died of."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from tqdm import tqdm

from stages.errors import DraftlineError
from stages.installed import Device
from stages.process import end_process_tree

PR_SET_PDEATHSIG = 1
MEMORY_NODES = Path("/sys/devices/system/node")
GRACE_SECONDS = 10.0
FAMILY_SECONDS = 3.0
ERROR_LINE = re.compile(r"(?:^|\s|\))([A-Za-z_][\w.]*(?:Error|Exception)): (\S.*)")
CONSEQUENCES = ("Engine core initialization failed", "EngineCore encountered an issue")
"""vLLM's own messages about an error that stands further up in its log."""


class ServerError(DraftlineError):
    """The server did not start, did not answer, or ended."""


def vllm_command(device: Device, model: Path) -> list[str]:
    """How vLLM's OpenAI server is started for `model`."""
    # The CPU wheel's `vllm` command looks for a distribution of that name and dies; its module takes the same arguments.
    if device == "cpu":
        return ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *_executor()]
    return ["vllm", "serve", str(model)]


def _executor() -> list[str]:
    """Where the model runs: in the engine's own process, unless there are memory nodes to be bound to.

    vLLM's CPU build takes a process more for that, so that it can bind its threads to a node and keep a core for itself. On one node that is
    one import of vLLM (a third of a small server's start) and one of two cores. (Measured on two: a token in 0.70 of the time.)
    """
    if len([*MEMORY_NODES.glob("node[0-9]*")]) > 1:
        return []
    # By its path: the name "uni" is read as "mp".
    return ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]


def _die_with_starter() -> None:
    """In the child, before it becomes the server: SIGTERM once the starting process is gone, killed or not; no signal held back."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command, with `env` over this process's environment; all it prints goes to `log`."""
    environment = {**os.environ, **env}
    # "python" and "vllm" of a command are those of this environment, activated or not.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        # A session of its own: Ctrl-C reaches us alone, and we end the server in order.
        return subprocess.Popen(
            list(argv),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_starter,
        )


def _session(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The server and everything it has started: an engine process whose server was killed is nobody's child, but still of its session."""
    if process.poll() is not None and psutil.pid_exists(process.pid):
        return []  # the number is another process's by now
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) == process.pid:
                members.append(psutil.Process(pid))
    return members


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and everything it has started; asked first, killed after `GRACE_SECONDS`."""
    family = _session(process)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            end_process_tree(process.pid)
            process.wait()
    # What the server leaves in shared memory is removed by a helper of it that outlives it for a moment.
    _, family = psutil.wait_procs(family, timeout=FAMILY_SECONDS)
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


def free_port(taken: Container[int] = ()) -> int:
    """A TCP port of 127.0.0.1 that nothing listens on, and none of `taken`."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def get(url: str, seconds: float) -> str:
    with urllib.request.urlopen(url, timeout=seconds) as response:
        return str(response.read().decode("utf-8"))


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, seconds: float, log: Path, knob: str = "deploy.startup_seconds") -> None:
    """Return once the server answers its health check; `knob` is where `seconds` comes from.

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
                get(f"{url}/health", 5.0)
                return
            except OSError:
                pass  # Not listening yet, or not ready: urllib's errors are OSErrors.
            if time.monotonic() > deadline:
                raise ServerError(f"params.yaml: {knob} = {seconds:g}: the server was not ready by then (log: {log})")
            time.sleep(0.5)
            bar.update()
