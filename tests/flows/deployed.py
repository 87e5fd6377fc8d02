"""A step of a walk: `serve`, `promote` or `watch-verifier` through Prefect and its worker, sometimes with a `kill -9` in the middle."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from flows.registry import CHAMPION, PREVIOUS
from tests.flows.site import NAME
from tests.flows.staffed import SERVERS

if TYPE_CHECKING:
    from tests.flows.walk import Walk

VICTIMS = ("flow", *SERVERS)
INTERRUPTED_SHARE = 0.4


def run_deployed(walk: Walk) -> None:
    walk.needs(*SERVERS)
    flow = walk.chance.choices(["serve", "promote", "roll back", "watch-verifier"], [4, 2, 1, 2])[0]
    if flow == "promote" and not walk.expected.drafters:
        flow = "serve"
    victim = walk.chance.choice(VICTIMS) if walk.chance.random() < INTERRUPTED_SHARE else None
    walk.tell(f"deployed: {flow}")
    walk.counts[f"deployed {flow}"] += 1
    {"serve": _serve, "promote": _promote, "roll back": _roll_back, "watch-verifier": _watch}[flow](walk, victim)


def _run(walk: Walk, victim: str | None, name: str, **parameters: Any) -> str | None:
    """A flow's last state; None: it was interrupted."""
    run = walk.site.start_flow(name, **parameters)
    if victim is None:
        state = walk.site.flow_ended(run)
        # Its process, and what the flow has asked for, end a moment later.
        walk.site.settle_flows(crashed=False)
        walk.tell(f"it is {state}")
        return state
    if victim == "flow" or walk.chance.random() < 0.8:
        walk.site.until("the flow's process", lambda: walk.site.flow_processes() or walk.site.unended() == [], 300)
    time.sleep(walk.chance.uniform(0.0, 4.0))
    walk.tell(f"kill -9: {victim}")
    walk.counts[f"{victim} killed in a flow"] += 1
    if victim == "flow":
        for process in walk.site.flow_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
    else:
        walk.site.kill_server(victim)
        walk.down.add(victim)
    # What is served is looked at while nothing is mended yet.
    walk.check()
    walk.site.settle_flows(crashed=True)
    walk.needs(*SERVERS)
    return None


def _serve(walk: Walk, victim: str | None) -> None:
    wanted = walk.expected.wanted()
    state = _run(walk, victim, "serve")
    if state == "FAILED":
        walk.failed("see Prefect")
        wanted = None
    elif state is not None:
        assert state == "COMPLETED", walk.told()
    if state is not None:
        walk.reconciled(wanted.who if wanted is not None else None)


def _promote(walk: Walk, victim: str | None) -> None:
    version = walk.chance.choice(list(walk.expected.drafters))
    state = _run(walk, victim, "promote", verifier=NAME, version=version)
    _moved(walk, state, version if walk.expected.may_be_champion(version) else None, refusing="FAILED")


def _roll_back(walk: Walk, victim: str | None) -> None:
    state = _run(walk, victim, "promote", verifier=NAME, rollback=True)
    _moved(walk, state, walk.expected.previous if walk.expected.may_roll_back() else None, refusing="FAILED")


def _watch(walk: Walk, victim: str | None) -> None:
    """Which has a `promote` made, where one is needed and can be."""
    state = _run(walk, victim, "watch-verifier", verifier=NAME)
    if walk.expected.serving is None and state is not None:
        assert state == "COMPLETED", walk.told()
    _moved(walk, state, walk.expected.found_by_watch(), refusing="COMPLETED")


def _moved(walk: Walk, state: str | None, version: int | None, refusing: str) -> None:
    """The aliases are where a flow has brought them; an interrupted one may have come nowhere, halfway, or to its end."""
    before = replace(walk.expected)
    after = replace(walk.expected)
    if version is not None:
        after.promoted(version)
    if state is None:
        found = {alias: walk.site.registry.drafter(NAME, alias) for alias in (CHAMPION, PREVIOUS)}
        champion, previous = (found[alias].version if found[alias] is not None else None for alias in (CHAMPION, PREVIOUS))  # type: ignore[union-attr]
        allowed = {(before.champion, before.previous), (before.champion, after.previous), (after.champion, after.previous)}
        assert (champion, previous) in allowed, f"{champion}, {previous}\n{walk.told()}"
        walk.expected.champion, walk.expected.previous = champion, previous
        return
    assert state == ("COMPLETED" if version is not None else refusing), walk.told()
    walk.expected.champion, walk.expected.previous = after.champion, after.previous
    walk.aliases()
