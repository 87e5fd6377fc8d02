"""One forward pass of the training objective, and the validation metrics."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.params import LossWeights
from stages.train.data import Batch, TrainingSet, make_batch
from stages.train.losses import confidence_loss, vocabulary_loss
from stages.train.objectives import OBJECTIVES, TrainedDrafter

CALIBRATION_BINS = 10


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=dtype) if dtype != torch.float32 else nullcontext()


@dataclass(frozen=True)
class StepOutput:
    """`loss` is the scalar to differentiate; the others have no gradient. `l1`, `confidence` are per counted slot `[N]`."""

    loss: Tensor
    l1: Tensor
    confidence: Tensor | None


def objective(drafter: TrainedDrafter, head: Tensor, batch: Batch, weights: LossWeights, dtype: torch.dtype) -> StepOutput:
    """The three weighted losses of a batch; the matrix products run in `dtype`, the sums in fp32."""
    with autocast(dtype, head.device):
        slots = OBJECTIVES[drafter.config.algorithm].slots(drafter, batch)
    loss, l1 = vocabulary_loss(slots.hidden.to(dtype), slots.features, slots.w2, head, batch.targets, weights.ce, weights.tv)
    confidence = slots.confidence
    if confidence is not None:
        confidence = confidence.float()
        loss = loss + weights.confidence * confidence_loss(confidence, l1, batch.targets.weights)
    return StepOutput(loss, l1, confidence)


def calibration_error(predicted: Tensor, actual: Tensor, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error of probabilities `[N]` against survival rates `[N]`, equal-width bins."""
    index = (predicted * bins).long().clamp(max=bins - 1)
    error = 0.0
    for b in range(bins):
        inside = index == b
        if inside.any():
            error += inside.float().mean().item() * abs(predicted[inside].mean().item() - actual[inside].mean().item())
    return error


@torch.no_grad()
def validate(
    drafter: TrainedDrafter, data: TrainingSet, weights: LossWeights, anchors: int, gamma: float, limit: int, seed: int, dtype: torch.dtype
) -> dict[str, float]:
    """Metrics over the first `limit` samples, each with its own fixed anchors.

    Returns:
        loss; acceptance_<k> = mean 1 − TV at position k; acceptance_length = mean of 1 + Σ_k Π_{i≤k}(1 − TV_i)
        over blocks; confidence_error (ECE) and confidence_bias where there is a confidence head. Empty if no sample is usable.
    """
    k = drafter.config.draft_tokens
    totals, counts = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
    lengths, blocks, losses = 0.0, 0, []
    predicted, survived = [], []
    for index in range(min(limit, len(data))):
        batch = make_batch(data, [index], anchors, k, gamma, ("validation", seed))
        if batch is None:
            continue
        out = objective(drafter, data.head, batch, weights, dtype)
        losses.append(out.loss.item())
        rate = (1.0 - 0.5 * out.l1).clamp(0.0, 1.0).cpu()
        slots = batch.slots.cpu()
        positions = torch.nonzero(slots)[:, 1]
        totals.index_add_(0, positions, rate.double())
        counts.index_add_(0, positions, torch.ones_like(rate, dtype=torch.float64))
        table = torch.zeros(slots.shape)
        table[slots] = rate.float()
        lengths += (1.0 + table.cumprod(dim=1).sum(dim=1)).sum().item()
        blocks += len(table)
        if out.confidence is not None:
            predicted.append(torch.sigmoid(out.confidence).cpu())
            survived.append(rate.float())
    if not losses:
        return {}
    metrics = {"loss": math.fsum(losses) / len(losses), "acceptance_length": lengths / blocks}
    metrics |= {f"acceptance_{i + 1}": (totals[i] / counts[i]).item() for i in range(k) if counts[i] > 0}
    if predicted:
        p, s = torch.cat(predicted), torch.cat(survived)
        metrics |= {"confidence_error": calibration_error(p, s), "confidence_bias": (p.mean() - s.mean()).item()}
    return metrics
