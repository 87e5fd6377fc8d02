"""The flows on real servers: Prefect, a worker, MLflow, and the graph of a tiny verifier with the real engine.

One story: a verifier is registered, its quantization changes, it changes back; then a run is cancelled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.flows.house import House, processes_in
from tests.gate.pair import make_chatting_verifier
from tests.marks import long_but
from tests.pipeline.clone import Clone

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

RETRAIN_SECONDS = 900
RESEEDED = {"verifier": "tiny", "overrides": {"train": {"seed": 9}}}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    verifier = make_chatting_verifier(tmp_path_factory.mktemp("flows") / "verifier")
    clone = Clone(tmp_path_factory.mktemp("house") / "repository", verifier)
    # So small a verifier is faster alone, and would be served so.
    clone.set("deploy", speculation="fixed")
    with House(clone, without="serve") as found:
        yield found


def register(house: House, *words: str) -> None:
    """Register the verifier."""
    house.do(sys.executable, "-m", "flows.verifiers", "add", "tiny", *words, seconds=300)


def champion(house: House) -> int | None:
    found = house.registry.drafter("tiny", "champion")
    return found.version if found is not None else None


@pytest.fixture(scope="module")
def first(house: House) -> House:
    """The house once a first verifier has got its drafter, by its registration alone."""
    register(house)
    (run,) = house.flow_runs("retrain")
    (event,) = house.events("draftline.verifier.registered")
    waited = (datetime.fromisoformat(run["created"]) - datetime.fromisoformat(event["occurred"])).total_seconds()
    print(f"\nthe retrain run exists {waited:.1f} s after the event")
    assert waited < 5.0
    assert house.ended(run["id"], RETRAIN_SECONDS)["state_type"] == "COMPLETED", house.logs()
    house.until("a champion", lambda: champion(house), 120)
    return house


def test_a_registered_verifier_leads_to_a_champion(first: House) -> None:
    """Without anyone's doing: one run, its evidence as artifacts, its parameters and results on the workspace's branch."""
    assert len(first.flow_runs("retrain")) == 1
    assert champion(first) == 1
    assert {"gate", "evaluation", "plots", "mlflow"} <= first.artifacts()
    shown = subprocess.run(["git", "show", "--stat", "--format=%s", "draftline/tiny"], cwd=first.root, capture_output=True, text=True, check=True).stdout
    assert "drafter.tiny version 1" in shown
    assert "dvc.lock" in shown
    assert "the pair of version 1" in first.do(sys.executable, "-m", "flows.status")


LOOK = """
import time
from flows.context import registry
from flows.watch_verifier import look
known = registry()
look(known, "tiny", 2)
began = time.monotonic()
action = look(known, "tiny", 2)
print(action.kind, time.monotonic() - began)
"""


def test_an_unchanged_verifier_costs_a_moment(first: House) -> None:
    """What the schedule does every time."""
    kind, seconds = first.do(sys.executable, "-c", LOOK).split()
    assert kind == "nothing"
    assert float(seconds) < 1.0


def test_what_is_told_twice_happens_once(first: House) -> None:
    for _ in range(2):
        first.do("prefect", "deployment", "run", "watch-verifier/default", "--watch")
    assert len(first.flow_runs("retrain")) == 1


@pytest.fixture(scope="module")
def second(first: House) -> House:
    """The house once the same weights were quantised, and have got a drafter of their own."""
    register(first, "--quantization", "w8a8")
    run = first.until("a second retrain run", lambda: first.flow_runs("retrain")[1:], 60)[0]
    assert first.ended(run["id"], RETRAIN_SECONDS)["state_type"] == "COMPLETED", first.logs()
    first.until("the new champion", lambda: champion(first) == 2, 120)
    return first


def test_another_quantization_leads_to_one_retraining(second: House) -> None:
    assert len(second.flow_runs("retrain")) == 2
    previous = second.registry.drafter("tiny", "previous")
    assert previous is not None
    assert previous.version == 1
    started = second.flow_runs("retrain")[1]["parameters"]["reason"]
    assert "quantization" in started, "it says what changed"


def test_back_to_a_known_verifier_needs_no_training(second: House) -> None:
    register(second, "--quantization", "as-is")
    second.until("the old champion", lambda: champion(second) == 1, 120)
    assert len(second.flow_runs("retrain")) == 2


def test_with_nothing_changed_nothing_is_done_again(second: House) -> None:
    """Nor is a second version registered; a run whose parameters make a stage fail ends non-zero with the stage's own line, and leaves no trace in the next."""
    failing = {"verifier": "tiny", "overrides": {"drafter": {"mask_token_id": 100_000}}}
    done = second.run("prefect", "deployment", "run", "retrain/default", "--params", json.dumps(failing), "--watch", seconds=300)
    assert done.returncode != 0, done.stdout
    logs = second.do("prefect", "flow-run", "logs", second.flow_runs("retrain")[-1]["id"])
    assert "drafter.mask_token_id = 100000" in " ".join(logs.split())
    second.do("prefect", "deployment", "run", "retrain/default", "--param", "verifier=tiny", "--watch", seconds=300)
    logs = " ".join(second.do("prefect", "flow-run", "logs", second.flow_runs("retrain")[-1]["id"]).split())
    for stage in ("prepare", "extract", "train", "convert", "lock", "gate", "evaluate", "deploy"):
        assert f"nothing that stage {stage} depends on has changed" in logs
    assert len(second.registry.drafters("tiny")) == 2
    assert champion(second) == 1


