"""Whatever happens in whatever order: what answers is a locked and gated pair, or a verifier alone; and in the end what the registry says."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.errors import FlowError
from flows.serving import reconcile
from flows.serving.engines import Engines
from flows.serving.proxy import Proxy
from flows.serving.state import read_state
from stages.pairing.identity import compute_identity
from tests.flows.site import NAME, Site, die, reconcile_in_a_process
from tests.gate.pair import make_bigram_verifier

DEATHS: tuple[tuple[Any, str], ...] = (
    (Engines, "start"),
    (Engines, "wait_until_healthy"),
    (Engines, "remove"),
    (reconcile, "write_state"),
    (Proxy, "apply"),
    (Proxy, "_load"),
    (reconcile.Reconciler, "_retire"),
    (reconcile.Reconciler, "_tidy"),
)


@dataclass
class Drafter:
    """What was registered, and what has become of it."""

    verifier: str
    content: str
    gate: str
    fit: bool
    whole: bool = True


@dataclass
class Walk:
    """A site, what should be true of it, and what may happen to it."""

    site: Site
    verifiers: list[Path]
    chance: random.Random
    digests: list[str] = field(init=False)
    drafters: dict[int, Drafter] = field(default_factory=dict)
    serving: int | None = None
    champion: int | None = None
    servable: dict[str, str] = field(default_factory=dict)
    """Of each content that was ever registered: the verifier that it may be served with, "" for none."""
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.digests = [compute_identity(verifier).digest for verifier in self.verifiers]

    def step(self) -> None:
        happens = self.chance.choices(
            [self.change_verifier, self.train, self.promote, self.demote, self.delete, self.alter, self.damage, self.crash, self.crash_proxy, self.withdraw],
            weights=[4, 5, 5, 1, 2, 2, 1, 2, 1, 1],
        )[0]
        happens()
        if self.chance.random() < 0.3:
            self.killed()
        if self.chance.random() < 0.7:
            self.reconcile()

    # What happens.

    def change_verifier(self) -> None:
        self.serving = self.chance.randrange(len(self.verifiers))
        self.story.append(f"verifier {self.serving} is to be served")
        self.site.serve_verifier(self.verifiers[self.serving])

    def withdraw(self) -> None:
        if self.serving is not None:
            self.story.append("no verifier is to be served")
            self.site.registry.delete_alias(f"verifier.{NAME}", "serving")
            self.serving = None

    def train(self) -> None:
        """A new drafter, mostly for the verifier that is to be served, mostly a good one; it becomes champion."""
        of = self.serving if self.serving is not None and self.chance.random() < 0.8 else self.chance.randrange(len(self.verifiers))
        kind = self.chance.choices(["good", "differs", "sick", "not gated"], weights=[12, 2, 1, 2])[0]
        behaviour: dict[str, Any] = {kind: True} if kind in ("differs", "sick") else {}
        version = self.site.add_drafter(self.verifiers[of], gate="fail" if kind == "not gated" else "pass", **behaviour)
        content = next(item.content for item in self.site.registry.drafters(NAME) if item.version == version)
        self.drafters[version] = Drafter(self.digests[of], content, "fail" if kind == "not gated" else "pass", not behaviour)
        self.servable[content[:16]] = self.digests[of][:16] if kind == "good" else ""
        self.story.append(f"drafter {version} for verifier {of}, {kind}")
        self._crown(version)

    def promote(self) -> None:
        """Any known version becomes champion, as someone with the registry's own tools might make it."""
        if self.drafters:
            self._crown(self.chance.choice(list(self.drafters)))

    def _crown(self, version: int) -> None:
        self.story.append(f"champion is {version}")
        self.site.make_champion(version)
        self.champion = version

    def demote(self) -> None:
        if self.champion is not None:
            self.story.append("no champion")
            self.site.registry.delete_alias(f"drafter.{NAME}", "champion")
            self.champion = None

    def delete(self) -> None:
        if self.drafters:
            version = self.chance.choice(list(self.drafters))
            self.story.append(f"version {version} is deleted")
            self.site.registry.client.delete_model_version(f"drafter.{NAME}", str(version))
            del self.drafters[version]
            self.champion = None if self.champion == version else self.champion

    def alter(self) -> None:
        """A byte of a registered drafter."""
        if whole := [version for version, drafter in self.drafters.items() if drafter.whole]:
            version = self.chance.choice(whole)
            self.story.append(f"version {version} is altered in the registry")
            location = self.site.registry.client.get_model_version_download_uri(f"drafter.{NAME}", str(version))
            _alter(Path(location.removeprefix("file://")) / "model.safetensors")
            self.drafters[version].whole = False

    def damage(self) -> None:
        """A byte of what an engine has loaded, and will load again."""
        if weights := sorted(self.site.places.served.glob("*/*/model.safetensors")):
            self.story.append("the served drafter's file is altered")
            _alter(self.chance.choice(weights))

    def crash(self) -> None:
        self.story.append("the engines crash")
        for process in self.site.engine_processes():
            process.send_signal(signal.SIGKILL)

    def crash_proxy(self) -> None:
        program = self.site.reconciler.proxy.supervisor.program("proxy")
        if program is not None and program.pid:
            self.story.append("the proxy crashes")
            os.kill(program.pid, signal.SIGKILL)

    def killed(self) -> None:
        """A run that dies somewhere, or ends before it comes to that place."""
        owner, attribute = self.chance.choice(DEATHS)
        after = self.chance.randrange(3)

        def change() -> None:
            real = getattr(owner, attribute)
            calls = iter(range(after))

            def mortal(*arguments: Any, **options: Any) -> Any:
                return real(*arguments, **options) if next(calls, None) is not None else die()

            setattr(owner, attribute, mortal)

        died = reconcile_in_a_process(self.site, change)
        self.story.append(f"a run {'dies' if died else 'does not die'} at call {after + 1} of {attribute}")

    # What must be true.

    def reconcile(self) -> None:
        self.story.append("reconcile")
        wanted = self._wanted()
        try:
            self.site.reconcile()
        except FlowError as error:
            self.story.append(f"it fails: {error}")
            assert wanted is not None, self._told()
            assert not wanted[1], self._told()
            wanted = None
        state = read_state(self.site.places, NAME)
        if state is None:
            return
        assert self.site.reconciler.engines.known() == {state.engine}, self._told()
        if self.serving is None and not self.site.reconciler.engines.answers(state.engine_port, NAME):
            return  # left as it was, which may be down
        verifier, drafter = self._answers().split("/")
        assert verifier in [digest[:16] for digest in self.digests], self._told()
        if drafter != "alone":
            assert self.servable[drafter] == verifier, self._told()
        if wanted is not None:
            assert f"{verifier}/{drafter}" == wanted[0], self._told()

    def _answers(self) -> str:
        """Who does; a crash a moment ago may not have been noticed by the run, and is mended by the supervisor alone."""
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            try:
                return self.site.who()
            except httpx.HTTPError as error:
                self.story.append(f"nobody answers: {error!r}")
                time.sleep(0.2)
        raise AssertionError(self._told())

    def _wanted(self) -> tuple[str, bool] | None:
        """Who is to answer, and whether nothing stands in the way; None: whoever did."""
        if self.serving is None:
            return None
        verifier = self.digests[self.serving]
        champion = self.drafters.get(self.champion) if self.champion is not None else None
        if champion is None or champion.verifier != verifier or champion.gate != "pass" or not champion.whole:
            return f"{verifier[:16]}/alone", True
        return f"{verifier[:16]}/{champion.content[:16]}", champion.fit

    def _told(self) -> str:
        return "\n".join([*self.story[-25:], "said:", *self.site.said[-10:]])


