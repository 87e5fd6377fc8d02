"""Calibrates the finished drafter on the validation split: what `stages.drafters.calibration` is fitted to.

Each block is judged as a decoder would. Greedy: the block is drafted along its own tokens, and a prefix survives as long as
they are the verifier's most likely ones. That is exact wherever the text itself follows the verifier's choices, for up to its first
wrong token a draft *is* the text; blocks are judged no further than the text does. Sampling: the published label, the product
of 1 − ½‖q − p‖₁ along the text, because what the verifier would say after other tokens than the text's is not known here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from stages.drafters.calibration import BINS, MODES, Calibration, Mode, ModeCalibration, fit, logit, report
from stages.drafters.draft import greedy_drafts
from stages.drafters.model import Drafter
from stages.params import Train
from stages.train.data import Batch, TrainingSet, make_batch
from stages.train.loop import CALIBRATION_SAMPLES
from stages.train.losses import chunk_shape
from stages.train.model_step import autocast, objective
from stages.train.objectives import TrainedDrafter, has_confidence
from stages.train.precision import product_dtype

BLOCKS_PER_SAMPLE = 128


def greedy_outcomes(drafts: Tensor, verifier: Tensor, text: Tensor, counted: Tensor) -> Tensor:
    """`[A, K]` 1 where the drafted prefix is accepted under greedy decoding, else 0; NaN where the text does not tell.

    What the verifier says at slot k is known if the text followed it at every slot before, whatever was drafted: to leave out
    only the blocks that were still alive there would make survival look rarer than it is.

    Args:
        drafts, verifier, text: `[A, K]` tokens: drafted, the verifier's most likely ones after the text so far, the text's own.
        counted: `[A, K]` bool, slots inside the supervised text.
    """
    follows = torch.ones_like(counted)
    follows[:, 1:] = (verifier == text)[:, :-1].cumprod(dim=1).bool()
    survived = (drafts == verifier).double().cumprod(dim=1)
    return survived.masked_fill_(~(counted & follows), float("nan"))


@torch.no_grad()
def _drafted(drafter: Drafter, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Greedy drafts of a batch of one sequence and the head's confidence in them: `[A, K]` each."""
    blocks = batch.blocks
    # Logits over the draft vocabulary are the largest thing here.
    step = max(1, chunk_shape(len(drafter.head), drafter.head.device)[0] // drafter.config.draft_tokens)
    tokens, confidence = [], []
    for anchors, positions in zip(torch.split(blocks.anchor_tokens, step), torch.split(blocks.anchor_positions, step), strict=True):
        with autocast(dtype, anchors.device):
            drafts = greedy_drafts(drafter, blocks.context, anchors, positions)
        assert drafts.confidence is not None
        tokens.append(drafts.tokens)
        confidence.append(drafts.confidence)
    return torch.cat(tokens).cpu(), torch.cat(confidence).cpu()


@torch.no_grad()
def _most_likely(data: TrainingSet, batch: Batch) -> Tensor:
    """`[A, K]` the verifier's most likely tokens; −1 in slots that do not count."""
    head = data.head if data.full_head is None else data.full_head
    states = batch.targets.states
    rows, _ = chunk_shape(len(head), head.device)
    best = torch.cat([(chunk.to(head.dtype) @ head.T).argmax(dim=-1) for chunk in torch.split(states, rows)])
    out = torch.full(batch.slots.shape, -1, dtype=best.dtype, device=best.device)
    out[batch.slots] = best[batch.targets.rows]
    return out.cpu()


@torch.no_grad()
def judged_blocks(drafter: Drafter, data: TrainingSet, index: int, params: Train) -> dict[Mode, tuple[Tensor, Tensor]] | None:
    """Confidence logits and outcomes, `[A, K]` each, of the blocks of one sample; None if it has no hidden states."""
    dtype, k = product_dtype(params.precision), drafter.config.draft_tokens
    batch = make_batch(data, [index], BLOCKS_PER_SAMPLE, k, params.decay_gamma, ("calibration", params.seed))
    if batch is None:
        return None
    out = objective(drafter, data.head, batch, params.loss, dtype)
    assert out.confidence is not None
    slots, previous = batch.slots.cpu(), batch.previous.cpu()
    along_text = torch.zeros(slots.shape)
    along_text[slots] = out.confidence.cpu()
    rates = torch.full(slots.shape, float("nan"))
    rates[slots] = (1.0 - 0.5 * out.l1).clamp(0.0, 1.0).float().cpu()
    drafts, confidence = _drafted(drafter, batch, dtype)
    # The text's token of a slot is the one before the next slot; that of the last slot is never asked for.
    text = torch.cat([previous[:, 1:], torch.full_like(previous[:, :1], -1)], dim=1)
    survived = greedy_outcomes(drafts, _most_likely(data, batch), text, slots)
    return {"greedy": (logit(confidence), survived), "sampling": (along_text, rates.double().cumprod(dim=1))}


def calibrate(drafter: TrainedDrafter, data: TrainingSet, params: Train) -> Calibration | None:
    """The scale of each way of decoding, fitted on every other validation sample and measured on those between.

    Returns:
        None without a confidence head, or where fewer than two samples have hidden states.
    """
    if not has_confidence(drafter):
        return None
    drafter.eval()
    samples = range(min(CALIBRATION_SAMPLES, len(data)))
    judged = [blocks for index in tqdm(samples, desc="calibrate", unit="sample") if (blocks := judged_blocks(drafter, data, index, params))]
    if len(judged) < 2:
        return None
    modes: dict[Mode, ModeCalibration] = {}
    for mode in MODES:
        logits, survived = ([torch.cat([blocks[mode][part] for blocks in judged[half::2]]) for half in (0, 1)] for part in (0, 1))
        scale = fit(logits[0], survived[0], shifted=True)
        modes[mode] = ModeCalibration(
            temperatures=scale.temperatures.tolist(),
            shifts=scale.shifts.tolist(),
            fitted_on=len(logits[0]),
            held_out=report(logits[1], survived[1], scale),
        )
    return Calibration(bins=BINS, modes=modes)
