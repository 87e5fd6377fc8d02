"""HAProxy before the engines: its configuration is made from what is live, and taken over without closing a connection.

On SIGUSR2 the master starts a worker with the new configuration, which gets the listening sockets from the old one; the old one
finishes its requests and ends. So every connection is always somebody's.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from flows.errors import FlowError
from flows.serving.engines import HOST, POLL_SECONDS
from flows.serving.places import Places
from flows.serving.state import State
from flows.serving.supervisor import Supervisor, program_text
from stages.artifacts import atomic_path, sha256_bytes

PROGRAM = "proxy"
RELOAD_SECONDS = 20.0
SOCKET_BYTES = 90
"""A Unix socket's path may have 107 bytes, and HAProxy adds a suffix of its own."""

CONFIG = """\
# Made by the flow `serve` from .run/serving; what is changed here is lost.
global
    description {digest}
    stats socket '{socket}' mode 600 level admin expose-fd listeners
    hard-stop-after {drain}s

defaults
    mode http
    # A request has its engine's connection to itself: none is sent into one that the engine is just closing.
    option http-server-close
    # A worker that ends says so in its next response, and closes no connection that a client may just be writing to.
    option idle-close-on-response
    retries 3
    timeout connect 5s
    timeout http-request 30s
    timeout http-keep-alive 10s
    # Of a request that is answered when it is complete, nothing comes for as long as it takes.
    timeout client 1h
    timeout server 1h
"""
LISTEN = """
listen {verifier}
    bind {address}:{port}
    server {engine} {engine_host}:{engine_port}
"""


def render(states: Iterable[State], control: Path, drain_seconds: int) -> tuple[str, str]:
    """HAProxy's configuration for what is live, and its digest, which it carries as its description."""
    parts = [
        LISTEN.format(
            verifier=state.verifier,
            address=f"[{state.host}]" if ":" in state.host else state.host,
            port=state.port,
            engine=state.engine,
            engine_host=HOST,
            engine_port=state.engine_port,
        )
        for state in states
    ]
    body = CONFIG + "".join(parts)
    digest = sha256_bytes(f"{body}{control}{drain_seconds}".encode())[:16]
    return CONFIG.format(digest=digest, socket=control, drain=drain_seconds) + "".join(parts), digest


def haproxy() -> str:
    """The command. Raises FlowError: it is not installed."""
    # Debian has it where only root's PATH leads.
    found = shutil.which("haproxy", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"]))
    if found is None:
        raise FlowError("haproxy is not installed; serving switches engines behind it (Debian, Ubuntu and Fedora: package haproxy)")
    return found


@dataclass(frozen=True)
class Proxy:
    """The proxy of one repository."""

    places: Places
    supervisor: Supervisor
    drain_seconds: int

    def carries(self) -> str | None:
        """Digest of the configuration that the proxy runs with; None: it does not answer."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
                stream.settimeout(5.0)
                stream.connect(str(self.places.proxy_socket))
                stream.sendall(b"show info\n")
                text = b"".join(iter(lambda: stream.recv(65536), b"")).decode()
        except OSError:
            return None
        return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("description:")), None)

    def apply(self, states: list[State]) -> bool:
        """Bring the proxy to these states; whether there was anything to do.

        Raises:
            FlowError: HAProxy is not installed, refuses the configuration, or does not take it over; the old one stays in force.
        """
        text, digest = render(states, self.places.proxy_socket, self.drain_seconds)
        path = self.places.proxy_config
        if path.is_file() and path.read_text(encoding="utf-8") == text and self.carries() == digest:
            return False
        command = haproxy()
        if len(str(self.places.proxy_socket)) > SOCKET_BYTES:
            raise FlowError(f"{self.places.proxy_socket}: a socket's path may have {SOCKET_BYTES} bytes; use a repository with a shorter path")
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
            checked = subprocess.run([command, "-c", "-f", str(temporary)], capture_output=True, text=True, check=False)
            if checked.returncode != 0:
                raise FlowError(f"haproxy refuses its configuration: {_complaint(checked.stdout + checked.stderr)}")
        self._load(command, digest)
        return True

    def _load(self, command: str, digest: str) -> None:
        """Have the running proxy read its file, or start one."""
        program = self.supervisor.program(PROGRAM)
        if program is not None and program.dead:
            self.supervisor.stop(PROGRAM)
            self.supervisor.start(PROGRAM)
        elif program is None:
            log = self.places.logs / f"{PROGRAM}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            words = [command, "-W", "-db", "-f", str(self.places.proxy_config)]
            text = program_text(PROGRAM, words, self.places.root, log, {"autorestart": "true", "startsecs": "1", "startretries": "10", "stopwaitsecs": "10"})
            self.supervisor.add(self.places.engines / f"{PROGRAM}.conf", text)
        elif self._wait(lambda found: found is not None):
            # Before it answers it may not have set up its signals, and would end.
            self.supervisor.signal(PROGRAM, "USR2")
        if not self._wait(lambda found: found == digest):
            raise FlowError(f"haproxy did not take over its new configuration within {RELOAD_SECONDS:.0f} s: {self._last_words()}")

    def _wait(self, wanted: Callable[[str | None], bool]) -> bool:
        deadline = time.monotonic() + RELOAD_SECONDS
        while not wanted(self.carries()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _last_words(self) -> str:
        log = self.places.logs / f"{PROGRAM}.log"
        return f"{_complaint(log.read_text(encoding='utf-8', errors='replace'))} (log: {log})" if log.is_file() else "it has no log"

    def old_workers(self) -> int:
        """Workers of earlier configurations that still finish their connections."""
        program = self.supervisor.program(PROGRAM)
        if program is None or not program.pid:
            return 0
        try:
            workers = [child for child in psutil.Process(program.pid).children() if child.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return 0
        return max(0, len(workers) - 1)

    def wait_for_old_workers(self) -> bool:
        """Return once none is left; False: some still was after the time to drain."""
        deadline = time.monotonic() + self.drain_seconds
        while self.old_workers():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True


def _complaint(text: str) -> str:
    """HAProxy's own line about what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    alerts = [line for line in lines if "[ALERT]" in line]
    return alerts[0] if alerts else lines[-1]
