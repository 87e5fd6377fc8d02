"""`serve` as it is deployed: told by an event, on the real servers of `make up`, with the real engine; what it starts outlives it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flows.serving.places import Places
from flows.serving.state import State, read_state
from flows.serving.supervisor import Supervisor
from tests.flows.house import House
from tests.flows.versions import identity
from tests.gate.pair import make_bigram_verifier
from tests.pipeline.clone import Clone

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

EMIT = "from prefect.events import emit_event; emit_event('{name}', resource={{'prefect.resource.id': 'draftline.verifier.tiny'}})"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    verifier = make_bigram_verifier(tmp_path_factory.mktemp("serve") / "verifier")
    with House(Clone(tmp_path_factory.mktemp("house") / "repository", verifier)) as found:
        yield found


def state(house: House) -> State:
    found = read_state(Places(house.root), "tiny")
    assert found is not None
    return found


def ask(house: House) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me about the river."}], "temperature": 0, "max_tokens": 16}
    url = f"http://127.0.0.1:{house.environment['SERVE_PORT']}/v1/chat/completions"
    return str(httpx.post(url, json=body, timeout=60).raise_for_status().json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def served(house: House) -> House:
    """The house once an event has led to a served verifier. (Registered without its event, so that nothing is trained here.)"""
    house.do(sys.executable, "-m", "flows.verifiers", "add", "tiny", "--no-serve", seconds=300)
    house.registry.set_alias("verifier.tiny", "serving", 1)
    house.do(sys.executable, "-c", EMIT.format(name="draftline.drafter.promoted"))

    def event_run() -> list[dict[str, Any]]:
        return [run for run in house.flow_runs("serve") if not run["auto_scheduled"]]

    run = house.until("a serve run", event_run, 60)[0]
    assert house.ended(run["id"], 400)["state_type"] == "COMPLETED", house.logs()
    return house


def test_an_event_leads_to_a_served_verifier(served: House) -> None:
    assert ask(served)
    assert state(served).target.content is None
    status = served.do(sys.executable, "-m", "flows.status")
    assert f"alone, on 127.0.0.1:{served.environment['SERVE_PORT']} by {state(served).engine}" in status


def test_engines_outlive_the_flow_and_its_worker(served: House) -> None:
    supervisor = Supervisor(Places(served.root).supervisor_socket)
    engine = supervisor.program(state(served).engine)
    assert engine is not None
    supervisor.stop("worker")
    assert psutil.pid_exists(engine.pid)
    assert ask(served)
    supervisor.start("worker")
    served.do("prefect", "deployment", "run", "serve/default", "--watch", seconds=200)
    after = supervisor.program(state(served).engine)
    assert after is not None
    assert after.pid == engine.pid


def test_a_failure_is_an_event_and_the_old_engine_serves(served: House) -> None:
    before = (state(served), ask(served))
    version, _ = served.registry.register_verifier("tiny", identity(), "models/elsewhere", "as-is")
    served.registry.set_alias("verifier.tiny", "serving", version.version)
    done = served.run("prefect", "deployment", "run", "serve/default", "--watch", seconds=200)
    assert done.returncode != 0, done.stdout
    assert (state(served), ask(served)) == before

    failed = served.events("draftline.serving.failed")[0]
    assert "its files are not on this machine" in failed["payload"]["reason"]
    served.registry.set_alias("verifier.tiny", "serving", 1)


def test_an_unknown_verifier_is_said(served: House) -> None:
    done: subprocess.CompletedProcess[str] = served.run("prefect", "deployment", "run", "serve/default", "--param", "verifier=nobody", "--watch", seconds=200)
    assert done.returncode != 0


def test_down_ends_engines_and_proxy(served: House) -> None:
    """Last: the house is empty then."""
    supervisor = psutil.Process(int((served.root / ".run" / "supervisord.pid").read_text()))
    family = supervisor.children(recursive=True)
    assert any(Path(process.name()).name == "haproxy" for process in family)
    served.do(sys.executable, "-m", "flows.local", "down", seconds=120)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
