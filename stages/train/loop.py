"""The optimizer loop: linear warm-up, cosine decay, exact resume.

Step s uses samples, anchors and learning rate that are functions of s alone, so a run that was killed and resumed
gives the weights of an undisturbed one, bit for bit on a CPU with the same number of threads. Ranks and accumulation divide a
step's samples; its loss and gradient stay those of all of them, but for the order of sums.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from stages.errors import DraftlineError
from stages.hidden_states.shards import Dump
from stages.hidden_states.source import expect, step_made, stream_metrics
from stages.hidden_states.stream import StreamError
from stages.params import Train
from stages.train import state
from stages.train.acceleration import accelerate
from stages.train.ahead import made_ahead
from stages.train.data import Batch, TrainingSet, blank_batch, make_batch, sample_order
from stages.train.model_step import objective, validate
from stages.train.objectives import TrainedDrafter, batch_shape, has_confidence
from stages.train.optimizer import make_optimizers
from stages.train.parallel import Step, gather, shared, summing, trained_copy
from stages.train.precision import product_dtype
from stages.train.ranks import ALONE, Ranks
from stages.train.shards import local
from stages.train.shares import share
from stages.train.tracking import Log

LOG_EVERY = 10
CALIBRATION_SAMPLES = 256
"""Validation samples that a confidence head is calibrated on, where there are as many."""


@dataclass(frozen=True)
class Progress:
    """A hook for tests and for the loop's own curve: called after every step."""

    step: int
    loss: float
    learning_rate: float


