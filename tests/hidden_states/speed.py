"""One engine that prefills the same samples each time a line comes on stdin, and answers with the seconds it took.

    python -m tests.hidden_states.speed plain|dump JOB.json

`plain` only prefills; `dump` also takes the hidden states and writes a shard.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.environment import prepare_environment
from stages.hidden_states.format import HiddenSample, Plan
from stages.hidden_states.launch import Extractor
from stages.hidden_states.shards import ShardWriter
from tests.hidden_states.samples import make_arguments

KV_CACHE_BYTES = 1 << 30
MARK = "answer: "
"""Starts our lines: vLLM prints to stdout too."""


def plain(plan: Plan, model: Path, samples: list[tuple[str, list[int]]], folder: Path) -> Callable[[], None]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = make_arguments(plan, model, folder, KV_CACHE_BYTES)
    del arguments["speculative_config"], arguments["kv_transfer_config"]
    engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
    parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)

    def run() -> None:
        for position, (_, tokens) in enumerate(samples):
            engine.add_request(str(position), {"prompt_token_ids": tokens}, parameters)
        while engine.has_unfinished_requests():
            engine.step()

    return run


def dump(plan: Plan, model: Path, samples: list[tuple[str, list[int]]], folder: Path) -> Callable[[], None]:
    extractor = Extractor(plan, model, folder / "spool", KV_CACHE_BYTES)

    def run() -> None:
        shutil.rmtree(folder / "dump", ignore_errors=True)
        extracted = [sample for sample in extractor.extract(samples) if isinstance(sample, HiddenSample)]
        assert len(extracted) == len(samples)
        ShardWriter(folder / "dump", plan).write(0, extracted)

    return run


def main(kind: str, job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    prepare_environment(job["model"])
    samples = [(name, tokens) for name, tokens in job["samples"]]
    run = {"plain": plain, "dump": dump}[kind](Plan.from_json(job["plan"]), Path(job["model"]), samples, Path(job_path).parent)
    run()  # the first pass allocates
    print(f"{MARK}ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        run()
        print(f"{MARK}{time.perf_counter() - started}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
