"""Trainings of several ranks, run in one group of processes, and a workspace whose hidden states no engine has made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from stages.artifacts import read_json
from stages.dataset import TokenSample, read_split
from stages.drafters.model import Drafter
from stages.extract.__main__ import make_plan
from stages.hidden_states.format import HiddenSample, UnusableSampleError
from stages.hidden_states.shards import ShardWriter
from stages.pairing.frozen import FrozenVerifier
from stages.pairing.identity import VerifierIdentity
from stages.params import Train, read_params
from stages.servers import free_port
from stages.train import loop
from stages.train.data import TrainingSet, choose_draft_vocabulary
from stages.train.ranks import ALONE, Ranks, joined
from tests.drafters.shapes import config
from tests.train.material import MemoryDump, Sample, make_material
from tests.train.streaming import set_params
from tests.train.test_loop import SHAPE, quiet, settings

STEPS = 8


@dataclass(frozen=True)
class Case:
    """One training: `stop` ends it in the middle of that step; `work` is where its checkpoints are, its own by default."""

    name: str
    parallel: str = "none"
    changes: tuple[tuple[str, Any], ...] = ()
    stop: int | None = None
    work: str = ""


class Stopped(Exception):  # noqa: N818 - no error
    """A training has got as far as it should."""


@contextmanager
def stopping(case: Case) -> Iterator[None]:
    original, made = loop.step_made, []

    def stop(*arguments: Any) -> None:
        made.append(None)
        if case.stop is not None and len(made) == case.stop:
            raise Stopped
        original(*arguments)

    loop.step_made = stop
    try:
        yield
    except Stopped:
        pass
    finally:
        loop.step_made = original


class HoledDump(MemoryDump):
    """Some of its samples have no states."""

    def read(self, sample: str, expected: list[int] | None = None) -> Sample:
        if sample not in self.states:
            raise UnusableSampleError(sample)
        return super().read(sample, expected)


@cache
def _material(verifier: Path) -> tuple[list[TokenSample], HoledDump, FrozenVerifier]:
    samples, dump, frozen = make_material(verifier, 7)
    states = {}
    for index, sample in enumerate(samples):
        length = 46 - 5 * index
        del sample.input_ids[length:], sample.loss_mask[length:]
        states[sample.id] = dump.states[sample.id][:length]
    del states[samples[2].id]
    return samples, HoledDump(states), frozen


def uneven(verifier: Path) -> tuple[Drafter, TrainingSet]:
    """A drafter and seven samples of different lengths, one without states."""
    samples, dump, frozen = _material(verifier)
    vocab = len(frozen.embedding)
    ids = choose_draft_vocabulary(samples, 300, vocab, [2])
    torch.manual_seed(0)
    return Drafter(config(vocab=vocab, draft_vocab_size=300, **SHAPE), frozen, ids), TrainingSet(samples, dump, frozen, ids, torch.float32)  # type: ignore[arg-type]


def params_of(case: Case) -> Train:
    return settings(**{"steps": STEPS, "checkpoint_every": 2, "sequences_per_step": 3, "grad_clip": 0.5, "validation_every": 3, **dict(case.changes)})


def train_case(folder: Path, verifier: Path, case: Case, ranks: Ranks = ALONE) -> None:
    """The case's losses and final weights go to `folder/<name>.pt`."""
    drafter, data = uneven(verifier)
    made: list[loop.Progress] = []
    with stopping(case):
        made = loop.train(drafter, data, data, params_of(case), folder / (case.work or case.name), quiet, replace(ranks, parallel=case.parallel))
    if ranks.leader:
        losses = {progress.step: progress.loss for progress in made}
        torch.save({"losses": losses, "weights": drafter.state_dict()}, folder / f"{case.name}.pt")


def _rank(rank: int, count: int, port: int, folder: Path, verifier: Path, cases: list[Case]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with joined(settings(ranks=count, parallel="ddp")) as ranks:
        for case in cases:
            train_case(folder, verifier, case, ranks)


def train_cases(folder: Path, verifier: Path, count: int, cases: list[Case]) -> None:
    """Run cases one after another in `count` processes."""
    multiprocessing.spawn(_rank, (count, free_port(), folder, verifier, cases), count)


def result(folder: Path, name: str) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Losses by step, and weights."""
    found = torch.load(folder / f"{name}.pt", weights_only=True)
    return found["losses"], found["weights"]


def write_dump(workspace: Path, wrong: str | None = None, **train: Any) -> None:
    """Random hidden states for the samples of a workspace; those of `wrong` come from other tokens."""
    set_params(workspace, train=train)
    outputs = workspace / "outputs"
    identity = VerifierIdentity.model_validate(read_json(outputs / "verifier" / "identity.json"))
    samples = [sample for split in ("train", "validation") for sample in read_split(outputs / "prepare", split)]
    plan = make_plan(identity, samples, read_params(workspace / "params.yaml").extraction)
    writer = ShardWriter(outputs / "extract" / "dump", plan)
    random = torch.Generator().manual_seed(0)
    for index in range(plan.shards):
        chosen = [samples[place] for place in plan.shard_range(index)]
        states = [torch.randn(len(sample.input_ids), len(plan.stored_ids), plan.hidden_size, generator=random) for sample in chosen]
        tokens = [torch.tensor(sample.input_ids) + (sample.id == wrong) for sample in chosen]
        writer.write(index, [HiddenSample(sample.id, *made) for sample, *made in zip(chosen, tokens, states, strict=True)])
    writer.write_manifest(outputs / "extract" / "manifest.json")
