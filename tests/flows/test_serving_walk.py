"""Whatever happens in whatever order: what answers is a locked and gated pair, or a verifier alone; and in the end what the registry says."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.serving.reconcile import PlanBuilder
from stages.servers import free_port
from stages.serving.plan import build_plan
from tests.flows.real_walk import RealWalk
from tests.flows.staffed import StaffedSite
from tests.flows.walk import Walk
from tests.gate.pair import make_bigram_verifier


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


@pytest.fixture
def staffed(build: PlanBuilder | None, database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StaffedSite]:
    # Without its registry a run is to fail at once, and not when the registry is back.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # pytest's own folders have paths too long for sockets.
    with tempfile.TemporaryDirectory(prefix="dl-") as folder:
        monkeypatch.chdir(folder)
        with StaffedSite(Path(folder).resolve(), database, free_port(), build) as found:
            yield found


def go(walk: Walk, steps: int) -> None:
    """Take the steps, then come to rest: what is served is what the registry says."""
    began = time.monotonic()
    walk.change_verifier()
    walk.reconcile()
    for number in range(1, steps + 1):
        walk.step()
        if number % 50 == 0:
            print(f"{number} steps, {time.monotonic() - began:.0f} s", flush=True)
    walk.change_verifier()
    walk.reconcile()
    counts = ", ".join(f"{name} {count}" for name, count in sorted(walk.counts.items()))
    print(f"\n{steps} steps in {time.monotonic() - began:.0f} s: {counts}")


def seed(default: int) -> int:
    return int(os.environ.get("DRAFTLINE_SEED", default))


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_a_short_walk(staffed: StaffedSite, verifiers: list[Path]) -> None:
    go(Walk(staffed, verifiers, seed(1)), 20)


@pytest.mark.long
def test_a_long_walk(staffed: StaffedSite, verifiers: list[Path]) -> None:
    """Most of an hour: pytest -s -m long --timeout=0 tests/flows/test_serving_walk.py -k a_long_walk; DRAFTLINE_SEED starts another one."""
    go(Walk(staffed, verifiers, seed(2)), int(os.environ.get("DRAFTLINE_STEPS", "2000")))


@pytest.mark.long
@pytest.mark.parametrize("build", [build_plan], ids=["vLLM"])
def test_a_walk_with_real_engines(staffed: StaffedSite, verifiers: list[Path]) -> None:
    go(RealWalk(staffed, verifiers, seed(3)), 20)
