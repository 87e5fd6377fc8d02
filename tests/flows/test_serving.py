"""What is served is what the registry says, or what was served before; and nobody's request is lost on the way. Real supervisord, real HAProxy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.errors import FlowError
from flows.serving import reconcile
from flows.serving.engine import require_servable
from flows.serving.engines import REQUESTS, Engines
from flows.serving.proxy import Proxy
from flows.serving.state import all_states, read_state
from flows.status import lines
from stages.artifacts import digest_json, read_json, read_manifest
from stages.decoding.costs import Machine, costs_section, this_machine
from stages.errors import DraftlineError, PairError
from stages.pairing.identity import compute_identity
from stages.servers import get
from stages.serving.plan import build_plan
from stages.serving.server import acceptance
from tests.decoding.tables import table
from tests.flows.site import NAME, Costs, Site, die, reconcile_in_a_process
from tests.gate.pair import make_bigram_verifier, write_drafter

pytestmark = pytest.mark.timeout(120)

CLIENTS = 4
TOTAL = 500


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier."""
    return make_bigram_verifier(tmp_path_factory.mktemp("first") / "verifier")


@pytest.fixture(scope="module")
def second(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one: the same weights with another chat template."""
    directory = tmp_path_factory.mktemp("second") / "verifier"
    shutil.copytree(first, directory)
    template = directory / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert compute_identity(first).digest != compute_identity(directory).digest
    return directory


@pytest.fixture
def alone(site: Site, first: Path) -> Site:
    """A site that serves the first verifier alone."""
    site.serve_verifier(first)
    site.reconcile()
    return site


@pytest.fixture
def pair(alone: Site, first: Path) -> Site:
    """A site that serves the first verifier with its champion, version 1."""
    alone.new_champion(first)
    alone.reconcile()
    return alone


def fingerprint(verifier: Path, site: Site, drafter: int | None = None) -> str:
    """Who answers, if it is this verifier with this version of its drafter."""
    found = [item for item in site.registry.drafters(NAME) if item.version == drafter]
    return f"{compute_identity(verifier).digest[:16]}/{found[0].content[:16] if found else 'alone'}"


def only_engine_is_the_live_one(site: Site) -> None:
    state = read_state(site.places, NAME)
    assert state is not None
    assert site.reconciler.engines.known() == {state.engine}
    assert len(site.engine_processes()) == 1


def test_without_the_alias_nothing_is_touched(site: Site) -> None:
    assert "left as it is" in site.reconcile()
    assert site.reconciler.engines.known() == set()


def test_from_the_verifier_alone_to_the_pair_and_back(site: Site, first: Path) -> None:
    site.serve_verifier(first)
    assert "alone" in site.reconcile()
    assert site.who() == fingerprint(first, site)
    before = site.ask()
    process = site.engine_processes()[0]

    version = site.new_champion(first)
    site.reconcile()
    assert site.who() == fingerprint(first, site, version)
    assert site.ask()["choices"] == before["choices"]
    assert not process.is_running()
    only_engine_is_the_live_one(site)

    pid = site.engine_processes()[0].pid
    assert "as before" in site.reconcile()
    assert [process.pid for process in site.engine_processes()] == [pid]

    site.reconcile(renew=True)
    assert [process.pid for process in site.engine_processes()] != [pid]
    assert site.who() == fingerprint(first, site, version)

    site.registry.delete_alias(f"drafter.{NAME}", "champion")
    site.reconcile()
    assert site.who() == fingerprint(first, site)
    only_engine_is_the_live_one(site)


def costs(machine: Machine, survival: list[float]) -> Costs:
    def of(verifier: str, checkpoint: str) -> dict[str, Any]:
        about = {"machine": machine, "verifier": verifier, "checkpoint": checkpoint, "dtype": "float32"}
        return costs_section(table().model_copy(update=about), {4: survival})

    return of


def ranges(site: Site) -> Any:
    """Draft tokens by batch size, of the engine that serves."""
    argv = engine_plan(site)["argv"]
    return json.loads(argv[argv.index("--speculative-config") + 1])["ranges"]


def engine_plan(site: Site) -> dict[str, Any]:
    state = read_state(site.places, NAME)
    assert state is not None
    return dict(read_json(site.reconciler.engines.plan(state.engine)))


def test_a_champion_drafts_as_much_as_its_evaluation_found_to_pay(alone: Site, first: Path) -> None:
    """Costs of another machine say nothing here; where speculation pays at no batch size the verifier is served alone."""
    here = this_machine("vllm")
    alone.new_champion(first, costs=costs(here, [0.7, 0.45, 0.3, 0.2]))
    alone.reconcile()
    assert ranges(alone)[0][2] == 4
    assert ranges(alone)[-1][1:] == [8, 0]

    version = alone.new_champion(first, costs=costs(here.model_copy(update={"cores": 999}), [0.01, 0.0, 0.0, 0.0]))
    alone.reconcile()
    assert alone.live() == (1, version)
    assert ranges(alone) is None
    assert any("measured on another machine: cores 999" in line for line in alone.said)

    alone.new_champion(first, costs=costs(here, [0.01, 0.0, 0.0, 0.0]))
    assert "it pays at no batch size" in alone.reconcile() + " ".join(alone.said)
    assert alone.who() == fingerprint(first, alone)
    assert any(line.startswith("  to serve   the verifier alone: speculation is off") for line in lines(alone.registry, NAME, asked=False))


def test_a_champion_that_is_not_what_was_registered_is_not_served(pair: Site, first: Path) -> None:
    location = pair.registry.client.get_model_version_download_uri(f"drafter.{NAME}", "1")
    with (Path(location.removeprefix("file://")) / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x77")
    assert "alone" in pair.reconcile()
    assert pair.who() == fingerprint(first, pair)
    only_engine_is_the_live_one(pair)

    version = pair.new_champion(first)
    pair.reconcile()
    assert pair.live() == (1, version)
    pair.registry.client.delete_model_version(f"drafter.{NAME}", str(version))
    assert "alone" in pair.reconcile()
    assert pair.who() == fingerprint(first, pair)


def test_a_pair_that_is_not_fit_to_serve_leaves_the_old_one_serving(pair: Site, first: Path) -> None:
    served = pair.who()
    process = pair.engine_processes()[0]
    for behaviour, says in (({"sick": True}, "was not ready after"), ({"differs": "yes"}, "the pair says")):
        pair.new_champion(first, **behaviour)
        with pytest.raises(FlowError, match=says) as refused:
            pair.reconcile()
        assert "\n" not in str(refused.value)
        assert pair.who() == served
        assert process.is_running()
        only_engine_is_the_live_one(pair)
    began = len(pair.said)
    with pytest.raises(FlowError, match="not tried again"):
        pair.reconcile()
    assert pair.said[began:] == [], "what differs once would differ again"
    version = pair.new_champion(first)
    pair.reconcile()
    assert pair.live() == (1, version)


class Watcher:
    """A user who asks all the time, for as long as the block."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.seen: list[str] = []
        self.errors: list[str] = []

    def _watch(self) -> None:
        while not self._end.is_set():
            try:
                who = self._site.who()
            except httpx.HTTPError as error:
                self.errors.append(repr(error))
                continue
            if not self.seen or self.seen[-1] != who:
                self.seen.append(who)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def test_the_old_pair_serves_until_the_new_verifier_can_and_then_alone(pair: Site, first: Path, second: Path) -> None:
    before = pair.who()
    pair.serve_verifier(second)
    with Watcher(pair) as watcher:
        pair.reconcile()
    assert watcher.seen == [before, fingerprint(second, pair)]
    assert watcher.errors == []
    version = pair.new_champion(second)
    with Watcher(pair) as watcher:
        pair.reconcile()
    assert watcher.seen == [fingerprint(second, pair), fingerprint(second, pair, version)]
    assert watcher.errors == []

    # Back, where there is a champion at once: alone first, so that its answers can be compared.
    pair.serve_verifier(first)
    pair.make_champion(1)
    with Watcher(pair) as watcher:
        pair.reconcile()
    assert watcher.seen == [fingerprint(second, pair, version), fingerprint(first, pair), fingerprint(first, pair, 1)]
    assert watcher.errors == []


def test_a_crashed_engine_comes_back_and_an_altered_pair_does_not(pair: Site, first: Path) -> None:
    crashed = pair.engine_processes()[0]
    crashed.send_signal(signal.SIGKILL)
    pair.until("the engine's return", lambda: (found := pair.engine_processes()) and found[0].pid != crashed.pid)
    pair.reconcile()
    assert pair.who() == fingerprint(first, pair, 1)

    weights = next((pair.places.served / NAME).glob("*")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x77")
    for process in pair.engine_processes():
        process.send_signal(signal.SIGKILL)
    state = read_state(pair.places, NAME)
    assert state is not None
    pair.until("its refusal", lambda: "draftline engine:" in (pair.places.logs / f"{state.engine}.log").read_text())
    pair.reconcile()
    assert pair.who() == fingerprint(first, pair, 1), "fetched again from the registry"
    only_engine_is_the_live_one(pair)


def test_after_a_reboot_the_same_is_served_without_a_run_of_the_flow(pair: Site, first: Path) -> None:
    pair.kill()
    pair.start()
    pair.until("its answers", lambda: httpx.get(f"{pair.url}/health", timeout=20).is_success if _listens(pair.port) else False)
    assert pair.who() == fingerprint(first, pair, 1)
    assert "as before" in pair.reconcile()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_mismatched_plan_is_refused_whatever_made_it(pair: Site, first: Path, second: Path, tmp_path: Path) -> None:
    """The last look, in the engine's own process: after it the files are loaded."""
    state = read_state(pair.places, NAME)
    assert state is not None
    plan = read_json(pair.reconciler.engines.plan(state.engine))
    require_servable(plan)
    theirs = tmp_path / "theirs"
    write_drafter(theirs, second, compute_identity(second))
    argv = [json.dumps({"model": str(theirs)}) if word.startswith("{") else word for word in plan["argv"]]
    for wrong, says in (
        ({"argv": argv}, "drafts with"),
        ({"argv": plan["argv"][:-2]}, "drafts with None"),
        ({"drafter": None}, "planned is no drafter"),
        ({"drafter": {**plan["drafter"], "content": "0" * 64}}, "planned is 0000"),
        ({"verifier": {**plan["verifier"], "digest": "0" * 64}}, "planned is 0000"),
        ({"verifier": {**plan["verifier"], "directory": str(first)}}, "does not serve"),
    ):
        with pytest.raises(DraftlineError, match=says):
            require_servable({**plan, **wrong})
    drafter = {**plan["drafter"], "directory": str(theirs), "content": digest_json(read_manifest(theirs)["files"])}
    with pytest.raises(PairError, match="chat_template"):
        require_servable({**plan, "argv": argv, "drafter": drafter})


KILLED = {
    "while the new engine starts": (Engines, "wait_until_healthy"),
    "before the record": (reconcile, "write_state"),
    "before the proxy's file": (Proxy, "apply"),
    "before the proxy's reload": (Proxy, "_load"),
    "before the old engine's end": (reconcile.Reconciler, "_retire"),
}


def test_killed_anywhere_the_next_run_goes_on(alone: Site, first: Path) -> None:
    served = alone.who()
    for name, (owner, attribute) in KILLED.items():
        version = alone.new_champion(first)

        def where(owner: Any = owner, attribute: str = attribute) -> None:
            real = getattr(owner, attribute)
            states = all_states(alone.places)

            def once(*arguments: Any, **options: Any) -> Any:
                # The settling at the start of a run is not what is meant.
                if attribute == "apply" and all_states(alone.places) == states:
                    return real(*arguments, **options)
                return die()

            setattr(owner, attribute, once)

        assert reconcile_in_a_process(alone, where), "it has not come to the point where it dies"
        assert alone.who() in (served, fingerprint(first, alone, version)), name
        alone.reconcile()
        served = fingerprint(first, alone, version)
        assert alone.who() == served, name
        only_engine_is_the_live_one(alone)
        assert len(list(alone.places.models.glob("[!.]*"))) == len(list(alone.places.served.glob("*/*"))) == 1, name


def ask_on(client: httpx.Client, url: str, streamed: bool, prompt: str) -> tuple[str, str]:
    """An answer and who gave it, over a connection that is kept."""
    body = {"model": NAME, "messages": [{"role": "user", "content": prompt}], "stream": streamed}
    response = client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
    if not streamed:
        answer = response.json()
        return answer["choices"][0]["message"]["content"], answer["system_fingerprint"]
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event) for event in events[:-1]]
    return "".join(piece["choices"][0]["delta"]["content"] for piece in pieces), pieces[0]["system_fingerprint"]


