"""Made-up plans and samples of hidden states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stages.hidden_states.envelope import Origin
from stages.hidden_states.format import HiddenSample, Plan
from stages.hidden_states.launch import EXTRA_POSITIONS, engine_arguments
from stages.hidden_states.producer import ProducerConfig
from stages.hidden_states.publisher import Limits, Publisher
from stages.hidden_states.shards import ShardWriter
from stages.hidden_states.stores import Store
from stages.hidden_states.transport import Transport


def make_plan(lengths: Sequence[int], **changed: Any) -> Plan:
    """A plan for samples of these lengths: two tapped layers and the last one, hidden size 4."""
    fields: dict[str, Any] = {
        "verifier": "v" * 64,
        "layer_ids": (1, 3, 6),
        "hidden_size": 4,
        "dtype": "float32",
        "max_seq_len": max(lengths, default=1),
        "data": "d" * 64,
        "samples": len(lengths),
        "tokens": sum(lengths),
        "samples_per_shard": 4,
    }
    return Plan(**(fields | changed))


def make_samples(plan: Plan, lengths: Sequence[int], seed: int = 0) -> list[HiddenSample]:
    """Random samples `sample-0`, `sample-1`, … in the stored form."""
    generator = torch.Generator().manual_seed(seed)
    ids = random.Random(seed)
    return [
        HiddenSample(
            f"sample-{index}",
            torch.tensor([ids.randrange(100_000) for _ in range(length)], dtype=torch.int64),
            torch.randn(length, len(plan.stored_ids), plan.hidden_size, generator=generator).to(getattr(torch, plan.dtype)),
        )
        for index, length in enumerate(lengths)
    ]


def write_shards(directory: Path, plan: Plan, samples: list[HiddenSample], shards: int | None = None) -> ShardWriter:
    """Write the first `shards` shards (all by default)."""
    writer = ShardWriter(directory, plan)
    for index in range(plan.shards if shards is None else shards):
        writer.write(index, [samples[position] for position in plan.shard_range(index)])
    return writer


def make_arguments(plan: Plan, model: Path, spool: Path, kv_cache_bytes: int, trust_remote_code: bool = False) -> dict[str, Any]:
    """The arguments of an engine that extracts by `plan` into `spool`."""
    producer = ProducerConfig(transport=Transport(spool=str(spool)), verifier=plan.verifier)
    return engine_arguments(
        model, plan.dtype, list(plan.stored_ids), plan.max_seq_len + EXTRA_POSITIONS, plan.max_num_seqs, producer, kv_cache_bytes, trust_remote_code
    )


def make_origin(dtype: str = "float32", **changed: Any) -> Origin:
    """What samples of two layers of verifier vvv… say of themselves."""
    return Origin(**({"verifier": "v" * 64, "layer_ids": [1, 6], "dtype": dtype} | changed))


def make_publisher(store: Store, origin: Origin | None = None, **limits: Any) -> Publisher:
    """A producer's end of `store`, without a limit unless one is given."""
    return Publisher(store, origin or make_origin(), Limits(**limits))
