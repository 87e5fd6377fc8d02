"""The drafter's loss over row chunks, with its gradient in closed form: no `[slots × vocabulary]` matrix is ever stored.

    L = ce · CE(token) + tv · ‖q − p‖₁ + confidence · BCE(c, 1 − ½‖q − p‖₁)      (DSpark paper)

q is the drafter's distribution over its `D` tokens, p the verifier's over all `V`. Outside the draft vocabulary q is 0,
so that part of the L1 is p's mass there: a constant for the gradient, but part of acceptance. Each term is divided
by the sum of the slot weights `exp(-k/γ)` over the whole step.

For one row with logits z and q = softmax(z), writing s = sign(q − p):
    ∂CE/∂z = q − onehot(token)          ∂‖q − p‖₁/∂z = q ⊙ (s − ⟨q, s⟩)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20
MIN_CHUNK_ROWS = 32


@dataclass(frozen=True)
class Targets:
    """What the verifier says about `N` slots.

    Attributes:
        states: `[U, H]` the verifier's last hidden states after the final norm, at the `U` positions that predict.
        log_normaliser: `[U]` log-sum-exp of the verifier's logits over all `V`, or None when `D = V`.
        rows: `[N]` row of `states` for each slot; several blocks share one.
        labels: `[N]` the data's token as a draft index, -1 where the draft vocabulary lacks it.
        weights: `[N]` slot weights already divided by their sum over the step.
    """

    states: Tensor
    log_normaliser: Tensor | None
    rows: Tensor
    labels: Tensor
    weights: Tensor


def rows_per_chunk(vocabulary: int) -> int:
    return max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary)


def log_normalisers(states: Tensor, head: Tensor) -> Tensor:
    """`[U]` fp32 log-sum-exp of `states @ head.T` (`[U, H]`, `[V, H]`), a chunk of rows at a time."""
    chunks = torch.split(states, rows_per_chunk(len(head)))
    return torch.cat([torch.logsumexp((chunk @ head.T).float(), dim=-1) for chunk in chunks])


class _VocabularyLoss(torch.autograd.Function):
    """Weighted CE and L1 of all slots; gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, features: Tensor | None, w2: Tensor | None, head: Tensor, targets: Targets, ce: float, tv: float, backward: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = hidden.dtype
        inputs, output = hidden, head.to(dtype)
        if features is not None and w2 is not None:
            # One product for backbone logits and Markov bias: [h; f] · [head, W2]ᵀ.
            inputs, output = torch.cat([hidden, features.to(dtype)], dim=1), torch.cat([output, w2.to(dtype)], dim=1)
        width = head.shape[1]
        verifier_head = output[:, :width]
        order = torch.argsort(targets.rows, stable=True)
        n = len(order)
        losses = hidden.new_zeros(n, dtype=torch.float32 if dtype != torch.float64 else dtype)
        l1 = torch.zeros_like(losses)
        grad_inputs = torch.zeros_like(inputs) if backward else None
        grad_w2 = torch.zeros(w2.shape, dtype=losses.dtype, device=hidden.device) if backward and w2 is not None else None
        for chunk in torch.split(order, rows_per_chunk(len(head))):
            x = inputs[chunk]
            q = torch.softmax((x @ output.T).to(losses.dtype), dim=-1)
            rows, inverse = torch.unique_consecutive(targets.rows[chunk], return_inverse=True)
            p = (targets.states[rows].to(dtype) @ verifier_head.T).to(losses.dtype)
            if targets.log_normaliser is None:
                p = torch.softmax(p, dim=-1)
            else:
                p.sub_(targets.log_normaliser[rows].to(p.dtype)[:, None]).exp_()
            outside = (1.0 - p.sum(dim=-1)).clamp_(min=0.0)
            labels = targets.labels[chunk]
            known = labels >= 0
            index = labels.clamp(min=0)[:, None]
            label_q = q.gather(1, index)[:, 0]
            label_ce = torch.where(known, -torch.log(label_q.clamp(min=torch.finfo(q.dtype).tiny)), 0.0)
            difference = q - p[inverse]
            chunk_l1 = difference.abs().sum(dim=-1) + outside[inverse]
            l1[chunk] = chunk_l1
            losses[chunk] = ce * label_ce + tv * chunk_l1
            if grad_inputs is None:
                continue
            weights = targets.weights[chunk].to(q.dtype)
            sign = difference.sign_()
            mean_sign = (q * sign).sum(dim=-1, keepdim=True)
            # w · [ce · (q − onehot) + tv · q ⊙ (s − ⟨q, s⟩)], written over `sign` to stay within the chunk's buffers.
            scale_ce = (ce * known * weights)[:, None]
            gradient = sign.sub_(mean_sign).mul_(tv * weights[:, None]).add_(scale_ce).mul_(q)
            gradient.scatter_add_(1, index, -scale_ce)
            gradient = gradient.to(dtype)
            grad_inputs[chunk] = gradient @ output
            if grad_w2 is not None:
                grad_w2 += (gradient.T @ x[:, width:]).to(grad_w2.dtype)
        ctx.width = width
        ctx.has_features = features is not None
        ctx.feature_dtype = None if features is None else features.dtype
        ctx.w2_dtype = None if w2 is None else w2.dtype
        if backward:
            ctx.save_for_backward(grad_inputs, *([] if grad_w2 is None else [grad_w2]))
        ctx.mark_non_differentiable(l1, losses)
        return (losses * targets.weights.to(losses.dtype)).sum(), l1, losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        grad_inputs, *rest = ctx.saved_tensors
        grad_inputs = grad_inputs * upstream.to(grad_inputs.dtype)
        grad_features = grad_inputs[:, ctx.width :].to(ctx.feature_dtype) if ctx.has_features else None
        grad_w2 = (rest[0] * upstream).to(ctx.w2_dtype) if rest else None
        return grad_inputs[:, : ctx.width], grad_features, grad_w2, None, None, None, None, None


def vocabulary_loss(hidden: Tensor, features: Tensor | None, w2: Tensor | None, head: Tensor, targets: Targets, ce: float, tv: float) -> tuple[Tensor, Tensor]:
    """Weighted `ce · CE + tv · L1` over all slots.

    Args:
        hidden: `[N, H]` normed backbone outputs; its dtype is that of the matrix products, sums are fp32.
        features: `[N, R]` Markov features, w2: `[D, R]`; both None without a Markov head.
        head: `[D, H]` the verifier's `lm_head` rows of the draft vocabulary, frozen.
    Returns:
        The scalar loss and each slot's L1 distance `[N]`, without gradient (acceptance is 1 − ½ of it).
    """
    loss, l1, _ = _VocabularyLoss.apply(hidden, features, w2, head, targets, ce, tv, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss, l1


def confidence_loss(logits: Tensor, l1: Tensor, weights: Tensor) -> Tensor:
    """BCE of survival logits `[N]` against 1 − ½‖q − p‖₁; `weights` `[N]` already divided by their sum."""
    survival = (1.0 - 0.5 * l1).clamp(0.0, 1.0)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), survival.float(), reduction="none")
    return (losses * weights).sum()
