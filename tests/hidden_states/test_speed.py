"""Taking the hidden states out costs little beside computing them."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hidden_states.samples import make_plan
from tests.hidden_states.speed import MARK
from tests.paths import REPOSITORY

ROUNDS = 7


def answer(engine: subprocess.Popen[str]) -> str:
    """The engine's next answer; fails where it has ended."""
    assert engine.stdout is not None
    for line in engine.stdout:
        if line.startswith(MARK):
            return line.removeprefix(MARK)
    raise AssertionError(f"the engine ended with status {engine.wait()}")


@pytest.mark.benchmark
def test_a_dump_reaches_nine_tenths_of_plain_prefill(real_verifier: Path, tmp_path: Path) -> None:
    """30 samples of about 250 tokens of the real verifier, plain and dumping in turns, median of the paired ratios."""
    draw = random.Random(0)
    samples = [(f"s{index}", [draw.randrange(20, 40_000) for _ in range(draw.randrange(180, 320))]) for index in range(30)]
    lengths = [len(tokens) for _, tokens in samples]
    plan = make_plan(lengths, layer_ids=(2, 8, 15, 22, 28, 30), hidden_size=576, dtype="bfloat16", samples_per_shard=30)
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"plan": plan.to_json(), "model": str(real_verifier), "samples": samples}))
    engines = {
        kind: subprocess.Popen(
            [sys.executable, "-m", "tests.hidden_states.speed", kind, str(job)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in ("plain", "dump")
    }
    try:
        seconds: dict[str, list[float]] = {"plain": [], "dump": []}
        for engine in engines.values():
            answer(engine)
        for _ in range(ROUNDS):
            for kind, engine in engines.items():
                assert engine.stdin is not None
                engine.stdin.write("go\n")
                engine.stdin.flush()
                seconds[kind].append(float(answer(engine)))
    finally:
        for engine in engines.values():
            engine.kill()
            engine.communicate()
    ratios = [plain / dump for plain, dump in zip(seconds["plain"], seconds["dump"], strict=True)]
    speeds = {kind: sum(lengths) / statistics.median(values) for kind, values in seconds.items()}
    print(
        f"plain prefill {speeds['plain']:.0f} tokens/s, dump {speeds['dump']:.0f} tokens/s, median of paired ratios {statistics.median(ratios):.3f} of {ratios}"
    )
    assert statistics.median(ratios) >= 0.9
