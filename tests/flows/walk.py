"""A walk: whatever happens to registry, files and processes, in whatever order; after each step what answers is looked at.

Steps act on a staffed site and on a second account of it (`expected.py`); flows and reconciler must come to what that account says.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flows.errors import FlowError
from flows.promotion import judge, make_champion, roll_back
from flows.registry import CHAMPION, PREVIOUS
from flows.serving import reconcile
from flows.serving.engines import Engines
from flows.serving.proxy import Proxy
from flows.serving.state import read_state
from stages.errors import DraftlineError
from stages.pairing.identity import compute_identity
from stages.params import PARAMS_FILE, read_params
from stages.tracking import TrackingError
from tests.flows.deployed import run_deployed
from tests.flows.expected import Drafter, Expected
from tests.flows.site import NAME, die, reconcile_in_a_process
from tests.flows.staffed import StaffedSite

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
LOG = logging.getLogger("walk")


class Walk:
    """A site, what should be true of it, and what may happen to it."""

    kinds = (("good", 12), ("differs", 2), ("dies", 1), ("not gated", 2))
    """Drafters that are trained, and how often."""
    silent_seconds = 90.0
    """For whoever serves to answer again after a crash, on a machine that does something else too."""
    killed_share = 0.08
    reconciled_share = 0.35
    weights = (
        ("change_verifier", 4.0),
        ("train", 5.0),
        ("crown", 3.0),
        ("promote", 5.0),
        ("roll_back", 3.0),
        ("demote", 1.0),
        ("withdraw", 1.0),
        ("delete", 2.0),
        ("alter", 2.0),
        ("damage", 1.0),
        ("crash_engines", 2.0),
        ("crash_proxy", 1.0),
        ("crash_mlflow", 0.3),
        ("lose_mlflow", 0.3),
        ("crash_prefect", 0.3),
        ("crash_worker", 0.3),
        ("deployed", 0.4),
    )

    def __init__(self, site: StaffedSite, verifiers: list[Path], seed: int) -> None:
        self.site = site
        self.verifiers = verifiers
        self.chance = random.Random(seed)
        min_ratio = read_params(site.root / PARAMS_FILE).promotion.min_ratio
        self.expected = Expected([compute_identity(verifier).digest for verifier in verifiers], min_ratio)
        self.story: list[str] = []
        self.counts: Counter[str] = Counter()
        self.down: set[str] = set()
        """Servers that were killed and not seen since."""
        self.shaken = False
        """Whether something has happened after which, for a moment, nobody may answer."""

    def step(self) -> None:
        name = self.chance.choices([name for name, _ in self.weights], [weight for _, weight in self.weights])[0]
        self.counts[name] += 1
        getattr(self, name)()
        self.check()
        if self.chance.random() < self.killed_share:
            self.killed()
            self.check()
        if self.chance.random() < self.reconciled_share:
            self.reconcile()

    def tell(self, line: str) -> None:
        self.story.append(line)
        LOG.info(line)

    def needs(self, *servers: str) -> None:
        if wanted := self.down & set(servers):
            self.site.wait_for(*sorted(wanted))
            self.down -= wanted

    # What happens to the registry.

    def change_verifier(self) -> None:
        self.needs("mlflow")
        self.expected.serving = self.chance.randrange(len(self.verifiers))
        self.tell(f"verifier {self.expected.serving} is to be served")
        self.site.serve_verifier(self.verifiers[self.expected.serving])

    def withdraw(self) -> None:
        if self.expected.serving is not None:
            self.needs("mlflow")
            self.tell("no verifier is to be served")
            self.site.registry.delete_alias(f"verifier.{NAME}", "serving")
            self.expected.serving = None

    def train(self) -> None:
        """A new drafter, mostly for the verifier that is to be served, mostly a good one; half of them become champion at once."""
        self.needs("mlflow")
        serving = self.expected.serving
        of = serving if serving is not None and self.chance.random() < 0.8 else self.chance.randrange(len(self.verifiers))
        kind = self.chance.choices([kind for kind, _ in self.kinds], [weight for _, weight in self.kinds])[0]
        behaviour: dict[str, Any] = {kind: True} if kind in ("differs", "dies") else {}
        acceptance = self.chance.randrange(10, 20) / 10
        version = self.site.add_drafter(self.verifiers[of], gate="fail" if kind == "not gated" else "pass", acceptance=acceptance, **behaviour)
        drafter = self.site.registry.drafter(NAME, "candidate")
        assert drafter is not None
        assert drafter.version == version
        self.expected.add(version, Drafter(self.expected.digests[of], drafter.content, kind != "not gated", acceptance, not behaviour))
        self.tell(f"drafter {version} for verifier {of}, {kind}, acceptance length {acceptance}")
        if self.chance.random() < 0.5:
            self._crown(version)

    def crown(self) -> None:
        """Any known version becomes champion, as someone with the registry's own tools might make it."""
        if self.expected.drafters:
            self.needs("mlflow")
            self._crown(self.chance.choice(list(self.expected.drafters)))

    def _crown(self, version: int) -> None:
        self.tell(f"champion is {version}, by hand")
        self.site.make_champion(version)
        self.expected.champion = version

    def demote(self) -> None:
        if self.expected.champion is not None:
            self.needs("mlflow")
            self.tell("no champion")
            self.site.registry.delete_alias(f"drafter.{NAME}", CHAMPION)
            self.expected.champion = None

    def delete(self) -> None:
        if self.expected.drafters:
            self.needs("mlflow")
            version = self.chance.choice(list(self.expected.drafters))
            self.tell(f"version {version} is deleted")
            self.site.registry.client.delete_model_version(f"drafter.{NAME}", str(version))
            self.expected.delete(version)

    def promote(self) -> None:
        """By the policy: granted or refused as expected, and refusing changes nothing."""
        if self.expected.drafters and self.expected.serving is not None:
            self.needs("mlflow")
            version = self.chance.choice(list(self.expected.drafters))
            may = self.expected.may_be_champion(version)
            self._outcome(f"promotion of {version}", may, self._promoted(version))
            if may:
                self.expected.promoted(version)
            self.aliases()

    def _promoted(self, version: int) -> str | None:
        """Why it was refused; None: it was granted."""
        known = self.site.registry
        serving = known.serving_verifier(NAME)
        assert serving is not None
        candidate = next(drafter for drafter in known.drafters(NAME) if drafter.version == version)
        verdict = judge(candidate, known.drafter(NAME, CHAMPION), serving, self.expected.min_ratio)
        if not verdict.promote:
            return verdict.reason
        try:
            make_champion(known, candidate, serving)
        except FlowError as error:
            return str(error)
        return None

    def roll_back(self) -> None:
        if self.expected.serving is not None:
            self.needs("mlflow")
            may, to = self.expected.may_roll_back(), self.expected.previous
            refused = None
            serving = self.site.registry.serving_verifier(NAME)
            assert serving is not None
            try:
                roll_back(self.site.registry, serving)
            except FlowError as error:
                refused = str(error)
            self._outcome(f"rollback to {to}", may, refused)
            if may:
                assert to is not None
                self.expected.promoted(to)
            self.aliases()

    def _outcome(self, what: str, may: bool, refused: str | None) -> None:
        kind = what.partition(" ")[0]
        self.tell(f"{what}: {refused or 'granted'}")
        self.counts[f"{kind}s {'refused' if refused else 'granted'}"] += 1
        assert may == (refused is None), self.told()

    def aliases(self) -> None:
        """Champion and previous are who they should be."""
        found = {alias: self.site.registry.drafter(NAME, alias) for alias in (CHAMPION, PREVIOUS)}
        numbers = {alias: drafter.version if drafter is not None else None for alias, drafter in found.items()}
        assert numbers == {CHAMPION: self.expected.champion, PREVIOUS: self.expected.previous}, f"{numbers}\n{self.told()}"

    # What happens to files and processes.

    def alter(self) -> None:
        """A byte of a registered drafter."""
        if whole := [version for version, drafter in self.expected.drafters.items() if drafter.whole]:
            self.needs("mlflow")
            version = self.chance.choice(whole)
            self.tell(f"version {version} is altered in the registry")
            _alter(self.site.stored(version) / "model.safetensors")
            self.expected.drafters[version].whole = False

    def damage(self) -> None:
        """A byte of what an engine has loaded, and will load again."""
        if weights := sorted(self.site.places.served.glob("*/*/model.safetensors")):
            self.tell("the served drafter's file is altered")
            _alter(self.chance.choice(weights))

    def crash_engines(self) -> None:
        self.tell("the engines crash")
        self.shaken = True
        for process in self.site.engine_processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def crash_proxy(self) -> None:
        program = self.site.reconciler.proxy.supervisor.program("proxy")
        if program is not None and program.pid:
            self.tell("the proxy crashes")
            self.shaken = True
            os.kill(program.pid, signal.SIGKILL)

    def crash_prefect(self) -> None:
        self._crash("prefect")

    def crash_worker(self) -> None:
        self._crash("worker")

    def _crash(self, server: str) -> None:
        self.tell(f"{server} crashes")
        self.site.kill_server(server)
        self.down.add(server)

    def crash_mlflow(self) -> None:
        """Without the registry a run ends with one line, and leaves what is served as it is."""
        self.needs("mlflow")
        self._crash("mlflow")
        before = read_state(self.site.places, NAME)
        with pytest.raises(TrackingError, match=self.site.uri) as error:
            self.site.reconcile()
        assert "\n" not in str(error.value), self.told()
        assert read_state(self.site.places, NAME) == before, self.told()

    def lose_mlflow(self) -> None:
        """The registry goes at any moment of a run, which then comes to its end, or fails and is taken up by the next."""
        self.needs("mlflow")
        wanted = self.expected.wanted()
        says = ""
        killer = threading.Timer(self.chance.uniform(0.0, 1.5), self._crash, ["mlflow"])
        killer.start()
        try:
            self.site.reconcile()
        except DraftlineError as error:
            says, wanted = str(error), None
            self.tell(f"the run fails: {says}")
        finally:
            killer.join()
        assert "\n" not in says, self.told()
        self.served(wanted.who if wanted is not None else None)

    def killed(self) -> None:
        """A run that dies somewhere, or ends before it comes to that place."""
        self.needs("mlflow")
        owner, attribute = self.chance.choice(DEATHS)
        after = self.chance.choices([0, 1, 2], [3, 1, 1])[0]

        def change() -> None:
            real = getattr(owner, attribute)
            calls = iter(range(after))

            def mortal(*arguments: Any, **options: Any) -> Any:
                return real(*arguments, **options) if next(calls, None) is not None else die()

            setattr(owner, attribute, mortal)

        died = reconcile_in_a_process(self.site, change)
        self.counts["runs killed"] += died
        self.tell(f"a run {'dies' if died else 'does not die'} at call {after + 1} of {attribute}")

    def deployed(self) -> None:
        """A flow through Prefect and its worker."""
        run_deployed(self)

    # What must be true.

    def reconcile(self) -> None:
        self.needs("mlflow")
        self.tell("reconcile")
        self.counts["runs"] += 1
        wanted = self.expected.wanted()
        try:
            self.site.reconcile()
        except FlowError as error:
            self.failed(str(error))
            wanted = None
        self.reconciled(wanted.who if wanted is not None else None)

    def failed(self, reason: str) -> None:
        """A run may fail by a champion whose pair starts not or answers otherwise, and by nothing else."""
        self.tell(f"it fails: {reason}")
        self.counts["runs failed as they had to"] += 1
        wanted = self.expected.wanted()
        assert wanted is not None, self.told()
        assert not wanted.sure, self.told()

    def reconciled(self, who: str | None) -> None:
        """After a run that nothing has interrupted: `who` answers (None: who did before), and nothing else is left."""
        state = read_state(self.site.places, NAME)
        if state is not None:
            assert self.site.reconciler.engines.known() == {state.engine}, self.told()
        self.served(who)

    def check(self) -> None:
        self.served(None)

    def served(self, who: str | None) -> None:
        """What answers may be served, and is `who` where one is named; after a crash nobody may answer for a moment.

        An engine whose files were altered refuses to come back after its crash: nobody answers until the next run.
        """
        state = read_state(self.site.places, NAME)
        if state is None:
            assert who is None, self.told()
            return
        deadline = time.monotonic() + self.silent_seconds
        while (found := self.answering()) is None:
            assert self.shaken, f"nobody answers, and nothing has crashed\n{self.told()}"
            if who is None and self._refuses(state.engine):
                self.tell("nobody answers: the engine refuses its altered files")
                return
            assert time.monotonic() < deadline, f"nobody answers\n{self.told()}"
            time.sleep(0.1)
        self.shaken = False
        assert self.expected.allows(found), f"{found} answers\n{self.told()}"
        assert who in (None, found), f"{found} answers, not {who}\n{self.told()}"
        self.counts["answers looked at"] += 1

    def answering(self) -> str | None:
        """`<verifier>/<drafter, or alone>` of who answers users now."""
        try:
            return self.site.who()
        except httpx.HTTPError:
            return None

    def _refuses(self, engine: str) -> bool:
        program = self.site.reconciler.engines.supervisor.program(engine)
        log = self.site.places.logs / f"{engine}.log"
        return program is not None and program.state == "EXITED" and "draftline engine:" in log.read_text(encoding="utf-8", errors="replace")

    def told(self) -> str:
        return "\n".join([*self.story[-25:], "said:", *self.site.said[-10:]])


def _alter(path: Path) -> None:
    content = path.read_bytes()
    # Not in place: a file that two drafters share by a link would change for both.
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