def test_a_switch_under_load_loses_no_request(pair: Site, first: Path) -> None:
    expected = {prompt: pair.ask(prompt)["choices"][0]["message"]["content"] for prompt in ("one", "two", "three")}
    old = pair.who()
    version = pair.new_champion(first)
    new = fingerprint(first, pair, version)
    served: list[str] = []
    lost: list[str] = []
    switched = threading.Event()
    numbers = iter(range(10_000))

    def client() -> None:
        with httpx.Client(timeout=20) as connection:
            while (number := next(numbers)) < TOTAL or not switched.is_set():
                prompt = ("one", "two", "three")[number % 3]
                try:
                    answer, who = ask_on(connection, pair.url, number % 2 == 0, prompt)
                    assert answer == expected[prompt]
                    served.append(who)
                except (httpx.HTTPError, AssertionError) as error:
                    lost.append(repr(error))

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    try:
        pair.reconcile()
    finally:
        took = time.monotonic() - began
        switched.set()
        for thread in threads:
            thread.join()
    shares = f"{served.count(old)} by the old engine, {served.count(new)} by the new one"
    print(f"\n{len(served)} requests of {CLIENTS} clients, {len(lost)} lost; {shares}; {took:.1f} s for the switch")
    assert lost == []
    assert len(served) >= TOTAL
    assert set(served) == {old, new}
    only_engine_is_the_live_one(pair)


