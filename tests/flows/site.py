"""A repository that serves: its own supervisord, HAProxy and registry, all real, with small processes where engines stand."""

from __future__ import annotations

import configparser
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from ruamel.yaml import YAML

from flows.registry import Registry
from flows.serving.places import Places
from flows.serving.reconcile import PlanBuilder, Reconciler
from flows.serving.state import read_state
from stages.artifacts import digest_json, read_json, write_json, write_manifest
from stages.pairing.identity import VerifierIdentity, compute_identity
from stages.register.registry import Candidate, register
from tests.flows.tiny_plan import DRAIN_SECONDS, STARTUP_SECONDS, TINY_ENGINE, tiny_plan
from tests.gate.pair import write_drafter
from tests.paths import REPOSITORY

NAME = "tiny"
EXPERIMENT = "draftline"
Costs = Callable[[str, str], dict[str, Any]]
"""From the digests of a verifier and a drafter to what an evaluation measured of them."""


def die(*_: object, **__: object) -> None:
    """What a function becomes at which a run is to be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def reconcile_in_a_process(site: Site, change: Callable[[], None], seconds: float = 300.0) -> bool:
    """Reconcile in a process of its own, whose code `change` has changed before; whether it was killed. Bounded: `seconds`."""
    child = os.fork()
    if child == 0:
        try:
            change()
            site.reconcile()
        finally:
            os._exit(1)
    deadline = time.monotonic() + seconds
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"a run has not ended within {seconds:.0f} s")
        time.sleep(0.02)
    return os.WIFSIGNALED(ended[1])


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Site:
    """Started and ended with the block; `root` needs a short path, and must be the current directory."""

    def __init__(self, root: Path, database: Path, port: int, build: PlanBuilder | None = None) -> None:
        self.root = root
        self._build = build or tiny_plan
        self._startup = STARTUP_SECONDS if build is None else 300.0
        self.port = port
        self.places = Places(root)
        shutil.copy(database, root / "mlflow.db")
        yaml = YAML()
        params = yaml.load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
        params["engine"] |= {"dtype": "float32", "max_model_len": 256, "kv_cache_bytes": 1 << 26}
        params["prepare"] |= {"max_seq_len": 128}
        with (root / "params.yaml").open("w", encoding="utf-8") as stream:
            yaml.dump(params, stream)
        self.uri = f"sqlite:///{root / 'mlflow.db'}"
        self.said: list[str] = []
        self._checkpoints = 0

    def __enter__(self) -> Site:
        parser = configparser.RawConfigParser(comment_prefixes=(";",), inline_comment_prefixes=None)
        parser.read(REPOSITORY / "infra" / "local" / "supervisord.conf")
        for section in parser.sections():
            if section.startswith("program:"):
                parser.remove_section(section)
        conf = self.root / "infra" / "local" / "supervisord.conf"
        conf.parent.mkdir(parents=True)
        self.places.logs.mkdir(parents=True)
        with conf.open("w") as stream:
            parser.write(stream)
        self.start()
        self.registry = Registry(self.uri, EXPERIMENT)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the supervisor, and so all that it knows."""
        (self.places.run / "supervisord.pid").unlink(missing_ok=True)
        self.places.supervisor_socket.unlink(missing_ok=True)
        conf = self.root / "infra" / "local" / "supervisord.conf"
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "DRAFTLINE_ROOT": str(self.root), "PYTHONPATH": str(REPOSITORY), "PATH": path}
        subprocess.run(["supervisord", "-c", str(conf)], cwd=self.root, env=environment, check=True, timeout=30)
        self.until("a supervisor", lambda: (self.places.run / "supervisord.pid").is_file() and self.places.supervisor_socket.exists())

    def kill(self) -> None:
        """End the supervisor and all that it has started."""
        supervisor = psutil.Process(int((self.places.run / "supervisord.pid").read_text()))
        # At once: asked, supervisord ends its programs one after the other, a second each.
        supervisor.suspend()
        family = [*supervisor.children(recursive=True), supervisor]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.until("the end of all processes", lambda: not any(_lives(process) for process in family))

    def until(self, what: str, look: Callable[[], Any], seconds: float = 20.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := look()):
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
            time.sleep(0.05)
        return found

    @property
    def reconciler(self) -> Reconciler:
        return Reconciler(self.registry, self.places, self.port, self._build, startup_seconds=self._startup, drain_seconds=DRAIN_SECONDS, say=self.said.append)

    def reconcile(self, **options: Any) -> str:
        return self.reconciler.reconcile(NAME, **options)

    # The registry.

    def serve_verifier(self, directory: Path, name: str = NAME) -> VerifierIdentity:
        """Register a verifier, its files in the repository's store, and have it served."""
        identity = compute_identity(directory)
        store = self.root / "outputs" / "verifier" / "models"
        store.mkdir(parents=True, exist_ok=True)
        if not (store / identity.digest[:16]).exists():
            (store / identity.digest[:16]).symlink_to(directory)
        version, _ = self.registry.register_verifier(name, identity, str(directory), "as-is")
        self.registry.set_alias(f"verifier.{name}", "serving", version.version)
        return identity

    def add_drafter(self, verifier: Path, gate: str = "pass", acceptance: float = 1.5, costs: Costs | None = None, **behaviour: Any) -> int:
        """Register a drafter of a verifier; no two have the same content. `costs`: of a verifier's and a drafter's digest."""
        self._checkpoints += 1
        identity = compute_identity(verifier)
        checkpoint = self.root / "outputs" / f"checkpoint-{self._checkpoints}"
        write_drafter(checkpoint, verifier, identity)
        write_json(checkpoint / "behaviour.json", {"number": self._checkpoints, **behaviour})
        files = write_manifest(checkpoint, identity.digest)["files"]
        lock = read_json(checkpoint / "verifier_lock.json")
        measured = costs(identity.digest, digest_json(files)) if costs is not None else None
        lengths = {"macro": acceptance, "per_kind": {}, "per_position": {}}
        candidate = Candidate(checkpoint, files, identity.digest, lock, gate, lengths, "0" * 64, measured)
        return int(register(self.uri, EXPERIMENT, f"drafter.{NAME}", candidate).version)

    def make_champion(self, version: int) -> None:
        self.registry.set_alias(f"drafter.{NAME}", "champion", version)

    def new_champion(self, verifier: Path, **behaviour: Any) -> int:
        version = self.add_drafter(verifier, **behaviour)
        self.make_champion(version)
        return version

    # What users see.

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, prompt: str = "hello") -> dict[str, Any]:
        body = {"model": NAME, "messages": [{"role": "user", "content": prompt}]}
        # verify: loading certificates that nobody shows would be most of a question's time.
        answer: dict[str, Any] = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=20, verify=False).raise_for_status().json()
        return answer

    def who(self) -> str:
        """`<verifier's digest>/<drafter's content, or alone>` of the engine that answers."""
        return str(self.ask()["system_fingerprint"])

    def live(self) -> tuple[int, int | None]:
        """Versions of the verifier and the drafter that are recorded as live."""
        state = read_state(self.places, NAME)
        assert state is not None
        return state.target.verifier_version, state.target.drafter_version

    def engine_processes(self) -> list[psutil.Process]:
        supervisor = psutil.Process(int((self.places.run / "supervisord.pid").read_text()))
        found = []
        for child in supervisor.children():
            try:
                if str(TINY_ENGINE) in child.cmdline():
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found
