"""The trainer of the `speculators` package, driven on a CPU: its model, its loss, its anchors, in a plain loop.

Its defaults fail on a CPU (flex attention has no backward there, the fused loss needs Triton), so attention is `sdpa` and the
loss `eager`: what its own documentation offers instead. Optimizers are built by its own code; initial weights, sequences and
anchors of a step are ours.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from stages.pairing.identity import read_identity
from stages.pairing.store import verifier_directory
from stages.params import Params
from stages.train.data import TrainingSet, sample_order
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
    from speculators.models.dspark import DSparkDraftModel
    from speculators.models.dspark.config import DSparkSpeculatorConfig

    drafter, data = new_drafter(params, recipe.whole_vocabulary)
    initial = export(directory / "initial", drafter.config, drafter.state_dict(), data.draft_ids, str(verifier_directory(read_identity())))
    config = DSparkSpeculatorConfig.from_pretrained(initial)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = DSparkDraftModel.from_pretrained(initial, config=config, dtype=torch.float32)
    model.load_verifier_weights()
    return model.train(), data


def batch(data: TrainingSet, indices: list[int]) -> dict[str, torch.Tensor]:
    """Sequences packed the way its collator does: one row, a document id per sequence."""
    hidden, last, ids, masks, documents, positions = [], [], [], [], [], []
    for document, index in enumerate(indices):
        sample = data.samples[index]
        states = data.states.read(sample.id, sample.input_ids).hidden_states.to(torch.bfloat16)
        hidden.append(states[:, :-1].flatten(1))
        last.append(states[:, -1])
        ids.append(torch.tensor(sample.input_ids))
        masks.append(torch.tensor(sample.loss_mask))
        documents.append(torch.full((len(states),), document))
        positions.append(torch.arange(len(states)))
    return {
        "hidden_states": torch.cat(hidden)[None],
        "verifier_last_hidden_states": torch.cat(last)[None],
        "input_ids": torch.cat(ids)[None],
        "loss_mask": torch.cat(masks)[None],
        "document_ids": torch.cat(documents)[None],
        "position_ids": torch.cat(positions)[None],
    }


def train_reference(directory: Path, params: Params, seconds: float, recipe: Recipe) -> tuple[Path, int]:
    """Train for `seconds` of wall clock; the linear schedule runs over that time.

    Returns:
        A checkpoint and the number of steps made.
    """
    from speculators.train.config.schema import OptimizerArgs
    from speculators.train.optimizers import build_optimizers

    model, data = build(directory, params, recipe)
    settings = params.train
    losses = {"loss_fn": json.dumps({"ce": settings.loss.ce, "tv": settings.loss.tv}), "loss_implementation": "eager"}
    arguments, _ = type(model).get_trainer_kwargs(
        **losses, max_anchors=settings.anchors_per_sequence * settings.sequences_per_step, dflash_decay_gamma=settings.decay_gamma
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
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
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, _ = model(**batch(data, order[steps]), **arguments)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings.grad_clip)
        for each in optimizers:
            each.step()
        steps += 1
    drafter, _ = new_drafter(params, recipe.whole_vocabulary)
    return export(directory / "checkpoint", drafter.config, model.state_dict(), data.draft_ids, params.verifier.name), steps
