"""The trainer of the `speculators` package, driven on a CPU: its model, its loss, its anchors, in a plain loop.

Optimizers are built by its own code; initial weights, sequences and anchors of a step are ours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from stages.pairing.identity import read_identity
from stages.pairing.store import verifier_directory
from stages.params import Params
from stages.train.data import TrainingSet, sample_order
from tests.benchmarks.reference_step import batch, load_model, loss_arguments, take_step
from tests.benchmarks.variants import export, new_drafter

WARMUP = 0.04


@dataclass(frozen=True)
class Recipe:
    """How the reference trains. Its own defaults are `muon` and the verifier's whole vocabulary; the demo reduces ours."""

    optimizer: Literal["muon", "adamw"]
    whole_vocabulary: bool

    def __str__(self) -> str:
        return f"{self.optimizer}, {'whole' if self.whole_vocabulary else 'reduced'} vocabulary"


def build(directory: Path, params: Params, recipe: Recipe) -> tuple[Any, TrainingSet]:
    """Its model with our initial weights."""
    drafter, data = new_drafter(params, recipe.whole_vocabulary)
    initial = export(directory / "initial", drafter.config, drafter.state_dict(), data.draft_ids, str(verifier_directory(read_identity())))
    return load_model(initial), data


def train_reference(directory: Path, params: Params, seconds: float, recipe: Recipe) -> tuple[Path, int]:
    """Train for `seconds` of wall clock; the linear schedule runs over that time.

    Returns:
        A checkpoint and the number of steps made.
    """
    from speculators.train.config.schema import OptimizerArgs
    from speculators.train.optimizers import build_optimizers

    model, data = build(directory, params, recipe)
    settings = params.train
    arguments = loss_arguments(model, settings, settings.anchors_per_sequence * settings.sequences_per_step)
    chosen = OptimizerArgs(optimizer=recipe.optimizer)
    optimizers = build_optimizers(model, chosen.model_copy(update={"muon_lr": chosen.lr}))
    order = sample_order(len(data), settings.sequences_per_step, 10**5, settings.seed)
    start = time.monotonic()
    steps = 0
    while (elapsed := time.monotonic() - start) < seconds:
        done = elapsed / seconds
        rate = chosen.lr * min(1.0, (done + 1e-3) / WARMUP, (1 - done) / (1 - WARMUP))
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = rate
        take_step(model, batch(data, order[steps], torch.bfloat16), arguments, optimizers, settings)
        steps += 1
    drafter, _ = new_drafter(params, recipe.whole_vocabulary)
    return export(directory / "checkpoint", drafter.config, model.state_dict(), data.draft_ids, params.verifier.name), steps