def learning_rate(step: int, params: Train) -> float:
    """Rate of step `step` (from 0): linear to the peak over the warm-up, then half a cosine to 0."""
    warmup = max(1, round(params.warmup_fraction * params.steps))
    if step < warmup:
        return params.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, params.steps - warmup)
    return params.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_threads(threads: int | None) -> None:
    """Fix the number of threads, so that sums have one order; the ranks of a node share its cores."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def require_finite(made: list[Progress], params: Train, drafter: TrainedDrafter | None = None) -> None:
    """Stop a training that has diverged, before anything of it is written.

    Raises:
        DraftlineError: the loss of a step in `made`, or a weight of `drafter` after the last of them, is not finite.
    """
    what = next((f"the loss of step {progress.step + 1} is {progress.loss}" for progress in made if not math.isfinite(progress.loss)), None)
    if what is None and drafter is not None and not all(bool(local(parameter).isfinite().all()) for parameter in drafter.parameters()):
        what = f"weights are not finite after step {made[-1].step + 1}"
    if what is not None:
        raise _diverged(what, params)


def require_finite_metrics(metrics: dict[str, float], params: Train) -> None:
    """Stop where the last step has made finite weights that nothing can be computed with.

    Raises:
        DraftlineError: a metric of the trained drafter is not finite.
    """
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise _diverged(f"{name} of the validation is {value}", params)


def _diverged(what: str, params: Train) -> DraftlineError:
    return DraftlineError(f"params.yaml: train.learning_rate = {params.learning_rate:g}: training diverged, {what}; lower it")


def reading_order(
    data: TrainingSet, validation: TrainingSet | None, params: Train, order: list[list[int]], start: int, calibrated: bool = False
) -> Iterator[str]:
    """Ids of the samples that a run from step `start` on reads, in order: the final check's included, and the calibration's if there is one."""
    held_out = [sample.id for sample in validation.samples] if validation is not None else []
    checked = held_out[: params.validation_samples]
    for step in range(start, params.steps):
        yield from (data.samples[index].id for index in order[step])
        if (step + 1) % params.validation_every == 0 and step + 1 < params.steps:
            yield from checked
    yield from checked
    if calibrated:
        yield from held_out[:CALIBRATION_SAMPLES]


def backward(step: torch.nn.Module, batches: list[Batch | None], blank: Batch, total: float) -> float:
    """Gradient of this rank's share of a step, summed over the ranks.

    Args:
        batches: the parts of its share; `blank` stands for None, and counts nothing.
        total: sum of the weights of the step's slots, on all ranks.
    Returns:
        The share's loss; the step's is the sum over the ranks.
    """
    out = 0.0
    for place, batch in enumerate(batches):
        with summing(step, last=place == len(batches) - 1):
            loss: Tensor = step(batch or blank) * ((batch.weight if batch else 0.0) / total)
            loss.backward()  # type: ignore[no-untyped-call]
        out += loss.item()
    return out


def train(
    drafter: TrainedDrafter, data: TrainingSet, validation: TrainingSet | None, params: Train, work: Path, log: Log, ranks: Ranks = ALONE
) -> list[Progress]:
    """Train `drafter` in place from the newest checkpoint in `work` (or from its initial weights) to the last step.

    Args:
        ranks: this process among others that call it with the same arguments. Only the leader validates, logs and writes.
    Returns:
        The steps made by this call (one without a usable sample is none).
    Raises:
        DraftlineError: the training has diverged.
        StreamError: the hidden states have ended; the state after the last finished step is saved.
    """
    dtype = product_dtype(params.precision)
    anchors, k = batch_shape(drafter, params.anchors_per_sequence)
    order = [
        share([data.cost(index, anchors, k) for index in indices], indices, ranks.rank, ranks.count, params.accumulation)
        for indices in sample_order(len(data), params.sequences_per_step, params.steps, params.seed)
    ]
    blank = blank_batch(data, len(drafter.config.layer_ids), k)
    trained = trained_copy(drafter, ranks)
    accelerate(trained, params)
    step_module = shared(Step(trained, lambda model, batch: objective(model, data.head, batch, params.loss, dtype).loss), ranks)
    optimizers = make_optimizers(trained, params)
    work.mkdir(parents=True, exist_ok=True)
    start = state.restore(work, trained, optimizers, ranks)
    read = [[index for part in parts for index in part] for parts in order]
    expect(data.states, reading_order(data, validation, params, read, start, has_confidence(drafter)))

    def make_batches(step: int) -> list[Batch | None]:
        return [make_batch(data, part, anchors, k, params.decay_gamma, ("train", params.seed, step)) for part in order[step]]

    steps = range(start, params.steps)
    # A stream reads ahead by itself, and counts on samples being read in the order of the steps and validations.
    prepared = made_ahead(make_batches, steps) if isinstance(data.states, Dump) else map(make_batches, steps)
    made: list[Progress] = []
    done = start
    drafter.train()
    trained.train()
    try:
        with tqdm(total=params.steps, initial=start, desc="train", unit="step", mininterval=2.0, disable=not ranks.leader) as bar:
            for step, batches in zip(steps, prepared, strict=True):
                rate = learning_rate(step, params)
                for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                    group["lr"] = rate
                total, slots = ranks.sums(sum(batch.weight for batch in batches if batch), sum(len(batch.positions) for batch in batches if batch))
                if total:
                    began = time.monotonic()
                    trained.zero_grad(set_to_none=True)
                    (loss,) = ranks.sums(backward(step_module, batches, blank, total))
                    torch.nn.utils.clip_grad_norm_(trained.parameters(), params.grad_clip)
                    for optimizer in optimizers:
                        optimizer.step()
                    made.append(Progress(step, loss, rate))
                bar.update()
                done = step + 1
                if total:
                    step_made(data.states, time.monotonic() - began)
                recent = made[-LOG_EVERY:]
                if recent and (done % LOG_EVERY == 0 or done == params.steps):
                    require_finite(recent, params)
                    values = {"loss": sum(p.loss for p in recent) / len(recent), "learning_rate": rate} | stream_metrics(data.states)
                    if total:
                        values["slots"] = float(slots)
                    elapsed = bar.format_dict["elapsed"]
                    if elapsed:
                        values["steps_per_second"] = (done - start) / elapsed
                    bar.set_postfix(loss=f"{values['loss']:.3f}")
                    log(values, done)
                if validation is not None and done % params.validation_every == 0 and done < params.steps:
                    gather(trained, drafter)
                    if ranks.leader:
                        log({f"validation.{name}": value for name, value in check(drafter, validation, params).items()}, done)
                    drafter.train()
                if done % params.checkpoint_every == 0 or done == params.steps:
                    if recent:
                        require_finite(recent, params, trained)
                    # The last one too: what follows may still wait for hidden states.
                    state.save(work, done, trained, optimizers, ranks.leader)
    except StreamError as error:
        if done > start:
            require_finite(made[-LOG_EVERY:], params, trained)
            state.save(work, done, trained, optimizers, ranks.leader)
        kept = f"the checkpoint of step {done} is kept, run again to go on from there" if done else "no step is made yet, run again to begin"
        raise StreamError(f"{error}; {kept}") from error
    # Of all runs that went on from each other: a restored optimizer has a state as well.
    if not any(optimizer.state for optimizer in optimizers):
        raise DraftlineError("outputs/extract: no sample of the steps had usable hidden states, nothing was trained; run dvc repro extract")
    gather(trained, drafter)
    drafter.eval()
    return made


def check(drafter: TrainedDrafter, validation: TrainingSet, params: Train) -> dict[str, float]:
    """Validation metrics (see `model_step.validate`) with the run's own settings."""
    drafter.eval()
    return validate(
        drafter,
        validation,
        params.loss,
        params.anchors_per_sequence,
        params.decay_gamma,
        params.validation_samples,
        params.seed,
        product_dtype(params.precision),
    )
