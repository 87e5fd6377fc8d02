"""What streaming costs: against plain prefill, and a whole online run against an offline one.

cd <where `make demo` ran>; pytest -m benchmark --timeout=0 -s tests/benchmarks/test_stream.py

Nothing else may run on the machine. Timings are compared in turns within one run.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from ruamel.yaml import YAML

from stages.artifacts import sha256_file
from stages.dataset import read_split
from stages.hidden_states.engines import Engines
from stages.hidden_states.format import Plan
from stages.hidden_states.launch import EXTRA_POSITIONS, engine_arguments
from stages.hidden_states.producer import ProducerConfig
from stages.hidden_states.server import extracting_server, mooncake_master, server_command
from stages.hidden_states.spool import SHARED_MEMORY, SPOOL_PREFIX, memory_spool
from stages.hidden_states.stream import Pace, Stream
from stages.hidden_states.transport import Transport, open_store
from stages.servers import free_port
from tests.benchmarks.variants import need_outputs
from tests.hidden_states.samples import make_plan

pytestmark = pytest.mark.benchmark

ROUNDS = 5
BUDGET = 1 << 28
REQUESTS = 16
SPIN_SECONDS = 2.0
"""A vLLM worker looks for its next message without a pause for a second; nothing is timed while another server's does."""


@contextmanager
def server(model: Path, plan: Plan, producer: ProducerConfig, folder: Path, extracting: bool) -> Iterator[str]:
    """The same vLLM with or without extraction; its URL."""
    port = free_port()
    arguments = engine_arguments(model, plan.dtype, list(plan.stored_ids), plan.max_seq_len + EXTRA_POSITIONS, plan.max_num_seqs, producer, 1 << 30)
    argv, env = server_command(arguments, "127.0.0.1", port)
    if not extracting:
        for flag in ("--speculative-config", "--kv-transfer-config"):
            place = argv.index(flag)
            del argv[place : place + 2]
    # Left alone, vLLM keeps one of two cores free of a plain engine's threads, and none of a speculative one's.
    env |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    with extracting_server(argv, env, port, 300, folder / f"server-{extracting}.log"):
        yield f"http://127.0.0.1:{port}"


def prefill(url: str, samples: list[tuple[str, list[int]]]) -> float:
    """Seconds that a server takes to prefill all samples, `REQUESTS` in flight."""
    with httpx.Client(timeout=120, trust_env=False) as client:

        def ask(tokens: list[int]) -> None:
            body = {"model": "verifier", "prompt": [tokens], "max_tokens": 1, "temperature": 0.0}
            client.post(f"{url}/v1/completions", json=body).raise_for_status()

        started = time.monotonic()
        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(ask, [tokens for _, tokens in samples]))
        return time.monotonic() - started


def stream(url: str, samples: list[tuple[str, list[int]]], plan: Plan, transport: Transport) -> float:
    """Seconds to have all samples' hidden states in this process, checked and acknowledged."""
    store = open_store(transport)
    pace = Pace(ahead=32, budget_bytes=BUDGET, requests=REQUESTS, timeout_seconds=60, ttl_seconds=120)
    with Stream(plan, dict(samples), store, Engines([url]), pace) as source:
        started = time.monotonic()
        source.expect([sample for sample, _ in samples])
        for sample, tokens in samples:
            source.read(sample, tokens)
        seconds = time.monotonic() - started
    store.close()
    return seconds


@pytest.mark.parametrize("kind", ["file", "mooncake"])
def test_streaming_reaches_nine_tenths_of_plain_prefill(kind: str, real_verifier: Path, tmp_path: Path) -> None:
    """60 samples of about 250 tokens of the real verifier over HTTP, with and without extraction in turns: median of the paired ratios."""
    draw = random.Random(0)
    samples = [(f"s{index}", [draw.randrange(20, 40_000) for _ in range(draw.randrange(180, 320))]) for index in range(60)]
    lengths = [len(tokens) for _, tokens in samples]
    plan = make_plan(lengths, layer_ids=(2, 8, 15, 22, 28, 30), hidden_size=576, dtype="bfloat16")
    with ExitStack() as stack:
        if kind == "file":
            transport = Transport(kind="file", spool=str(stack.enter_context(memory_spool(BUDGET))))
        else:
            transport = Transport(kind="mooncake", master=stack.enter_context(mooncake_master(tmp_path / "master.log"))[0])
        producer = ProducerConfig(transport=transport, verifier=plan.verifier, budget_bytes=BUDGET, ttl_seconds=120, wait_seconds=20)
        plain = stack.enter_context(server(real_verifier, plan, producer, tmp_path, extracting=False))
        extracting = stack.enter_context(server(real_verifier, plan, producer, tmp_path, extracting=True))
        prefill(plain, samples)
        stream(extracting, samples, plan, transport)
        pairs = []
        for _ in range(ROUNDS):
            time.sleep(SPIN_SECONDS)
            without = prefill(plain, samples)
            time.sleep(SPIN_SECONDS)
            pairs.append((without, stream(extracting, samples, plan, transport)))
    ratios = sorted(without / with_it for without, with_it in pairs)
    speeds = [sum(lengths) / statistics.median(seconds) for seconds in zip(*pairs, strict=True)]
    print(f"\n{kind}: plain prefill {speeds[0]:.0f} tokens/s, streamed {speeds[1]:.0f}; ratios {' '.join(f'{ratio:.3f}' for ratio in ratios)}")
    assert statistics.median(ratios) >= 0.9