def test_a_long_answer_is_finished_by_the_engine_that_began_it(pair: Site, first: Path) -> None:
    answers: list[str] = []

    def slow() -> None:
        body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "seconds": 4.0}
        answers.append(httpx.post(f"{pair.url}/v1/chat/completions", json=body, timeout=30).raise_for_status().json()["system_fingerprint"])

    old = pair.who()
    thread = threading.Thread(target=slow)
    thread.start()
    pair.new_champion(first)
    pair.reconcile()
    thread.join()
    assert answers == [old]


def test_what_is_missing_is_said_in_one_line_and_nothing_is_started(site: Site, first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = site.serve_verifier(first)

    def refused(says: str) -> None:
        with pytest.raises(FlowError, match=says) as error:
            site.reconcile()
        assert "\n" not in str(error.value)
        assert site.engine_processes() == []
        assert all_states(site.places) == []

    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda *_, **__: None)
        refused("package haproxy")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", site.port))
        listener.listen()
        refused(f"127.0.0.1:{site.port}: Address already in use; set SERVE_PORT")
    with monkeypatch.context() as patch:
        patch.setattr(type(site.places), "supervisor_socket", property(lambda self: self.run / "nothing.sock"))
        refused("make up")
    with monkeypatch.context() as patch:
        patch.setattr("flows.serving.models.PROCESS_BYTES", 1 << 60)
        refused("memory: one more engine needs")
    shutil.rmtree(site.places.models)
    (site.root / "outputs" / "verifier" / "models" / identity.digest[:16]).unlink()
    refused("its files are not on this machine")


