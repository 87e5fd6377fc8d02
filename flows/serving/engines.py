"""Engines as programs of supervisord: started from a plan, waited for, asked how busy they are, ended."""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from flows.errors import FlowError
from flows.serving.engine import REFUSED
from flows.serving.places import Places
from flows.serving.state import Target
from flows.serving.supervisor import Supervisor, program_text
from stages.artifacts import read_json, write_json
from stages.servers import cause, get

PREFIX = "engine-"
HOST = "127.0.0.1"
POLL_SECONDS = 0.2
SILENT_SECONDS = 15.0
GIVEN_UP = ("BACKOFF", "FATAL", "STOPPED", "STOPPING")
"""States that a live engine comes out of late or never. (BACKOFF: it has ended in its first second, which no crash of vLLM does.)"""
REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)


def url(port: int) -> str:
    return f"http://{HOST}:{port}"


def new_name(verifier: str, target: Target) -> str:
    """A name that no engine had before: its log and its place in the proxy are its own."""
    return f"{PREFIX}{verifier}-{target.digest[:8]}-{target.content[:8] if target.content else 'alone'}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class Engines:
    """The engines of one repository."""

    places: Places
    supervisor: Supervisor

    def conf(self, name: str) -> Path:
        return self.places.engines / f"{name}.conf"

    def plan(self, name: str) -> Path:
        return self.places.engines / f"{name}.json"

    def log(self, name: str) -> Path:
        return self.places.logs / f"{name}.log"

    def known(self) -> set[str]:
        """Names of all engines: those that supervisord runs, and those that it would after a restart."""
        files = {path.stem for path in self.places.engines.glob(f"{PREFIX}*") if path.suffix in (".conf", ".json")}
        return files | {name for name in self.supervisor.programs() if name.startswith(PREFIX)}

    def ports(self) -> set[int]:
        return {int(read_json(path)["port"]) for path in self.places.engines.glob(f"{PREFIX}*.json")}

    def directories(self) -> set[str]:
        """What the known engines load."""
        plans = [read_json(path) for path in self.places.engines.glob(f"{PREFIX}*.json")]
        return {plan[part]["directory"] for plan in plans for part in ("verifier", "drafter") if plan[part] is not None}

    def start(self, plan: dict[str, Any]) -> None:
        """Have an engine started; its plan is on disk before supervisord knows it."""
        name = plan["name"]
        write_json(self.plan(name), plan)
        self.places.logs.mkdir(parents=True, exist_ok=True)
        options = {
            "startsecs": "1",
            "startretries": "3",
            # A crashed engine is started again; one that may not be served is not.
            "autorestart": "unexpected",
            "exitcodes": str(REFUSED),
            "stopwaitsecs": "20",
        }
        command = [sys.executable, "-m", "flows.serving.engine", str(self.plan(name))]
        self.supervisor.add(self.conf(name), program_text(name, command, self.places.root, self.log(name), options))

    def remove(self, name: str) -> None:
        """End an engine and forget it."""
        self.supervisor.remove(self.conf(name))
        self.plan(name).unlink(missing_ok=True)

    def answers(self, port: int, model: str) -> bool:
        """Whether an engine is healthy, and serves `model`: a port may have become another program's."""
        try:
            get(f"{url(port)}/health", 5.0)
            return model in [entry["id"] for entry in json.loads(get(f"{url(port)}/v1/models", 5.0))["data"]]
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            return False

    def wait_until_healthy(self, name: str, port: int, model: str, seconds: float) -> None:
        """Return once a new engine can be asked.

        Raises:
            FlowError: it ended (it is not waited for a second try), or was not ready in time.
        """
        deadline = time.monotonic() + seconds
        started = 0
        while not self.answers(port, model):
            program = self.supervisor.program(name)
            if program is None or program.dead or (started and program.started != started):
                log = self.log(name)
                raise FlowError(f"{name} ended before it was ready: {cause(log) if log.is_file() else 'no log'} (log: {log})")
            started = program.started
            if time.monotonic() > deadline:
                raise FlowError(f"{name} was not ready after {seconds:g} s (deploy.startup_seconds; log: {self.log(name)})")
            time.sleep(POLL_SECONDS)

    def lives(self, name: str, port: int, model: str, seconds: float) -> bool:
        """Whether a live engine answers. One that supervisord has started again gets `seconds` to load, one that should have loaded long ago a few."""
        deadline = time.monotonic() + seconds
        silent_until = time.monotonic() + min(seconds, SILENT_SECONDS)
        exited = False
        while not self.answers(port, model):
            program = self.supervisor.program(name)
            if program is None or program.state in GIVEN_UP or time.monotonic() > deadline:
                return False
            if program.state == "RUNNING" and program.uptime > seconds and time.monotonic() > silent_until:
                return False
            if program.state == "EXITED":
                # On its way to be started again, unless it refused to serve.
                if exited:
                    return False
                exited = True
                time.sleep(1.0)
            time.sleep(POLL_SECONDS)
        return True

    def requests(self, port: int) -> int:
        """Requests that an engine works on or has waiting; 0 where it does not answer."""
        try:
            text = get(f"{url(port)}/metrics", 5.0)
        except (OSError, HTTPException):
            return 0
        return int(sum(float(value) for value in REQUESTS.findall(text)))
