"""How fast is an optimizer step, beside the `speculators` trainer's on the same model, hidden states and dtype?

pytest -m benchmark --timeout=0 -s tests/benchmarks/test_step.py

Both trainers stay loaded and step in turns, so that whatever else the machine does meets both; each has a process of its own, so that
its peak memory is its own. DRAFTLINE_PRECISION=bf16 takes bf16 products instead of the processor's best.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from stages.processor import multiplies_bf16
from tests.benchmarks.step_worker import Case

pytestmark = pytest.mark.benchmark

PRECISION = os.environ.get("DRAFTLINE_PRECISION", "bf16" if multiplies_bf16() else "fp32")
TURNS = 5


class Worker:
    """A trainer that makes steps when told to."""

    def __init__(self, trainer: str, case: Case, directory: Path) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.step_worker", trainer, json.dumps(asdict(case)), str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def steps(self, count: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the trainer ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def workers(case: Case, directory: Path, *trainers: str) -> Iterator[list[Worker]]:
    """Each warmed up by one step."""
    started = [Worker(trainer, case, directory / str(case.vocab)) for trainer in trainers]
    try:
        # One after another: the first writes the verifier's ends.
        for worker in started:
            worker.steps(1)
        yield started
    finally:
        for worker in started:
            worker.end()


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} … {max(values):.2f})"


@pytest.mark.parametrize(("anchors", "lead", "memory"), [(64, 3.0, 0.5), (256, 5.0, 0.5)])
def test_a_step_beside_the_reference_trainers(anchors: int, lead: float, memory: float, tmp_path: Path) -> None:
    """Slots per second, peak memory, and what the step's matrix products alone would take."""
    pytest.importorskip("speculators", reason="test-only dependency")
    case = Case(anchors=anchors, precision=PRECISION)
    with workers(case, tmp_path, "ours", "reference", "products") as (ours, reference, products):
        turns = [[worker.steps(1) for worker in (ours, reference, products)] for _ in range(TURNS)]
    seconds = [[statistics.mean(answer["seconds"]) for answer in turn] for turn in turns]
    ratios = [theirs / mine for mine, theirs, _ in seconds]
    shares = [alone / mine for mine, _, alone in seconds]
    peaks = [turns[-1][i]["peak_bytes"] for i in (0, 1)]
    print(f"\n{anchors} anchors, length {case.length}, V = {case.vocab}, {PRECISION}, {os.cpu_count()} cores, {TURNS} turns: median (least … most)")
    print(f"slots/s: ours {spread([case.slots / s[0] for s in seconds])}, reference {spread([case.slots / s[1] for s in seconds])}, ratio {spread(ratios)}")
    print(f"peak memory: ours {peaks[0] / 1e9:.2f} GB, reference {peaks[1] / 1e9:.2f} GB, ratio {peaks[0] / peaks[1]:.2f}")
    print(f"the products alone: {spread(shares)} of our step")
    # Products in fp32 are most of either trainer's step: no loss code can be faster than they are alone.
    attainable = statistics.median(theirs / alone for _, theirs, alone in seconds)
    print(f"no step with these products can be more than {attainable:.2f} times as fast as the reference")
    assert statistics.median(ratios) >= min(lead, 0.7 * attainable)
    assert peaks[0] / peaks[1] <= memory
    assert statistics.median(shares) >= 0.5


def test_cost_is_linear_in_slots(tmp_path: Path) -> None:
    """One number varied at a time; a slot never costs more than a quarter more at the large end than at the small one."""
    cases = {
        "anchors": [Case(anchors=anchors, precision=PRECISION) for anchors in (64, 128, 256, 512)],
        "length": [Case(length=length, precision=PRECISION) for length in (512, 1024, 2048, 4096)],
        "vocabulary": [Case(vocab=vocab, precision=PRECISION) for vocab in (8192, 32768, 49152, 131072)],
    }
    print(f"\n{PRECISION}, {os.cpu_count()} cores, 3 steps each: slots/s, peak GB")
    per_slot: dict[str, list[float]] = {}
    for name, row in cases.items():
        for case in row:
            with workers(case, tmp_path, "ours") as (worker,):
                answer = worker.steps(3)
            seconds = statistics.median(answer["seconds"])
            per_slot.setdefault(name, []).append(seconds / case.slots)
            varied = {"anchors": case.anchors, "length": case.length, "vocabulary": case.vocab}[name]
            print(f"{name:<11}{varied:>7}{case.slots / seconds:>9.0f}{answer['peak_bytes'] / 1e9:>7.2f}", flush=True)
    assert per_slot["anchors"][-1] <= 1.25 * per_slot["anchors"][0]
