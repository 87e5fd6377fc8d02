"""A site with its own MLflow server (on SQLite), Prefect server and worker, started by `flows.local` as `make up` does; each of them may be killed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from uuid import uuid4

import httpx
import psutil

from flows.registry import Registry
from flows.serving.reconcile import PlanBuilder
from stages.servers import free_port
from tests.flows.house import ENDED, processes_in
from tests.flows.site import EXPERIMENT, NAME, Site
from tests.flows.tiny_plan import PATIENT_SECONDS
from tests.paths import REPOSITORY

SERVERS = ("mlflow", "prefect", "worker")
UP_SECONDS = 300.0
"""For a killed server to answer again, on a machine that does something else too."""
RUN_SECONDS = 400.0
LOST_SECONDS = 30.0
"""For a worker to begin what it should, or never."""

# Every question to Prefect would be a line of a failed test's report.
logging.getLogger("httpx").setLevel(logging.WARNING)


class StaffedSite(Site):
    """Started and ended with the block."""

    def __init__(self, root: Path, database: Path, port: int, build: PlanBuilder | None = None) -> None:
        super().__init__(root, database, port, build)
        for name in ("flows", "stages", "tests"):
            (root / name).symlink_to(REPOSITORY / name)
        (root / "infra" / "local").mkdir(parents=True)
        shutil.copy(REPOSITORY / "infra" / "local" / "supervisord.conf", root / "infra" / "local")
        shutil.copy(REPOSITORY / "prefect.toml", root)
        shutil.copy(REPOSITORY / "tests" / "flows" / "prefect.yaml", root)
        self._ports = {"mlflow": free_port(), "prefect": free_port()}
        self._environment = os.environ | {
            "DRAFTLINE_ROOT": str(root),
            "MLFLOW_PORT": str(self._ports["mlflow"]),
            "MLFLOW_BACKEND": self.uri,
            "PREFECT_PORT": str(self._ports["prefect"]),
            "SERVE_PORT": str(port),
        }
        self.uri = f"http://127.0.0.1:{self._ports['mlflow']}"
        self.api = f"http://127.0.0.1:{self._ports['prefect']}/api"
        self._deployments: dict[str, str] = {}
        self._startup = PATIENT_SECONDS if build is None else 600.0

    def __enter__(self) -> StaffedSite:
        words = [sys.executable, "-m", "flows.local", "up"]
        # Again, where a busy machine needs longer than people are to wait for.
        for _ in range(3):
            done = subprocess.run(words, cwd=self.root, env=self._environment, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode == 0:
                break
        else:
            self.__exit__()
            raise AssertionError(f"{done.stdout}{done.stderr}")
        self.registry = Registry(self.uri, EXPERIMENT)
        return self

    def __exit__(self, *_: object) -> None:
        if (self.places.run / "supervisord.pid").is_file():
            self.kill()
        # What a killed worker has left.
        for process in processes_in(self.root):
            # (The tests themselves work there, too.)
            if process.pid != os.getpid():
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    # The servers.

    def stored(self, version: int) -> Path:
        """Where the server keeps the files of a drafter's version."""
        location = self.registry.client.get_model_version_download_uri(f"drafter.{NAME}", str(version))
        return self.places.run / "artifacts" / location.partition("mlflow-artifacts:/")[2].lstrip("/")

    def kill_server(self, name: str) -> None:
        """`kill -9` of a server's processes. (A worker's flows are not the worker: they live on.)"""
        program = self.reconciler.engines.supervisor.program(name)
        assert program is not None
        if not program.pid:
            return  # on its way to be started again
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(program.pid)
            for one in [process] if name == "worker" else [process, *process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)

    def up(self, name: str) -> bool:
        """Whether a server answers; the worker: whether it runs."""
        if name == "worker":
            program = self.reconciler.engines.supervisor.program(name)
            return program is not None and program.state == "RUNNING"
        address = f"{self.uri}/health" if name == "mlflow" else f"{self.api}/health"
        try:
            with urlopen(address, timeout=5):
                return True
        except OSError:
            return False

    def wait_for(self, *names: str) -> None:
        for name in names:
            self.until(f"{name} answers again", lambda name=name: self.up(name), UP_SECONDS)

    # Flows.

    def _prefect(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask Prefect, again where it has too much to do (503) or is just coming up. Bounded: `UP_SECONDS`."""
        deadline = time.monotonic() + UP_SECONDS
        while True:
            try:
                answer = httpx.request(method, f"{self.api}{path}", json=body, timeout=30, verify=False)
                if answer.status_code < 500:
                    return answer.raise_for_status().json()
                reason = f"{answer.status_code} {answer.text[:200]}"
            except httpx.TransportError as error:
                reason = repr(error)
            assert time.monotonic() < deadline, f"Prefect: {path}: {reason}"
            time.sleep(0.5)

    def start_flow(self, name: str, **parameters: Any) -> str:
        """Have a deployed flow run, as `prefect deployment run` does; the run's id."""
        if name not in self._deployments:
            self._deployments[name] = self._prefect("GET", f"/deployments/name/{name}/default")["id"]
        # Asked again, it is the same run.
        body = {"state": {"type": "SCHEDULED"}, "parameters": parameters, "idempotency_key": uuid4().hex}
        return str(self._prefect("POST", f"/deployments/{self._deployments[name]}/create_flow_run", body)["id"])

    def flow_ended(self, run: str) -> str:
        """A run's last state. Bounded: `RUN_SECONDS`."""

        def look() -> str | None:
            state = str(self._prefect("GET", f"/flow_runs/{run}")["state_type"])
            return state if state in ENDED else None

        return str(self.until(f"the end of flow run {run}", look, RUN_SECONDS))

    def unended(self) -> list[str]:
        """Runs that have not ended, as far as Prefect knows."""
        body = {"flow_runs": {"state": {"type": {"not_any_": list(ENDED)}}}}
        return [str(run["id"]) for run in self._prefect("POST", "/flow_runs/filter", body)]

    def flow_processes(self) -> list[psutil.Process]:
        """Processes that run flows, whosever children they are."""
        found = []
        for process in processes_in(self.root):
            with suppress(psutil.Error):
                if "PREFECT__FLOW_RUN_ID" in process.environ() and "prefect" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def settle_flows(self, crashed: bool) -> None:
        """Let all runs end. After a crash, what no process runs any more is said to be crashed, as its operator would say."""
        self.wait_for("prefect", "worker")
        deadline = time.monotonic() + RUN_SECONDS
        idle_since: float | None = None
        while runs := self.unended():
            assert time.monotonic() < deadline, f"runs {runs} do not end"
            idle_since = None if self.flow_processes() else idle_since or time.monotonic()
            # A run that the worker is just about to start has no process yet.
            if crashed and idle_since is not None and time.monotonic() - idle_since > LOST_SECONDS:
                for run in runs:
                    state = {"type": "CRASHED", "message": "its process was killed"}
                    self._prefect("POST", f"/flow_runs/{run}/set_state", {"state": state})
            time.sleep(0.5)
        self.until("the end of all flows' processes", lambda: not self.flow_processes(), 120)
