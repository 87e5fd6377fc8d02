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

CPU_CHUNK = (256, 2048)
"""Rows and columns of a tile on a CPU: rows enough for a product to run at the processor's speed, and a tile that stays in its cache over all passes."""
DEVICE_CHUNK_ELEMENTS = 1 << 26
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


def chunk_shape(vocabulary: int, device: torch.device) -> tuple[int, int]:
    """Rows of a chunk, and columns of the tiles that it is worked in; an accelerator takes a row whole."""
    if device.type == "cpu":
        return CPU_CHUNK[0], min(CPU_CHUNK[1], vocabulary)
    return max(MIN_CHUNK_ROWS, DEVICE_CHUNK_ELEMENTS // vocabulary), vocabulary


def rows_per_chunk(vocabulary: int) -> int:
    """Rows whose logits over `vocabulary` are worth having at a time, outside the loss."""
    return max(MIN_CHUNK_ROWS, (1 << 22) // vocabulary)


def log_normalisers(states: Tensor, head: Tensor) -> Tensor:
    """`[U]` fp32 log-sum-exp of `states @ head.T` (`[U, H]`, `[V, H]`), tile by tile."""
    rows, columns = chunk_shape(len(head), head.device)
    return torch.cat([torch.logsumexp(torch.stack([torch.logsumexp((x @ tile.T).float(), dim=-1) for tile in torch.split(head, columns)]), dim=0) for x in torch.split(states, rows)])


class _Tiles:
    """A chunk's numbers over the vocabulary, a tile of columns after the other; the buffer serves all chunks of a step."""

    def __init__(self, rows: int, vocabulary: int, columns: int, like: Tensor) -> None:
        self.bounds = [(start, min(start + columns, vocabulary)) for start in range(0, vocabulary, columns)]
        self._store = like.new_empty(len(self.bounds), rows, columns)
        self._columns = columns

    def tile(self, index: int, rows: int) -> Tensor:
        """`[rows, width]` of tile `index`."""
        start, end = self.bounds[index]
        return self._store[index, :rows, : end - start]

    def pick(self, columns: Tensor) -> Tensor:
        """`[N]` one column of each of the first N rows."""
        rows = torch.arange(len(columns), device=columns.device)
        return self._store[columns // self._columns, rows, columns % self._columns]


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, added up in out's dtype."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)


def _logits(out: Tensor, x: Tensor, head: Tensor, f: Tensor | None, w2: Tensor | None) -> None:
    """out = x·headᵀ + f·w2ᵀ."""
    if x.dtype != out.dtype:
        # One product and not two: each is rounded to its narrow dtype.
        if f is not None and w2 is not None:
            x, head = torch.cat([x, f], dim=1), torch.cat([head, w2], dim=1)
        out.copy_(x @ head.T)
        return
    torch.mm(x, head.T, out=out)
    if f is not None and w2 is not None:
        out.addmm_(f, w2.T)


def _exponentials(tiles: _Tiles, x: Tensor, head: Tensor, f: Tensor | None, w2: Tensor | None) -> Tensor:
    """Fill `tiles` with exp(z − the tile's own largest z) of z = x·headᵀ + f·w2ᵀ.

    Returns:
        `[tiles, N, 1]`: what makes softmax(z) of each tile.
    """
    largest, sums = [], []
    for index, (start, end) in enumerate(tiles.bounds):
        z = tiles.tile(index, len(x))
        _logits(z, x, head[start:end], f, None if w2 is None else w2[start:end])
        largest.append(z.amax(dim=-1, keepdim=True))
        z.sub_(largest[-1]).exp_()
        sums.append(z.sum(dim=-1, keepdim=True))
    shift = torch.stack(largest)
    log_normaliser = torch.logsumexp(shift + torch.stack(sums).log_(), dim=0)
    return shift.sub_(log_normaliser).exp_()


def _probabilities(tiles: _Tiles, x: Tensor, head: Tensor, log_normaliser: Tensor) -> None:
    """Fill `tiles` with exp(x·headᵀ − log_normaliser)."""
    for index, (start, end) in enumerate(tiles.bounds):
        z = tiles.tile(index, len(x))
        _logits(z, x, head[start:end], None, None)
        z.sub_(log_normaliser[:, None]).exp_()


class _VocabularyLoss(torch.autograd.Function):
    """Weighted CE and L1 of all slots; gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, features: Tensor | None, w2: Tensor | None, head: Tensor, targets: Targets, ce: float, tv: float, backward: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = hidden.dtype
        head = head.to(dtype)
        f_all = None if features is None else features.to(dtype)
        w2_cast = None if w2 is None else w2.to(dtype)
        # Slots of the same position one after another: a chunk then needs few rows of the verifier.
        order = torch.argsort(targets.rows, stable=True)
        n = len(order)
        losses = hidden.new_zeros(n, dtype=torch.float32 if dtype != torch.float64 else dtype)
        l1 = torch.zeros_like(losses)
        grad_hidden = torch.zeros_like(hidden) if backward else None
        grad_features = torch.zeros_like(f_all) if backward and f_all is not None else None
        grad_w2 = losses.new_zeros(w2.shape) if backward and w2 is not None else None
        most, columns = chunk_shape(len(head), hidden.device)
        draft, verifier = (_Tiles(min(most, n), len(head), columns, losses) for _ in range(2))
        scratch = losses.new_empty(min(most, n), columns)
        for chunk in torch.split(order, most):
            x, f = hidden[chunk], None if f_all is None else f_all[chunk]
            rows, inverse = torch.unique_consecutive(targets.rows[chunk], return_inverse=True)
            states = targets.states[rows].to(dtype)
            scale = _exponentials(draft, x, head, f, w2_cast)
            verifier_scale = None
            if targets.log_normaliser is None:
                verifier_scale = _exponentials(verifier, states, head, None, None)
            else:
                _probabilities(verifier, states, head, targets.log_normaliser[rows].to(losses.dtype))
            inside = losses.new_zeros(len(rows))
            distance = losses.new_zeros(len(chunk))
            mean_sign = losses.new_zeros(len(chunk))
            for index, (start, end) in enumerate(draft.bounds):
                q, p = draft.tile(index, len(chunk)).mul_(scale[index]), verifier.tile(index, len(rows))
                if verifier_scale is not None:
                    p.mul_(verifier_scale[index])
                inside += p.sum(dim=-1)
                difference = scratch[: len(chunk), : end - start]
                torch.sub(q, p[inverse], out=difference)
                distance += torch.linalg.vector_norm(difference, 1, dim=-1)
                # q ⊙ sign(q − p) in q's place: q is never negative, so both are still there.
                torch.copysign(q, difference, out=q)
                mean_sign += q.sum(dim=-1)
            distance += (1.0 - inside).clamp_(min=0.0)[inverse]
            labels = targets.labels[chunk]
            known = labels >= 0
            label = labels.clamp(min=0)
            label_ce = torch.where(known, -torch.log(draft.pick(label).abs_().clamp_(min=torch.finfo(losses.dtype).tiny)), 0.0)
            l1[chunk] = distance
            losses[chunk] = ce * label_ce + tv * distance
            if grad_hidden is None:
                continue
            weights = targets.weights[chunk].to(losses.dtype)
            # w · [ce · (q − onehot) + tv · q ⊙ (s − ⟨q, s⟩)], the onehot's part apart.
            weight_ce = ce * known * weights
            of_q, of_signed = (weight_ce - tv * weights * mean_sign)[:, None], (tv * weights)[:, None]
            grad_x = losses.new_zeros(x.shape)
            grad_f = None if f is None else losses.new_zeros(f.shape)
            for index, (start, end) in enumerate(draft.bounds):
                signed = draft.tile(index, len(chunk))
                gradient = torch.abs(signed, out=scratch[: len(chunk), : end - start]).mul_(of_q).addcmul_(signed, of_signed).to(dtype)
                _add_product(grad_x, gradient, head[start:end])
                if grad_f is not None and w2_cast is not None and grad_w2 is not None and f is not None:
                    _add_product(grad_f, gradient, w2_cast[start:end])
                    _add_product(grad_w2[start:end], gradient.T, f)
            grad_x -= weight_ce[:, None] * head[label]
            grad_hidden[chunk] = grad_x.to(dtype)
            if grad_f is not None and w2_cast is not None and grad_w2 is not None and f is not None and grad_features is not None:
                grad_f -= weight_ce[:, None] * w2_cast[label]
                grad_w2.index_add_(0, label, weight_ce[:, None] * f, alpha=-1)
                grad_features[chunk] = grad_f.to(dtype)
        ctx.feature_dtype = None if features is None else features.dtype
        ctx.w2_dtype = None if w2 is None else w2.dtype
        if backward:
            ctx.save_for_backward(*(gradient for gradient in (grad_hidden, grad_features, grad_w2) if gradient is not None))
        ctx.mark_non_differentiable(l1, losses)
        return (losses * targets.weights.to(losses.dtype)).sum(), l1, losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *markov = (gradient * upstream.to(gradient.dtype) for gradient in ctx.saved_tensors)
        grad_features, grad_w2 = (markov[0].to(ctx.feature_dtype), markov[1].to(ctx.w2_dtype)) if markov else (None, None)
        return grad_hidden, grad_features, grad_w2, None, None, None, None, None


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
