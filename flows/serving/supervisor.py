"""supervisord, asked over its socket: programs that come and go as files in the folder that its configuration includes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ProtocolError, ServerProxy

from supervisor.xmlrpc import Faults, SupervisorTransport

from flows.errors import FlowError
from stages.artifacts import write_atomic

DEAD = ("BACKOFF", "EXITED", "FATAL", "STOPPED", "UNKNOWN")


@dataclass(frozen=True)
class Program:
    """A program's state: supervisord's word for it, its process, and when that was started and ended (seconds since 1970)."""

    state: str
    pid: int
    started: int
    now: int

    @property
    def uptime(self) -> int:
        return self.now - self.started

    @property
    def dead(self) -> bool:
        return self.state in DEAD


def program_text(name: str, command: Sequence[str], directory: Path, log: Path, options: Mapping[str, str]) -> str:
    """A program's section; `%` is supervisord's own sign and doubled."""
    values = {
        "command": " ".join(shlex.quote(word) for word in command),
        "directory": str(directory),
        "redirect_stderr": "true",
        "stdout_logfile": str(log),
        "stdout_logfile_maxbytes": "10MB",
        "stdout_logfile_backups": "1",
        "stopasgroup": "true",
        "killasgroup": "true",
        **options,
    }
    return "\n".join([f"[program:{name}]", *(f"{key} = {value.replace('%', '%%')}" for key, value in values.items()), ""])


class Supervisor:
    """The supervisor that listens on a socket."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    @contextmanager
    def _asked(self) -> Iterator[Any]:
        """A connection per question: supervisord closes idle ones."""
        if not self._socket.exists():
            raise FlowError(f"{self._socket}: no supervisor runs here; start it (make up)")
        transport = SupervisorTransport(None, None, f"unix://{self._socket}")
        try:
            with ServerProxy("http://127.0.0.1", transport=transport) as proxy:
                yield proxy.supervisor
        except (OSError, HTTPException, ProtocolError) as error:
            raise FlowError(f"{self._socket}: the supervisor does not answer: {error}") from None
        except Fault as error:
            raise FlowError(f"{self._socket}: {error.faultString}") from None

    def programs(self) -> dict[str, Program]:
        """All programs by their names."""
        with self._asked() as supervisor:
            return {info["name"]: Program(info["statename"], info["pid"], info["start"], info["now"]) for info in supervisor.getAllProcessInfo()}

    def program(self, name: str) -> Program | None:
        return self.programs().get(name)

    def add(self, conf: Path, text: str) -> None:
        """Have a program started that is described by `text`, kept in `conf`, whose stem is its name."""
        if not conf.is_file() or conf.read_text(encoding="utf-8") != text:
            write_atomic(conf, text)
        with self._asked() as supervisor:
            supervisor.reloadConfig()
            try:
                supervisor.addProcessGroup(conf.stem)
            except Fault as error:
                if error.faultCode != Faults.ALREADY_ADDED:
                    raise
        # Now, and not with supervisord's next look around.
        self.start(conf.stem)

    def start(self, name: str) -> None:
        """Start a known program that has ended."""
        with self._asked() as supervisor:
            try:
                supervisor.startProcess(name, False)
            except Fault as error:
                if error.faultCode != Faults.ALREADY_STARTED:
                    raise

    def signal(self, name: str, number: str) -> None:
        with self._asked() as supervisor:
            supervisor.signalProcess(name, number)

    def stop(self, name: str) -> None:
        """End a program, if it runs."""
        with self._asked() as supervisor:
            try:
                supervisor.stopProcess(name)
            except Fault as error:
                if error.faultCode not in (Faults.NOT_RUNNING, Faults.BAD_NAME):
                    raise

    def remove(self, conf: Path) -> None:
        """End a program and forget it; its file goes first, so that a restarted supervisor does not know it any more."""
        conf.unlink(missing_ok=True)
        self.stop(conf.stem)
        with self._asked() as supervisor:
            supervisor.reloadConfig()
            try:
                supervisor.removeProcessGroup(conf.stem)
            except Fault as error:
                if error.faultCode != Faults.BAD_NAME:
                    raise
