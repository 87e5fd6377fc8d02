"""What comes in from outside, on the servers of `make up`: bad input, servers that are away, MLflow's webhook. Nothing is trained.

One house for all. Those that look at what has not changed come first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.registry import SERVING
from flows.serving.desired import desired
from flows.serving.supervisor import Supervisor
from flows.webhook import PATH, SECRET
from stages.errors import DraftlineError
from stages.pairing.identity import compute_identity
from stages.servers import free_port, start, stop
from stages.tracking import TrackingError, connect
from tests.flows.drafters import add_drafter
from tests.flows.house import House
from tests.flows.versions import identity
from tests.pipeline.clone import Clone

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

KEY = "a secret of sixteen characters or more"
# What an MLflow server needs to deliver to this machine.
WEBHOOKS = {
    "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": "KSnIXSfvAONqClU9jsnZexA-zIexYAJvo1USKx0BUxU=",
    "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
    "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
    # It caches its list of webhooks, an empty one too.
    "MLFLOW_WEBHOOK_CACHE_TTL": "1",
}
AT_ONCE = 3
FLOWS: dict[str, dict[str, Any]] = {
    "retrain": {"verifier": "tiny"},
    "watch-verifier": {"verifier": "tiny"},
    "promote": {"verifier": "tiny"},
    "serve": {"verifier": "tiny"},
}


class Doors(House):
    """A house that knows two verifiers, `other` served with none, `tiny` with a candidate that is whole and a version 2 whose files are gone."""

    def __enter__(self) -> Doors:
        super().__enter__()
        try:
            self.furnish()
        except BaseException:
            self.__exit__()
            raise
        return self

    def furnish(self) -> None:
        for name in ("watch-verifier", "serve"):
            # Told by nobody but the tests.
            self.call("PATCH", f"/deployments/{self.deployment(name)}", {"paused": True})
        verifier = self.root / "models" / "tiny"
        version, _ = self.registry.register_verifier("tiny", compute_identity(verifier), str(verifier), "as-is")
        self.registry.set_alias("verifier.tiny", SERVING, version.version)
        self.registry.register_verifier("other", identity(), "models/other", "as-is")
        self.registry.set_alias("verifier.other", SERVING, 1)
        for number, made_for, name in ((1, verifier, "tiny"), (2, verifier, "tiny"), (1, verifier, "other")):
            add_drafter(self.mlflow, made_for, self.root / "outputs" / f"{name}-{number}", number, name)
        self.registry.set_alias("drafter.tiny", "candidate", 1)
        location = self.registry.client.get_model_version_download_uri("drafter.tiny", "2")
        shutil.rmtree(self.root / ".run" / "artifacts" / location.removeprefix("mlflow-artifacts:/"))

    @property
    def supervisor(self) -> Supervisor:
        return Supervisor(self.root / ".run" / "supervisor.sock")

    def up(self) -> str:
        return self.do(sys.executable, "-m", "flows.local", "up", seconds=600)

    def deployment(self, flow: str) -> str:
        return str(self.call("GET", f"/deployments/name/{flow}/default")["id"])

    def ask_for(self, flow: str, parameters: dict[str, Any]) -> str:
        """Have a run made, as `prefect deployment run` does; its id."""
        return str(self.call("POST", f"/deployments/{self.deployment(flow)}/create_flow_run", {"parameters": parameters})["id"])

    def run_logs(self, run: str) -> str:
        found = self.call("POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}})
        return "\n".join(entry["message"] for entry in found)

    def said(self, run: str, words: str) -> str:
        """The first line of a run's log with `words`; logs reach the server after the run's end."""

        def look() -> str | None:
            return next((line for line in self.run_logs(run).splitlines() if words in line), None)

        return str(self.until(f"the log of run {run} says {words!r}", look, 60, pause=0.5))

    def message(self, run: str) -> str:
        """How a run has failed, by its state."""
        state = self.ended(run, 240)
        assert state["state_type"] == "FAILED", state
        return str(state["state"]["message"])

    def aliases(self) -> dict[str, dict[str, Any]]:
        return {model.name: dict(model.aliases) for model in self.registry.client.search_registered_models()}

    @contextmanager
    def without_mlflow(self) -> Iterator[None]:
        self.supervisor.stop("mlflow")
        try:
            yield
        finally:
            self.supervisor.start("mlflow")
            self.until("MLflow", self.mlflow_answers, 240, pause=0.5)

    def mlflow_answers(self) -> bool:
        try:
            connect(self.mlflow)
        except TrackingError:
            return False
        return True


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Iterator[Doors]:
    clone = Clone(tmp_path_factory.mktemp("doors") / "repository", tiny_verifier)
    house = Doors(clone)
    house.environment |= WEBHOOKS
    with house as found:
        yield found


def test_a_registry_that_is_away(house: Doors) -> None:
    """Every command and every flow says so in one line that names it and what to do, in seconds; nothing is made meanwhile."""
    commands = [["flows.verifiers", "list"], ["flows.verifiers", "add", "new"], ["flows.status"]]
    before = house.aliases()
    with house.without_mlflow():
        for words in commands:
            began = time.monotonic()
            done = house.run(sys.executable, "-m", *words, seconds=120)
            print(f"{' '.join(words)}: {time.monotonic() - began:.1f} s: {done.stderr.strip()}")
            assert done.returncode == 1
            assert done.stderr.count("\n") == 1, done.stderr
            assert f"{house.mlflow!r}: cannot connect" in done.stderr
            assert "make up" in done.stderr
        for run in [house.ask_for(flow, parameters) for flow, parameters in FLOWS.items()]:
            message = house.message(run)
            print(message)
            assert f"{house.mlflow!r}: cannot connect" in message
            assert "\n" not in message
        assert not (house.root / "workspaces").exists()
    assert house.aliases() == before


def test_a_registry_that_goes_away_meanwhile_is_not_waited_for_for_minutes(house: Doors) -> None:
    known = house.registry
    with house.without_mlflow():
        began = time.monotonic()
        with pytest.raises(DraftlineError, match=r"mlflow\.tracking_uri = "):
            known.serving_verifier("tiny")
        print(f"\na server that went away: {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < 15


def test_what_is_refused_says_why_and_changes_nothing(house: Doors) -> None:
    """One table. A run is mostly its own start: a few at once are quicker, many are too much for Prefect's database."""
    table: list[tuple[str, dict[str, Any], str]] = [
        ("promote", {"verifier": "tiny", "alias": "Champion"}, "alias 'Champion': allowed are candidate, champion, previous (lower case)"),
        ("promote", {"verifier": "tiny", "alias": "best"}, "alias 'best': allowed are candidate, champion, previous (lower case)"),
        ("promote", {"verifier": "tiny", "alias": "previous"}, "drafter.tiny: no version has the alias 'previous'"),
        ("promote", {"verifier": "tiny", "version": 2}, "drafter.tiny version 2: its files in the registry are damaged or missing: there are no files at "),
        ("promote", {"verifier": "tiny", "version": 9}, "drafter.tiny: there is no version 9, or its registration is not finished"),
        ("promote", {"verifier": "other", "version": 1}, "drafter.other version 1 belongs to verifier "),
        ("promote", {"verifier": "nobody"}, "verifier.nobody: no version has the alias 'serving': register one (python -m flows.verifiers)"),
        ("serve", {"verifier": "nobody"}, "verifier.nobody is not registered; known: other, tiny"),
        ("retrain", {"verifier": "tiny", "overrides": {"train": {"steps": None}}}, "train.steps = None"),
    ]
    before = house.aliases()
    for rows in (table[first : first + AT_ONCE] for first in range(0, len(table), AT_ONCE)):
        runs = [house.ask_for(flow, parameters) for flow, parameters, _ in rows]
        for run, (flow, parameters, says) in zip(runs, rows, strict=True):
            message = house.message(run)
            print(f"{flow} {parameters}: {message}")
            assert says in message
            assert "\n" not in message
            house.said(run, says)
    assert house.aliases() == before