def test_a_drafter_of_another_verifier_is_no_way_back(second: House) -> None:
    done = second.run("prefect", "deployment", "run", "promote/default", "--param", "verifier=tiny", "--param", "rollback=true", "--watch")
    assert done.returncode != 0, "previous belongs to the other quantization"
    assert champion(second) == 1


def test_a_person_can_be_asked_first(second: House) -> None:
    second.clone.set("promotion", approval="manual")
    try:
        second.registry.delete_alias("drafter.tiny", "champion")
        second.do("prefect", "deployment", "run", "promote/default", "--params", '{"verifier": "tiny", "version": 1}')
        run = second.flow_runs("promote")[-1]["id"]
        second.until("the question", lambda: second.flow_run(run)["state_type"] == "PAUSED", 60)
        assert champion(second) is None
        second.resume(run)
        assert second.ended(run, 120)["state_type"] == "COMPLETED"
        assert champion(second) == 1
    finally:
        second.clone.set("promotion", approval="automatic")


BOUNDARIES = ("prepare", "extract", "train", "convert", "lock", "gate", "evaluate", "register")


@pytest.mark.parametrize("boundary", long_but(lambda stage: stage in ("prepare", "train", "register"), BOUNDARIES))
def test_killed_at_a_boundary_no_stage_lives_on(second: House, boundary: str) -> None:
    """`kill -9` of the flow once a stage has ended; each run takes up what the one before has left, and `test_after_all_kills` looks at the result."""
    second.do("prefect", "deployment", "run", "retrain/default", "--params", json.dumps(RESEEDED))
    run = second.flow_runs("retrain")[-1]["id"]
    second.until(f"the end of {boundary}", lambda: boundary in second.completed_tasks(run), 300)
    second.kill_flow(run)
    assert second.ended(run, 60)["state_type"] == "CRASHED"
    second.until("the end of all stages", lambda: not processes_in(second.root / "workspaces" / "tiny"), 10)


def test_after_all_kills_there_is_one_version_more(second: House) -> None:
    second.do("prefect", "deployment", "run", "retrain/default", "--params", json.dumps(RESEEDED), "--watch", seconds=600)
    assert [drafter.version for drafter in second.registry.drafters("tiny")] == [1, 2, 3]


def test_cancelled_means_that_no_stage_lives(second: House) -> None:
    parameters = {"verifier": "tiny", "overrides": {"train": {"steps": 20_000, "seed": 7}}}
    second.do("prefect", "deployment", "run", "retrain/default", "--params", json.dumps(parameters))
    run = second.flow_runs("retrain")[-1]
    folder = second.root / "workspaces" / "tiny"
    second.until("a training", lambda: any("stages.train" in " ".join(process.cmdline()) for process in processes_in(folder)), 300, pause=0.5)
    second.do("prefect", "flow-run", "cancel", run["id"])
    assert second.ended(run["id"], 60)["state_type"] == "CANCELLED"
    assert [process.cmdline() for process in processes_in(folder)] == []


@pytest.mark.long
def test_deleted_drafters_are_registered_again(second: House) -> None:
    """The schedule notices it; nothing is trained again, for all but the registration is still known."""
    serving = second.registry.serving_verifier("tiny")
    assert serving is not None
    known = second.registry.drafters("tiny")
    for drafter in known:
        if drafter.verifier == serving.digest:
            second.registry.client.delete_model_version("drafter.tiny", str(drafter.version))
    before = len(second.flow_runs("retrain"))
    second.do("prefect", "deployment", "run", "watch-verifier/default", "--watch")
    run = second.until("a retrain run", lambda: second.flow_runs("retrain")[before:], 60)[0]
    assert second.ended(run["id"], RETRAIN_SECONDS)["state_type"] == "COMPLETED", second.logs()
    second.until("the champion", lambda: champion(second) == max(drafter.version for drafter in known) + 1, 120)
    logs = " ".join(second.do("prefect", "flow-run", "logs", run["id"]).split())
    assert "nothing that stage train depends on has changed" in logs


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["retrain/default", "--param", "verifer=tiny"], "verifer"),
        (["retrain/default", "--params", '{"overrides": {"train": {"stepz": 1}}}'], "stepz"),
        (["promote/default", "--params", '{"verifier": "tiny", "alias": "Champion"}', "--watch"], ""),
        (["promote/default", "--params", '{"verifier": "nobody"}', "--watch"], ""),
    ],
    ids=["misspelt parameter", "misspelt knob", "alias in capitals", "unknown verifier"],
)
def test_bad_parameters_change_nothing(first: House, words: list[str], says: str) -> None:
    before = (len(first.flow_runs("retrain")), champion(first))
    done = first.run("prefect", "deployment", "run", *words)
    assert done.returncode != 0, done.stdout
    assert says in done.stdout + done.stderr
    assert (len(first.flow_runs("retrain")), champion(first)) == before


def test_a_port_in_use_is_said(first: House, tmp_path: Path) -> None:
    environment = first.environment | {"DRAFTLINE_ROOT": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "flows.local", "up"], cwd=first.root, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "MLFLOW_PORT" in done.stderr
