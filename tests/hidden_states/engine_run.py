"""Run the extracting engine over several batches in a process of its own.

    python -m tests.hidden_states.engine_run JOB.json OUT.safetensors

The job: {"plan", "model", "spool", "kv_cache_bytes", "batches": [[[id, token ids], …], …]}. The output holds, for each
sample, `<batch>/<id>/hidden_states` and `<batch>/<id>/token_ids`; OUT.json what is said to an engine with prefix
caching, and to one whose cache is too small.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

from stages.environment import prepare_environment
from stages.hidden_states.format import HiddenSample, Plan
from stages.hidden_states.launch import ExtractionError, Extractor
from stages.hidden_states.stores import FileStore
from tests.hidden_states.samples import make_arguments
from tests.paths import REPOSITORY

Batch = list[tuple[str, list[int]]]


@dataclass(frozen=True)
class EngineRun:
    """For each batch, id → sample; and the errors of engines that must not start."""

    batches: list[dict[str, HiddenSample]]
    prefix_caching: str
    small_cache: str


def run_engine(folder: Path, plan: Plan, model: Path, batches: list[Batch], kv_cache_bytes: int = 1 << 26) -> EngineRun:
    """Extract `batches` one after the other with one engine."""
    job, out, spool = folder / "job.json", folder / "out.safetensors", folder / "spool"
    job.write_text(json.dumps({"plan": plan.to_json(), "model": str(model), "spool": str(spool), "kv_cache_bytes": kv_cache_bytes, "batches": batches}))
    command = [sys.executable, "-m", "tests.hidden_states.engine_run", str(job), str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not FileStore(spool).held(), "the spool is empty once every sample was taken"
    tensors = load_file(out)
    extracted = [
        {sample: HiddenSample(sample, tensors[f"{index}/{sample}/token_ids"], tensors[f"{index}/{sample}/hidden_states"]) for sample, _ in batch}
        for index, batch in enumerate(batches)
    ]
    return EngineRun(extracted, **json.loads(out.with_suffix(".json").read_text()))


def refuse_prefix_caching(arguments: dict[str, Any]) -> str:
    """What the connector says when an engine's configuration, otherwise ours, has prefix caching on."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs

    from stages.hidden_states.connector import DraftlineHiddenStatesConnector

    config = EngineArgs(**(arguments | {"enable_prefix_caching": True})).create_engine_config()
    try:
        DraftlineHiddenStatesConnector(config, KVConnectorRole.SCHEDULER, cast(Any, None))
    except ValueError as error:
        return str(error)
    return ""


def main(job_path: str, out: str) -> None:
    job = json.loads(Path(job_path).read_text())
    plan, model, spool = Plan.from_json(job["plan"]), Path(job["model"]), Path(job["spool"])
    prepare_environment(str(model))
    errors = {"prefix_caching": refuse_prefix_caching(make_arguments(plan, model, spool, job["kv_cache_bytes"]))}
    tensors: dict[str, torch.Tensor] = {}
    with Extractor(plan, model, spool, job["kv_cache_bytes"]) as extractor:
        for index, batch in enumerate(job["batches"]):
            for sample in extractor.extract([(name, tokens) for name, tokens in batch]):
                assert isinstance(sample, HiddenSample), sample
                tensors[f"{index}/{sample.id}/hidden_states"] = sample.hidden_states
                tensors[f"{index}/{sample.id}/token_ids"] = sample.token_ids
    try:
        Extractor(plan, model, spool, kv_cache_bytes=1 << 20).close()
    except ExtractionError as error:
        errors["small_cache"] = str(error)
    save_file(tensors, out)
    Path(out).with_suffix(".json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(*sys.argv[1:])