@dataclass
class Watch:
    """Samples, while a command runs: bytes in its spools, memory of the process itself (not of its children), bytes its tree wrote to disks."""

    transport: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)


def run_watched(words: list[str], folder: Path) -> tuple[float, Watch]:
    """Wall clock of a command that must succeed."""
    watch = Watch()
    started = time.monotonic()
    with (folder / "run.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *words], cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"TQDM_MININTERVAL": "5"})
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            try:
                held = sum(entry.stat().st_size for spool in SHARED_MEMORY.glob(f"{SPOOL_PREFIX}*") for entry in spool.iterdir())
                watch.transport.append(held)
                watch.memory.append(psutil.Process(process.pid).memory_info().rss)
                for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                    watch.written[member.pid] = member.io_counters().write_bytes
            except (FileNotFoundError, psutil.Error):
                continue

    looking = threading.Thread(target=look)
    looking.start()
    status = process.wait()
    seconds = time.monotonic() - started
    done.set()
    looking.join()
    assert status == 0, (folder / "run.log").read_text(errors="replace")[-2000:]
    return seconds, watch


def workspace(folder: Path, mode: str, epochs: int) -> Path:
    """A copy of the finished demo's inputs of extraction and training, in `mode`, for `epochs` epochs."""
    for part in ("verifier", "prepare"):
        (folder / "outputs").mkdir(parents=True, exist_ok=True)
        shutil.copytree(Path("outputs") / part, folder / "outputs" / part, symlinks=True)
    yaml = YAML()
    params = yaml.load(Path("params.yaml").read_text(encoding="utf-8"))
    params["extraction"]["mode"] = mode
    params["extraction"]["budget_bytes"] = BUDGET
    steps = epochs * len(read_split(Path("outputs/prepare"), "train")) // params["train"]["sequences_per_step"]
    params["train"].update(steps=steps, checkpoint_every=steps, validation_every=10 * steps)
    with (folder / "params.yaml").open("w", encoding="utf-8") as stream:
        yaml.dump(params, stream)
    return folder


@pytest.mark.parametrize("mode", ["online", "hybrid"])
def test_a_streamed_run_takes_at_most_a_tenth_longer_than_dump_and_train(mode: str, tmp_path: Path) -> None:
    """The demo's data, its real verifier and trainer: `extract` + `train`, offline and streamed in turns.

    Online over one epoch, because every further one is prefilled again; hybrid over two, the second out of its cache.
    """
    need_outputs()
    epochs = 1 if mode == "online" else 2
    ratios, digests = [], set()
    for turn in range(2):
        totals = {}
        for kind in ("offline", mode):
            folder = workspace(tmp_path / f"{kind}-{turn}", kind, epochs)
            first, _ = run_watched(["-m", "stages.extract"], folder)
            second, watch = run_watched(["-m", "stages.train"], folder)
            totals[kind] = first + second
            print(f"\n{kind}: extract {first:.0f} s, train {second:.0f} s, written by their processes {sum(watch.written.values()) / 1e6:.1f} MB")
            if kind != "offline":
                digests.add(sha256_file(folder / "outputs" / "train" / "drafter" / "model.safetensors"))
                # Half a run goes by until the allocator has its fill: samples differ in length. Offline it is the same.
                half = len(watch.memory) // 2
                early, late = max(watch.memory[half : half + half // 2]), max(watch.memory[half + half // 2 :])
                print(f"transport: at most {max(watch.transport) / 1e6:.1f} MB of {BUDGET / 1e6:.1f}; trainer: {early / 1e6:.0f} MB, later {late / 1e6:.0f}")
                assert max(watch.transport) <= BUDGET
                assert late <= 1.05 * early
                kept = {path.name for path in (folder / "outputs" / "extract").rglob("*") if path.is_file() and path.stat().st_size}
                assert kept == {"manifest.json"}
                assert (folder / "outputs" / "train" / "cache").exists() == (mode == "hybrid")
        ratios.append(totals[mode] / totals["offline"])
    print(f"{mode} against offline, wall clock: {' '.join(f'{ratio:.3f}' for ratio in ratios)}")
    assert statistics.median(ratios) <= 1.1
