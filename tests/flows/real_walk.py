"""A walk on real engines: fewer kinds of drafters, no flow in another process (a flow's engines are the small ones), and engines that say not who they are."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from flows.serving.state import read_state
from tests.flows.site import NAME
from tests.flows.walk import Walk


class RealWalk(Walk):
    kinds = (("good", 5), ("not gated", 1))
    silent_seconds = 600.0
    killed_share = 0.1
    reconciled_share = 0.6
    weights = (
        ("change_verifier", 3.0),
        ("train", 5.0),
        ("crown", 1.0),
        ("promote", 3.0),
        ("roll_back", 2.0),
        ("delete", 1.0),
        ("alter", 2.0),
        ("damage", 1.0),
        ("crash_engines", 2.0),
        ("crash_proxy", 0.5),
        ("crash_mlflow", 1.0),
        ("crash_prefect", 0.5),
        ("crash_worker", 0.5),
    )

    def answering(self) -> str | None:
        """By an answer through the proxy, the verifier's folder that the engine names, its counters, and the command of its process."""
        try:
            self.site.ask("Tell me about the river.")
            model = httpx.get(f"{self.site.url}/v1/models", timeout=20).raise_for_status().json()["data"][0]
            counters = httpx.get(f"{self.site.url}/metrics", timeout=20).raise_for_status().text
        except httpx.HTTPError:
            return None
        assert model["id"] == NAME
        drafter = self._drafter()
        assert (drafter is not None) == ("vllm:spec_decode_num_drafts" in counters), self.told()
        return f"{Path(model['root']).name}/{drafter or 'alone'}"

    def _drafter(self) -> str | None:
        """What the live engine was started to draft with."""
        state = read_state(self.site.places, NAME)
        assert state is not None
        program = self.site.reconciler.engines.supervisor.program(state.engine)
        assert program is not None
        argv = psutil.Process(program.pid).cmdline()
        return Path(json.loads(argv[argv.index("--speculative-config") + 1])["model"]).name if "--speculative-config" in argv else None

    def crash_engines(self) -> None:
        self.tell("the engines crash")
        self.shaken = True
        state = read_state(self.site.places, NAME)
        program = self.site.reconciler.engines.supervisor.program(state.engine) if state is not None else None
        if program is not None and program.pid:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(program.pid)
                for one in [process, *process.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        one.send_signal(signal.SIGKILL)
