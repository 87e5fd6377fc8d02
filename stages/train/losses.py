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


def log_normalisers(states: Tensor, head: Tensor) -> Tensor:
    """`[U]` fp32 log-sum-exp of `states @ head.T` (`[U, H]`, `[V, H]`), tile by tile."""
    rows, columns = chunk_shape(len(head), head.device)
    tiles = torch.split(head, columns)
    return torch.cat(
        [torch.logsumexp(torch.stack([torch.logsumexp((x @ tile.T).float(), dim=-1) for tile in tiles]), dim=0) for x in torch.split(states, rows)]
    )


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


def _logits(out: Tensor, inputs: list[Tensor], weights: list[Tensor]) -> None:
    """out = Σ inputs[i] · weights[i]ᵀ."""
    if inputs[0].dtype != out.dtype:
        # One product and not several: each is rounded to its narrow dtype.
        out.copy_(torch.cat(inputs, dim=1) @ torch.cat(weights, dim=1).T)
        return
    torch.mm(inputs[0], weights[0].T, out=out)
    for x, weight in zip(inputs[1:], weights[1:], strict=True):
        out.addmm_(x, weight.T)


def _softmax(tiles: _Tiles, inputs: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Fill `tiles` with exp(z − the tile's own largest z) of z = Σ inputs[i] · weights[i]ᵀ; returns `[tiles, N, 1]`, their factors to the softmax."""
    largest, sums = [], []
    for index, (start, end) in enumerate(tiles.bounds):
        z = tiles.tile(index, len(inputs[0]))
        _logits(z, inputs, [weight[start:end] for weight in weights])
        largest.append(z.amax(dim=-1, keepdim=True))
        z.sub_(largest[-1]).exp_()
        sums.append(z.sum(dim=-1, keepdim=True))
    shift = torch.stack(largest)
    log_normaliser = torch.logsumexp(shift + torch.stack(sums).log_(), dim=0)
    return shift.sub_(log_normaliser).exp_()


def _normalised(tiles: _Tiles, x: Tensor, head: Tensor, log_normaliser: Tensor) -> None:
    """Fill `tiles` with exp(x · headᵀ − log_normaliser)."""
    for index, (start, end) in enumerate(tiles.bounds):
        z = tiles.tile(index, len(x))
        _logits(z, [x], [head[start:end]])
        z.sub_(log_normaliser[:, None]).exp_()


def _distances(draft: _Tiles, verifier: _Tiles, factors: Tensor, verifier_factors: Tensor | None, inverse: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """‖q − p‖₁ `[N]` and ⟨q, s⟩ `[N]`; leaves q ⊙ s in `draft`, s = sign(q − p).

    q is never negative, so both q and s can still be told from that. Where q = p, s is +1: any value from −1 to 1 is a subgradient.
    """
    n, distinct = len(inverse), int(inverse[-1]) + 1
    inside, distance, mean_sign = scratch.new_zeros(distinct), scratch.new_zeros(n), scratch.new_zeros(n)
    for index, (start, end) in enumerate(draft.bounds):
        q, p = draft.tile(index, n).mul_(factors[index]), verifier.tile(index, distinct)
        if verifier_factors is not None:
            p.mul_(verifier_factors[index])
        inside += p.sum(dim=-1)
        difference = torch.sub(q, p[inverse], out=scratch[:n, : end - start])
        distance += torch.linalg.vector_norm(difference, 1, dim=-1)
        torch.copysign(q, difference, out=q)
        mean_sign += q.sum(dim=-1)
    return distance + (1.0 - inside).clamp_(min=0.0)[inverse], mean_sign


class _VocabularyLoss(torch.autograd.Function):
    """Weighted CE and L1 of all slots; gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, head: Tensor, targets: Targets, ce: float, tv: float, backward: bool, hidden: Tensor, *markov: Tensor) -> tuple[Tensor, Tensor]:
        dtype = hidden.dtype
        inputs, weights = [hidden], [head.to(dtype)]
        if markov:
            inputs.append(markov[0].to(dtype))
            weights.append(markov[1].to(dtype))
        # Slots of the same position one after another: a chunk then needs few rows of the verifier.
        order = torch.argsort(targets.rows, stable=True)
        n = len(order)
        losses = hidden.new_zeros(n, dtype=torch.float32 if dtype != torch.float64 else dtype)
        l1 = torch.zeros_like(losses)
        gradients = [torch.zeros_like(x) for x in inputs] if backward else []
        grad_w2 = losses.new_zeros(markov[1].shape) if backward and markov else None
        rows, columns = chunk_shape(len(head), hidden.device)
        draft, verifier = (_Tiles(min(rows, n), len(head), columns, losses) for _ in range(2))
        scratch = losses.new_empty(min(rows, n), columns)
        for chunk in torch.split(order, rows):
            xs = [x[chunk] for x in inputs]
            predicting, inverse = torch.unique_consecutive(targets.rows[chunk], return_inverse=True)
            states = targets.states[predicting].to(dtype)
            factors, verifier_factors = _softmax(draft, xs, weights), None
            if targets.log_normaliser is None:
                verifier_factors = _softmax(verifier, [states], weights[:1])
            else:
                _normalised(verifier, states, weights[0], targets.log_normaliser[predicting].to(losses.dtype))
            l1[chunk], mean_sign = _distances(draft, verifier, factors, verifier_factors, inverse, scratch)
            known, label = targets.labels[chunk] >= 0, targets.labels[chunk].clamp(min=0)
            label_q = draft.pick(label).abs_().clamp_(min=torch.finfo(losses.dtype).tiny)
            losses[chunk] = ce * torch.where(known, -torch.log(label_q), 0.0) + tv * l1[chunk]
            if not backward:
                continue
            weight_tv = tv * targets.weights[chunk].to(losses.dtype)
            weight_ce = ce * known * targets.weights[chunk].to(losses.dtype)
            # w · [ce · (q − onehot) + tv · q ⊙ (s − ⟨q, s⟩)], the onehot's part after the tiles.
            of_q, of_signed = (weight_ce - weight_tv * mean_sign)[:, None], weight_tv[:, None]
            sums = [losses.new_zeros(x.shape) for x in xs]
            for index, (start, end) in enumerate(draft.bounds):
                signed = draft.tile(index, len(chunk))
                gradient = torch.abs(signed, out=scratch[: len(chunk), : end - start]).mul_(of_q).addcmul_(signed, of_signed).to(dtype)
                for total, weight in zip(sums, weights, strict=True):
                    _add_product(total, gradient, weight[start:end])
                if grad_w2 is not None:
                    _add_product(grad_w2[start:end], gradient.T, xs[1])
            for into, total, weight in zip(gradients, sums, weights, strict=True):
                into[chunk] = total.sub_(weight_ce[:, None] * weight[label]).to(dtype)
            if grad_w2 is not None:
                grad_w2.index_add_(0, label, weight_ce[:, None] * xs[1], alpha=-1)
        ctx.dtypes = [x.dtype for x in (hidden, *markov)]
        ctx.save_for_backward(*gradients, *([] if grad_w2 is None else [grad_w2]))
        ctx.mark_non_differentiable(l1)
        return (losses * targets.weights.to(losses.dtype)).sum(), l1

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [(gradient * upstream.to(gradient.dtype)).to(dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return None, None, None, None, None, *gradients


def vocabulary_loss(hidden: Tensor, features: Tensor | None, w2: Tensor | None, head: Tensor, targets: Targets, ce: float, tv: float) -> tuple[Tensor, Tensor]:
    """Weighted `ce · CE + tv · L1` over all slots.

    Args:
        hidden: `[N, H]` normed backbone outputs; its dtype is that of the matrix products, sums are fp32.
        features: `[N, R]` Markov features, w2: `[D, R]`; both None without a Markov head.
        head: `[D, H]` the verifier's `lm_head` rows of the draft vocabulary, frozen.
    Returns:
        The scalar loss and each slot's L1 distance `[N]`, without gradient (acceptance is 1 − ½ of it).
    """
    markov = () if features is None else (features, w2)
    loss, l1 = _VocabularyLoss.apply(head, targets, ce, tv, torch.is_grad_enabled(), hidden, *markov)  # type: ignore[no-untyped-call]
    return loss, l1


def confidence_loss(logits: Tensor, l1: Tensor, weights: Tensor) -> Tensor:
    """BCE of survival logits `[N]` against 1 − ½‖q − p‖₁; `weights` `[N]` already divided by their sum."""
    survival = (1.0 - 0.5 * l1).clamp(0.0, 1.0)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), survival.float(), reduction="none")
    return (losses * weights).sum()
