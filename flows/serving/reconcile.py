"""From what is served to what is to be served, one switch at a time; the old engine serves until the new one has shown itself.

The order of a switch: room for two → start the new engine beside the old one → wait for its health → compare a pair's answers with the
verifier's own → record it as live → reload the proxy → let the old one finish → end it. A failure before the record ends the new one and
leaves the old one serving. A run that is killed leaves a record and a few engines: `settle` brings the proxy to the record and ends
the engines that no record names, so the next run begins where this one was.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flows.context import BASE_PORT, SERVE_PORT, require_free_port
from flows.errors import FlowError
from flows.registry import Registry
from flows.serving import smoke
from flows.serving.desired import Desired, desired, steps
from flows.serving.engines import HOST, POLL_SECONDS, PREFIX, Engines, new_name, url
from flows.serving.models import drafter_files, engine_bytes, require_memory, verifier_files
from flows.serving.pays import served_params, speculation
from flows.serving.places import Places
from flows.serving.proxy import Proxy, haproxy
from flows.serving.state import Refused, State, Target, all_states, read_state, remove_state, write_state
from flows.serving.supervisor import Supervisor
from stages.artifacts import read_json
from stages.errors import DraftlineError
from stages.installed import Device, installed_device
from stages.params import Params
from stages.process import output_lock
from stages.servers import free_port
from stages.serving.plan import build_plan

DRAIN_SECONDS = 600
BUSY_SECONDS = 5.0
KEPT_LOGS = 10
"""Logs of engines that have ended."""

PlanBuilder = Callable[[Params, Device, Path, Path | None, dict[str, Any] | None, list[list[int]] | None], dict[str, Any]]


class PairDiffersError(FlowError):
    """A pair answers otherwise than its verifier alone."""


@dataclass
class Reconciler:
    """Serving of one repository.

    Attributes:
        build: makes an engine's command; tests put a small server in vLLM's place here.
        startup_seconds: longest wait for an engine; None: `deploy.startup_seconds`.
        drain_seconds: longest time that an old engine gets to finish its requests.
    """

    registry: Registry
    places: Places
    port: int = BASE_PORT
    build: PlanBuilder = build_plan
    startup_seconds: float | None = None
    drain_seconds: int = DRAIN_SECONDS
    say: Callable[[str], object] = print
    engines: Engines = field(init=False)
    proxy: Proxy = field(init=False)

    def __post_init__(self) -> None:
        supervisor = Supervisor(self.places.supervisor_socket)
        self.engines = Engines(self.places, supervisor)
        self.proxy = Proxy(self.places, supervisor, self.drain_seconds)

    def reconcile(self, name: str, renew: bool = False) -> str:
        """Bring what is served for one verifier to what the registry wants; what was done.

        Args:
            renew: start engines anew, though they serve what they should; and try a refused pair again.
        Raises:
            DraftlineError: it could not be; what was served before still is.
        """
        with output_lock(self.places.states, BUSY_SECONDS):
            self.settle()
            wanted = desired(self.registry, name)
            if wanted is None:
                return "no version has the alias 'serving': left as it is"
            pays = speculation(served_params(self.places, name), wanted.drafter)
            if pays.alone:
                wanted = replace(wanted, drafter=None, reason=pays.note)
            return self._bring(name, wanted, renew)

    def _bring(self, name: str, wanted: Desired, renew: bool) -> str:
        state = read_state(self.places, name)
        live = state.target if state is not None and self._lives(state) else None
        if state is not None and live is None:
            self.say(f"{name}: {state.engine} does not answer")
        refused = state.refused if state is not None and not renew else None
        target = wanted.target
        held = refused is not None and refused.means(target)
        todo = [step for step in steps(live, target, renew) if not (held and step.content)]
        for step in todo:
            began = time.monotonic()
            self.say(f"{name}: next is {step}{f' ({wanted.reason})' if wanted.reason else ''}")
            self._switch(name, wanted, step)
            self.say(f"{name}: {step} is served, {time.monotonic() - began:.1f} s after its start")
            self.settle()
        if held and refused is not None and not (live is not None and live.same(target)):
            raise FlowError(f"{refused.reason} (not tried again; renew: true does)")
        if todo:
            return f"serving {todo[-1]}"
        self._rename(name, target)
        return f"serving {target}, as before{f' ({wanted.reason})' if wanted.reason else ''}"

    def _rename(self, name: str, target: Target) -> None:
        """The same content may have got another version number."""
        state = read_state(self.places, name)
        if state is not None and state.target != target:
            write_state(self.places, replace(state, target=target))

    def _startup(self, params: Params) -> float:
        return params.deploy.startup_seconds if self.startup_seconds is None else self.startup_seconds

    def _lives(self, state: State) -> bool:
        return self.engines.lives(state.engine, state.engine_port, state.verifier, self._startup(served_params(self.places, state.verifier)))

    # One switch.

    def _switch(self, name: str, wanted: Desired, target: Target) -> None:
        """Serve `target` in the place of what is live. Raises DraftlineError: what was live still is."""
        params = served_params(self.places, name)
        before = read_state(self.places, name)
        host, port = self._front(params, before)
        expected: list[smoke.Answer] = []
        tokens = min(smoke.MAX_TOKENS, params.engine.max_model_len // 2)
        if target.content is not None:
            with self._alone(name, wanted, before) as alone:
                expected = smoke.reference(url(alone), name, tokens)
        with self._started(name, wanted, target) as (engine, engine_port):
            if target.content is not None:
                difference = smoke.first_difference(url(engine_port), name, tokens, expected, params.gate.served_near_tie)
                if difference is not None:
                    reason = f"{target}: {difference}; not served"
                    if before is not None:
                        write_state(self.places, replace(before, refused=Refused(target.digest, target.content, reason)))
                    raise PairDiffersError(reason)
            refused = before.refused if before is not None and before.refused is not None and not before.refused.means(target) else None
            write_state(self.places, State(name, host, port, engine, engine_port, target, refused))
            try:
                self.proxy.apply(all_states(self.places))
            except BaseException:
                self._take_back(name, before)
                raise

    def _take_back(self, name: str, before: State | None) -> None:
        """The proxy did not follow: what was live is what the record says again, and the proxy's file with it."""
        if before is None:
            remove_state(self.places, name)
        else:
            write_state(self.places, before)
        with suppress(FlowError):
            self.proxy.apply(all_states(self.places))

    @contextmanager
    def _alone(self, name: str, wanted: Desired, live: State | None) -> Iterator[int]:
        """The port of an engine with the verifier alone: the live one if it is that, else one that runs as long as the block."""
        alone = wanted.target.alone()
        if live is not None and live.target.same(alone) and self.engines.answers(live.engine_port, name):
            yield live.engine_port
            return
        with self._started(name, wanted, alone) as (engine, port):
            yield port
            self.engines.remove(engine)

    @contextmanager
    def _started(self, name: str, wanted: Desired, target: Target) -> Iterator[tuple[str, int]]:
        """A new healthy engine; it is ended again if the block, or its start, fails."""
        params = served_params(self.places, name)
        device = installed_device() if params.deploy.device == "auto" else params.deploy.device
        verifier = verifier_files(self.places, wanted.verifier)
        drafter = None
        if target.content is not None and wanted.drafter is not None:
            drafter = drafter_files(self.places, name, wanted.drafter, self.registry.uri)
        require_memory(engine_bytes(params, verifier, drafter), device)
        engine, port = new_name(name, target), free_port(self.engines.ports())
        params = params.model_copy(update={"deploy": params.deploy.model_copy(update={"host": HOST, "port": port})})
        config = read_json(drafter / "config.json") if drafter is not None else None
        pays = speculation(params, wanted.drafter if drafter is not None else None)
        if pays.note:
            self.say(f"{name}: {pays.note}")
        plan = {
            "name": engine,
            "model": name,
            "host": HOST,
            "port": port,
            "device": device,
            "verifier": {"digest": target.digest, "version": target.verifier_version, "directory": str(verifier)},
            "drafter": {"content": target.content, "version": target.drafter_version, "directory": str(drafter)} if drafter is not None else None,
            "digests": str(self.places.digests),
            **self.build(params, device, verifier, drafter, config, pays.ranges),
        }
        try:
            self.engines.start(plan)
            self.engines.wait_until_healthy(engine, port, name, self._startup(params))
            yield engine, port
        except BaseException:
            # Cancelled, too: nothing that is not recorded as live stays.
            with suppress(DraftlineError):
                self.engines.remove(engine)
            raise

    def _front(self, params: Params, before: State | None) -> tuple[str, int]:
        """Where the verifier's users ask: where they did, else the next port.

        Raises:
            FlowError: something else listens there, or there is no proxy to listen.
        """
        haproxy()
        host = params.deploy.host
        if before is not None:
            return host, before.port
        taken = {state.port for state in all_states(self.places)}
        port = next(port for port in range(self.port, 65536) if port not in taken)
        require_free_port(host, port, SERVE_PORT)
        return host, port

    # What no record names.

    def settle(self) -> None:
        """Bring the proxy to the records, let engines that none names finish their requests, and end them."""
        states = all_states(self.places)
        if states and self.proxy.apply(states):
            self.say(f"the proxy serves {', '.join(f'{state.verifier} on {state.host}:{state.port} from {state.engine}' for state in states)}")
        strays = self.engines.known() - {state.engine for state in states}
        for name in sorted(strays):
            self._retire(name)
        self._tidy()

    def _retire(self, name: str) -> None:
        plan = self.engines.plan(name)
        if plan.is_file():
            port = int(read_json(plan)["port"])
            deadline = time.monotonic() + self.drain_seconds
            drained = self.proxy.wait_for_old_workers()
            while drained and self.engines.requests(port):
                drained = time.monotonic() < deadline
                time.sleep(POLL_SECONDS)
            if not drained:
                self.say(f"{name}: ended with requests that were not finished after {self.drain_seconds} s")
        self.engines.remove(name)

    def _tidy(self) -> None:
        """Remove verifiers and drafters that no engine loads (the workspaces and the registry still have them), and old engines' logs."""
        needed = {Path(directory).name for directory in self.engines.directories()}
        for entry in [*self.places.models.glob("*"), *self.places.served.glob("*/*")]:
            if entry.is_dir() and not entry.name.startswith(".") and entry.name not in needed:
                shutil.rmtree(entry, ignore_errors=True)
        known = self.engines.known()
        ended = [log for log in self.places.logs.glob(f"{PREFIX}*.log") if log.stem not in known]
        for log in sorted(ended, key=lambda log: log.stat().st_mtime_ns, reverse=True)[KEPT_LOGS:]:
            log.unlink(missing_ok=True)