def test_each_verifier_has_its_port_and_one_that_fails_leaves_the_other(pair: Site, first: Path, second: Path) -> None:
    pair.serve_verifier(second, "other")
    pair.reconciler.reconcile("other")
    found = read_state(pair.places, "other")
    assert found is not None
    assert found.port != pair.port
    assert httpx.get(f"http://127.0.0.1:{found.port}/v1/models", timeout=20).json()["data"] == [{"id": "other"}]
    assert pair.who() == fingerprint(first, pair, 1)
    pair.new_champion(first)
    pair.reconcile()
    assert read_state(pair.places, "other") == found
    assert httpx.get(f"http://127.0.0.1:{found.port}/v1/models", timeout=20).json()["data"] == [{"id": "other"}]
    assert len(pair.engine_processes()) == 2


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize("build", [build_plan], ids=["vLLM"])
def test_the_real_engine_from_the_verifier_alone_to_its_pair(site: Site, first: Path) -> None:
    site.serve_verifier(first)
    site.reconcile()
    body = {"model": NAME, "messages": [{"role": "user", "content": "Tell me about the river."}], "temperature": 0, "max_tokens": 40}

    def answer() -> str:
        return str(httpx.post(f"{site.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()["choices"][0]["message"]["content"])

    before = answer()
    site.new_champion(first)
    site.reconcile()
    print("\n" + "\n".join(site.said))
    assert answer() == before
    assert acceptance(site.url).accepted > 0
    state = read_state(site.places, NAME)
    assert state is not None
    assert len(REQUESTS.findall(get(f"{site.url}/metrics", 10.0))) >= 2, "running and waiting"
    assert site.reconciler.engines.known() == {state.engine}
    assert site.live() == (1, 1)