def test_a_champion_without_files_is_not_served(house: Doors) -> None:
    """The registry answers and has no files: the verifier alone. It is away: nothing is concluded."""
    house.registry.set_alias("drafter.tiny", "champion", 2)
    try:
        wanted = desired(house.registry, "tiny")
        assert wanted is not None
        assert wanted.drafter is None
        assert "there are no files at mlflow-artifacts:" in wanted.reason
    finally:
        house.registry.delete_alias("drafter.tiny", "champion")


@pytest.fixture
def receiver(house: Doors, tmp_path: Path) -> Iterator[str]:
    """URL of the receiver."""
    house.environment[SECRET] = KEY
    port = free_port()
    process = start([sys.executable, "-m", "flows.webhook", "serve", "--port", str(port)], house.environment, tmp_path / "log")
    try:
        yield f"http://127.0.0.1:{port}{PATH}"
    finally:
        stop(process)
        print(f"\n{(tmp_path / 'log').read_text()}")
        del house.environment[SECRET]


def told(house: Doors) -> Callable[[], list[str]]:
    """Runs of watch-verifier that were not there before."""
    before = {run["id"] for run in house.flow_runs("watch-verifier")}
    return lambda: [run["id"] for run in house.flow_runs("watch-verifier") if run["id"] not in before]


