"""The servers of a stream: the extracting vLLM, and Mooncake's master where one is needed."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.environment import EAGER, ENGINE, LOCAL, THREADS
from stages.hidden_states.mooncake import ENVIRONMENT, load_library
from stages.installed import Device, installed_device
from stages.servers import ServerError, cause, free_port, start, stop, vllm_command, wait_until_healthy

MODEL_NAME = "verifier"
MASTER_SECONDS = 10.0
LEASE_SECONDS = 30


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """vLLM's `EngineArgs` as arguments of its server."""
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def server_command(engine: Mapping[str, Any], host: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Argument list and environment of an extracting server; `engine`: what `launch.engine_arguments` gives."""
    device: Device = installed_device()
    arguments = dict(engine)
    model = Path(arguments.pop("model"))
    if device != "cpu":
        # The other devices size their cache by the memory they have.
        del arguments["kv_cache_memory_bytes"]
    argv = [*vllm_command(device, model), "--served-model-name", MODEL_NAME, "--host", host, "--port", str(port), "--disable-uvicorn-access-log"]
    return [*argv, *flags(arguments)], ENGINE | LOCAL | ENVIRONMENT | (THREADS | EAGER if device == "cpu" else {})


class Running:
    """A server that we have started."""

    def __init__(self, what: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.what, self.process, self.log = what, process, log

    def ended(self) -> str | None:
        """Why it is no more; None while it runs."""
        status = self.process.poll()
        return None if status is None else f"the {self.what} ended with status {status}: {cause(self.log)} (log: {self.log})"


@contextmanager
def running(what: str, argv: list[str], env: Mapping[str, str], log: Path) -> Iterator[Running]:
    """A server for as long as the block lasts; it ends with this process, however that ends."""
    process = start(argv, env, log)
    try:
        yield Running(what, process, log)
    finally:
        stop(process)


@contextmanager
def extracting_server(argv: list[str], env: Mapping[str, str], port: int, seconds: float, log: Path) -> Iterator[Running]:
    """A healthy extracting server on `port`. Raises ServerError: it did not get so far."""
    with running("extracting server", argv, env, log) as server:
        wait_until_healthy(server.process, f"http://127.0.0.1:{port}", seconds, log, "extraction.startup_seconds")
        yield server


def master_command(port: int, metrics_port: int) -> list[str]:
    """Argument list of a Mooncake master on 127.0.0.1."""
    return [
        "mooncake_master",
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
        f"--default_kv_lease_ttl={LEASE_SECONDS}s",
        "--allow_evict_soft_pinned_objects=false",
        "--client_ttl=10",
    ]


@contextmanager
def mooncake_master(log: Path) -> Iterator[tuple[str, Running]]:
    """A Mooncake master on 127.0.0.1 and its address.

    Raises:
        StoreError: Mooncake is not usable on this machine.
        ServerError: it does not start.
    """
    load_library()
    port = free_port()
    with running("Mooncake master", master_command(port, free_port()), {"GLOG_minloglevel": "1"}, log) as master:
        deadline = time.monotonic() + MASTER_SECONDS
        while True:
            if (why := master.ended()) is not None:
                raise ServerError(why)
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ServerError(f"the Mooncake master did not listen within {MASTER_SECONDS:.0f} s (log: {log})") from None
                time.sleep(0.05)
        yield f"127.0.0.1:{port}", master