def _alter(path: Path) -> None:
    content = path.read_bytes()
    # Not in place: a file that two drafters share by a link would change for both.
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three: they differ in their chat templates."""
    folder = tmp_path_factory.mktemp("verifiers")
    found = [make_bigram_verifier(folder / "0")]
    for number in (1, 2):
        shutil.copytree(found[0], folder / str(number))
        template = folder / str(number) / "chat_template.jinja"
        template.write_text(template.read_text() + " " * number)
        found.append(folder / str(number))
    return found


def walk(site: Site, verifiers: list[Path], steps: int, seed: int) -> None:
    walked = Walk(site, verifiers, random.Random(seed))
    for _ in range(steps):
        walked.step()
    walked.change_verifier()
    walked.reconcile()
    runs = sum(line == "reconcile" for line in walked.story)
    deaths = sum(line.startswith("a run dies") for line in walked.story)
    print(f"\n{steps} steps, {runs} runs, {sum(line.startswith('it fails') for line in walked.story)} failed as they had to, {deaths} killed")


@pytest.mark.timeout(300)
def test_a_short_walk(site: Site, verifiers: list[Path]) -> None:
    walk(site, verifiers, 15, seed=1)


@pytest.mark.benchmark
def test_a_long_walk(site: Site, verifiers: list[Path]) -> None:
    """20 minutes: pytest -m benchmark --timeout=0 tests/flows/test_serving_walk.py; DRAFTLINE_SEED starts another one."""
    walk(site, verifiers, 2000, seed=int(os.environ.get("DRAFTLINE_SEED", "2")))