def test_mlflow_s_webhook_starts_a_look(house: Doors, receiver: str) -> None:
    # A look finds what to do for `tiny`, and nothing for the other.
    house.registry.delete_alias("verifier.other", SERVING)
    words = (sys.executable, "-m", "flows.webhook", "register", "--url", receiver)
    said = house.until("a receiver", lambda: (done := house.run(*words)).returncode == 0 and done.stdout, 60, pause=1.0)
    assert "a test delivery was accepted" in said
    house.do(*words)
    assert len(house.registry.client.list_webhooks()) == 1, "registered again it is changed, not doubled"
    looks = told(house)
    began = time.monotonic()
    house.registry.set_alias("verifier.tiny", SERVING, 1)
    run = house.until("a look", looks, 60)[0]
    print(f"\na run exists {time.monotonic() - began:.1f} s after the alias was moved")
    assert house.ended(run, 240)["state_type"] == "COMPLETED"


@pytest.mark.parametrize(
    ("url", "says"),
    [("ftp://127.0.0.1/mlflow", "Invalid webhook URL scheme"), ("http://127.0.0.1:1/mlflow", "but a test delivery to http://127.0.0.1:1/mlflow failed")],
    ids=["scheme", "nobody there"],
)
def test_a_webhook_that_cannot_be_delivered_is_said(house: Doors, url: str, says: str) -> None:
    words = [sys.executable, "-m", "flows.webhook", "register", "--url", url]
    environment = house.environment | {SECRET: KEY}
    done = subprocess.run(words, cwd=house.root, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("draftline webhook: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def unready(house: Doors) -> str:
    return house.do(sys.executable, "-m", "flows.status").partition("flows do not run: ")[2].strip()


def test_a_work_pool_that_is_gone_is_said_and_mended(house: Doors) -> None:
    """Prefect takes runs for it without a word; a worker makes it anew, but no deployment belongs to it any more. `make up` also starts a stopped worker."""
    house.until("a worker", lambda: unready(house) == "", 120)
    house.supervisor.stop("worker")
    house.do("prefect", "--no-prompt", "work-pool", "delete", "draftline")
    assert house.run("prefect", "deployment", "run", "watch-verifier/default").returncode == 0
    said = unready(house)
    print(f"\n{said}")
    assert said == "the work pool of watch-verifier/default was deleted: its runs stay scheduled; deploy the flows anew (make up, or prefect deploy --all)"
    done = house.run("prefect", "--no-prompt", "deploy", "--all")
    assert done.returncode != 0
    assert "'draftline' which does not exist" in " ".join(done.stdout.split())
    house.up()
    house.until("a worker", lambda: unready(house) == "", 120)


def test_a_prefect_that_is_away_is_said(house: Doors) -> None:
    words = [sys.executable, "-m", "flows.status"]
    environment = house.environment | {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"}
    done = subprocess.run(words, cwd=house.root, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "tiny\n  verifier   version 1" in done.stdout
    assert f"flows do not run: Prefect does not answer at {environment['PREFECT_API_URL']} (PREFECT_API_URL)" in done.stdout


def test_up_says_where_everything_is(house: Doors) -> None:
    said = house.up()
    print(f"\n{said}")
    for text in (house.mlflow, house.api, house.environment["SERVE_PORT"], "python -m flows.verifiers add tiny", "make down"):
        assert text in said


GRAPH = """stages:
  register:
    cmd: python produce.py
    deps: [produce.py]
    outs: [outputs/train/drafter]
"""
PRODUCE = """import json, pathlib
for path, text in {files!r}.items():
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).write_text(text)
"""


def test_data_goes_to_the_default_remote_and_a_remote_that_is_away_loses_no_version(house: Doors, tiny_verifier: Path) -> None:
    """A run of a graph of one cheap stage, whose version is registered already."""
    digest = compute_identity(tiny_verifier).digest
    version = {"name": "drafter.tiny", "version": 1, "verifier": digest}
    files = {
        "outputs/train/drafter": "data",
        "outputs/register/version.json": json.dumps(version),
        "outputs/gate/report.json": "{}",
        "outputs/evaluate/report.md": "nothing",
    }
    (house.root / "dvc.yaml").write_text(GRAPH)
    (house.root / "produce.py").write_text(PRODUCE.format(files=files))
    store = house.root.parent / "store"
    for url, says in (("../store", "pushed to the default DVC remote"), (f"http://127.0.0.1:{free_port()}/store", "dvc push to remote 'store': ")):
        house.do("dvc", "remote", "add", "-q", "-f", "-d", "store", url)
        # Else there is nothing to push.
        (house.root / "produce.py").write_text(PRODUCE.format(files=files | {"outputs/train/drafter": url}))
        house.do("git", "add", "-A")
        house.do("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", url)
        run = house.ask_for("retrain", {"verifier": "tiny"})
        state = house.ended(run, 240)
        assert state["state_type"] == "COMPLETED", house.run_logs(run)
        line = house.said(run, says)
        print(f"\n{line}")
    assert "version 1 is registered" in line
    assert [path.read_text() for path in store.rglob("*") if path.is_file()] == ["../store"]
    house.until("a champion", lambda: house.aliases()["drafter.tiny"].get("champion") == "1", 240)
