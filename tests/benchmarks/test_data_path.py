"""The data path at scale: half a million conversations to tokens, and the identity of a verifier of 100 GB.

pytest -m benchmark --timeout=0 -s tests/benchmarks/test_data_path.py
DATA_PATH_ROWS=5000,20000 DATA_PATH_BYTES=200000000 pytest …        smaller, to see whether it works

Other work on the machine slows the wall clock, and processor time too where cores are shared: both are printed.
Memory is the sum over all processes of what each holds alone and its part of what they share (PSS).
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from stages.pairing.identity import compute_identity
from stages.pairing.signatures import DigestCache
from tests.benchmarks.conversations import write_conversations
from tests.pairing.edits import copy_model, sparse_shard
from tests.paths import REPOSITORY
from tests.prepare.project import make_project

pytestmark = pytest.mark.benchmark

ROWS = tuple(int(count) for count in os.environ.get("DATA_PATH_ROWS", "50000,500000").split(","))
HASHED_BYTES = int(os.environ.get("DATA_PATH_BYTES", 2_000_000_000))
ROUNDS = 5
ROWS_PER_SECOND = 5000
GROWTH_PER_ROW, CACHES = 250, 1 << 26
"""Bytes of memory that a row may cost (its numbers in the index, twice while they are sorted), and what caches may still fill up by."""


@dataclass(frozen=True)
class Cost:
    """What a command took: seconds on the clock, seconds of all processes' processor time, the peak of their memory in bytes."""

    wall: float
    cpu: float
    memory: int


def watched(argv: list[str], cwd: Path) -> Cost:
    """Run a command, looking at its whole tree of processes every other second."""
    start = time.perf_counter()
    cpu: dict[int, float] = {}
    peak = 0
    with (cwd / "log").open("w") as log, subprocess.Popen(argv, cwd=cwd, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            memory = 0
            for member in [root, *root.children(recursive=True)]:
                try:
                    times = member.cpu_times()
                    cpu[member.pid] = times.user + times.system
                    memory += member.memory_full_info().pss
                except psutil.Error:
                    continue  # it has ended
            peak = max(peak, memory)
            time.sleep(2.0)  # looking takes processor time, too
    assert process.returncode == 0, (cwd / "log").read_text()[-2000:]
    return Cost(time.perf_counter() - start, sum(cpu.values()), peak)


def test_prepare_streams(real_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What starting costs is taken out of the rates by comparing two sizes."""
    costs = []
    for count in ROWS:
        (tmp_path / str(count)).mkdir()
        monkeypatch.chdir(tmp_path / str(count))
        write_conversations(Path("rows.jsonl"), count)
        make_project(real_verifier, {"chats.jsonl": b""}, max_seq_len=1024, engine={"max_model_len": 2048})
        Path("rows.jsonl").replace("chats.jsonl")
        cost = watched([sys.executable, "-m", "stages.prepare"], Path.cwd())
        print(f"\n{count} conversations: {cost.wall:.1f} s, {cost.cpu:.1f} s of processor time, {cost.memory / 1e6:.0f} MB at most")
        shutil.rmtree("outputs/prepare")
        costs.append(cost)
    (few, many), (small, large) = costs, ROWS
    rows, cores = large - small, min(2, len(os.sched_getaffinity(0)))
    by_clock, by_processor = rows / (many.wall - few.wall), cores * rows / (many.cpu - few.cpu)
    growth = (many.memory - few.memory) / rows
    print(f"beyond the first {small}: {by_clock:.0f} rows/s on the clock, {by_processor:.0f} on {cores} free cores (processor time), {growth:.0f} bytes a row")
    assert many.memory - few.memory <= GROWTH_PER_ROW * rows + CACHES
    assert max(by_clock, by_processor) >= ROWS_PER_SECOND


def test_an_unchanged_100_gb_verifier_is_recognised_at_once(tiny_verifier: Path, tmp_path: Path) -> None:
    model = copy_model(tiny_verifier, tmp_path / "model")
    (model / "model.safetensors").unlink()
    cache = DigestCache(tmp_path / "digests.json")
    for number in range(1, 21):
        shard = model / f"model-{number:05d}-of-00020.safetensors"
        sparse_shard(shard, 5_000_000_000)
        cache.remember(shard, "raw", f"{number:064x}")
    cache.save()
    compute_identity(model, cache.path)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        compute_identity(model, cache.path)
        seconds.append(time.perf_counter() - start)
    program = "import sys; from pathlib import Path; from stages.pairing.identity import compute_identity; compute_identity(*map(Path, sys.argv[1:]))"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program, str(model), str(cache.path)], check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    whole = time.perf_counter() - start
    print(f"\nunchanged 100 GB in 20 files: {statistics.median(seconds) * 1000:.1f} ms (at most {max(seconds) * 1000:.1f}), a new process {whole:.2f} s")
    assert statistics.median(seconds) < 1.0


@pytest.mark.parametrize("files", [1, 4])
def test_weights_are_hashed_as_fast_as_sha256sum_hashes_them(files: int, tmp_path: Path) -> None:
    """In turns. Several files are hashed on several cores; sha256sum takes one after the other."""
    block = os.urandom(1 << 24)
    paths = [tmp_path / f"{number}.safetensors" for number in range(files)]
    for path in paths:
        with path.open("wb") as stream:
            for _ in range(HASHED_BYTES // files // len(block)):
                stream.write(block)
    time.sleep(0.2)
    walls, cpus = [], []
    for turn in range(ROUNDS + 1):
        theirs = _spent(lambda: subprocess.run(["sha256sum", *map(str, paths)], check=True, stdout=subprocess.DEVNULL))
        ours = _spent(lambda: DigestCache(None).digests([(path, "raw") for path in paths]))
        if turn:  # the first one fills the page cache
            walls.append(theirs[0] / ours[0])
            cpus.append(theirs[1] / ours[1])
    for what, ratios in (("clock", walls), ("processor time", cpus)):
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"\n{files} file(s), {HASHED_BYTES / 1e9:.1f} GB: speed over that of sha256sum, by {what}: {spread}", end="")
    assert max(statistics.median(walls), statistics.median(cpus)) >= 0.8


def _spent(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock and of processor time, children included."""

    def used() -> float:
        return sum(os.times()[:4])

    wall, cpu = time.perf_counter(), used()
    work()
    return time.perf_counter() - wall, used() - cpu
