"""A clone with its own Prefect server, worker and MLflow server, as `make up` starts them; asked over their own interfaces."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from flows.registry import Registry
from stages.servers import free_port
from tests.pipeline.clone import Clone

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def processes_in(folder: Path) -> list[psutil.Process]:
    """Living processes that work in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(folder):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


class House:
    """Started and ended with the block."""

    def __init__(self, clone: Clone, without: str | None = None) -> None:
        """`without`: a flow whose deployment is removed, so that nothing starts it."""
        self.without = without
        self.clone = clone
        self.root = clone.root
        ports = {"MLFLOW_PORT": str(free_port()), "PREFECT_PORT": str(free_port()), "SERVE_PORT": str(free_port())}
        self.mlflow = f"http://127.0.0.1:{ports['MLFLOW_PORT']}"
        self.api = f"http://127.0.0.1:{ports['PREFECT_PORT']}/api"
        addresses = {"MLFLOW_TRACKING_URI": self.mlflow, "PREFECT_API_URL": self.api, "PREFECT_HOME": f"{self.root}/.run/prefect"}
        self.environment = clone.environment | ports | addresses

    def __enter__(self) -> House:
        try:
            self.do(sys.executable, "-m", "flows.local", "up", seconds=600)
            if self.without is not None:
                self.do("prefect", "--no-prompt", "deployment", "delete", f"{self.without}/default")
        except BaseException:
            # No `__exit__` follows: what did start would stay.
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.do(sys.executable, "-m", "flows.local", "down", seconds=120)

    def run(self, *words: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=seconds, check=False)

    def do(self, *words: str, seconds: float = 120.0) -> str:
        """Run a command that must succeed; what it printed."""
        done = self.run(*words, seconds=seconds)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-3000:]}{done.stderr[-3000:]}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in (self.root / ".run" / "logs").glob("*worker*"))

    @property
    def registry(self) -> Registry:
        return Registry(self.mlflow, "draftline")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask Prefect's API. A busy machine's answers 503 now and then: its database was locked."""
        deadline = time.monotonic() + 60
        while True:
            answer = httpx.request(method, f"{self.api}{path}", json=body, timeout=60)
            if answer.status_code != 503 or time.monotonic() > deadline:
                answer.raise_for_status()
                return answer.json() if answer.content else None
            time.sleep(1)

    def flow_runs(self, deployment: str) -> list[dict[str, Any]]:
        """All runs of `<flow>/default`, oldest first."""
        body = {"flows": {"name": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return list(self.call("POST", "/flow_runs/filter", body))

    def events(self, name: str) -> list[dict[str, Any]]:
        """All events of that name, the newest first; they reach the server a moment after they were sent."""

        def look() -> list[dict[str, Any]]:
            return list(self.call("POST", "/events/filter", {"filter": {"event": {"name": [name]}}})["events"])

        found: list[dict[str, Any]] = self.until(f"event {name}", look, 60)
        return found

    def artifacts(self) -> set[str]:
        found = self.call("POST", "/artifacts/filter", {})
        return {str(item["key"]) for item in found}

    def until(self, what: str, look: Callable[[], Any], seconds: float, pause: float = 0.1) -> Any:
        """The first true answer of `look`. (A run may take minutes: nothing here waits longer than `seconds`.)"""
        deadline = time.monotonic() + seconds
        while not (found := look()):
            runs = [(run["name"], run["state_name"]) for run in self.flow_runs("retrain")]
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{runs}\n{self.logs()}"
            time.sleep(pause)
        return found

    def flow_run(self, run: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/flow_runs/{run}"))

    def resume(self, run: str) -> None:
        """What the button of Prefect's user interface does."""
        answer = self.call("POST", f"/flow_runs/{run}/resume", {})
        assert answer["status"] == "ACCEPT", answer

    def completed_tasks(self, run: str) -> set[str]:
        """Names of a flow run's tasks that have completed."""
        body = {"flow_runs": {"id": {"any_": [run]}}, "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
        return {str(task["name"]) for task in self.call("POST", "/task_runs/filter", body)}

    def kill_flow(self, run: str) -> None:
        """`kill -9` of the process that runs a flow, and of it alone."""
        for process in psutil.process_iter():
            try:
                if run in process.environ().get("PREFECT__FLOW_RUN_ID", "") and "prefect.engine" in " ".join(process.cmdline()):
                    process.kill()
                    return
            except psutil.Error:
                continue
        raise AssertionError(f"no process runs flow {run}")

    def ended(self, run: str, seconds: float) -> dict[str, Any]:
        """A flow run once it has ended."""

        def look() -> dict[str, Any] | None:
            state = self.flow_run(run)
            return state if state["state_type"] in ENDED else None

        return self.until(f"the end of flow run {run}", look, seconds, pause=0.5)
