"""Distributions of the next token, and rejection sampling that leaves the verifier's distribution as it is.

A truncated distribution is kept as the tokens that survive, not as `V` numbers: top-p over a vocabulary of 49,152 by a full
sort costs more than everything else of a round together.

Letters: `B` rows, `A` rows still undecided, `N` distributions, `M` tokens of one, `V` verifier vocabulary, `D` draft vocabulary, `K` drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.decoding.proposer import Draws, Proposal, Sampling

CANDIDATES = 256
"""Likeliest tokens that top-p looks at first; eight times as many, and so on, where they do not hold the nucleus."""


@dataclass(frozen=True)
class Distribution:
    """`N` distributions over a vocabulary.

    Attributes:
        probabilities: `[N, M]`, each row sums to 1. ids: `[N, M]` token ids of the columns; None: column = id, M is the whole vocabulary.
    """

    probabilities: Tensor
    ids: Tensor | None

    def of(self, tokens: Tensor) -> Tensor:
        """`[N]` probabilities of one token each."""
        if self.ids is None:
            return self.probabilities.gather(1, tokens[:, None])[:, 0]
        return (self.probabilities * (self.ids == tokens[:, None])).sum(dim=1)

    def tokens(self, columns: Tensor) -> Tensor:
        """`[N]` token ids of one column each."""
        return columns if self.ids is None else self.ids.gather(1, columns[:, None])[:, 0]

    def dense(self, size: int) -> Tensor:
        """`[N, size]` over the whole vocabulary."""
        if self.ids is None:
            return self.probabilities
        return self.probabilities.new_zeros(len(self.probabilities), size).scatter_(1, self.ids, self.probabilities)


def distribution(logits: Tensor, sampling: Sampling) -> Distribution:
    """What `sampling` makes of logits `[N, V]`, in fp32.

    Top-p keeps the likeliest tokens up to and including the one that reaches the mass; top-k comes before it.
    """
    vocabulary = logits.shape[1]
    scaled = logits.float() / sampling.temperature
    top_k = min(sampling.top_k, vocabulary) or vocabulary
    if top_k == vocabulary and sampling.top_p >= 1.0:
        return Distribution(torch.softmax(scaled, dim=-1), None)
    total = torch.logsumexp(scaled, dim=-1, keepdim=True) if top_k == vocabulary else None
    count = min(top_k, CANDIDATES) if sampling.top_p < 1.0 else top_k
    if total is None and count < top_k:
        # The mass that top-p is a share of is that of the k likeliest alone.
        total = torch.logsumexp(scaled.topk(top_k, dim=-1).values, dim=-1, keepdim=True)
    while True:
        values, ids = scaled.topk(count, dim=-1)
        probabilities = torch.softmax(values, dim=-1) if total is None else torch.exp(values - total)
        before = probabilities.cumsum(dim=-1) - probabilities
        # A sum that reaches 1 by rounding truncates nothing.
        inside = before < sampling.top_p if sampling.top_p < 1.0 else torch.ones_like(before, dtype=torch.bool)
        # The nucleus ends before the last candidate, or the candidates are all there is.
        if count == top_k or not bool(inside[:, -1].any()):
            break
        count = min(top_k, count * 8)
    inside[:, 0] = True
    kept = probabilities * inside
    longest = int(inside.sum(dim=-1).max())
    kept = kept[:, :longest]
    return Distribution(kept / kept.sum(dim=-1, keepdim=True), ids[:, :longest])


def draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """`[N]` columns, each drawn in proportion to its row of non-negative `weights` `[N, M]`, which need not sum to 1.

    By the inverse of the cumulative sum in double precision: a column of weight 0 is never drawn.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.rand(len(weights), 1, dtype=torch.float64, device=weights.device, generator=generator)
    columns = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return columns[:, 0].clamp_(max=weights.shape[1] - 1)


def residual(p: Distribution, draws: Draws | None, drafted: Tensor, rows: Tensor, slot: int) -> Tensor:
    """`(p − q)₊` on the columns of `p`, `[N, M]`: what a rejected draft is replaced from.

    Args:
        draws: q of the whole batch; None: q put everything on the draft.
        drafted: `[N]` the rejected drafts. rows: `[N]` their rows of the batch. slot: from 0.
    """
    columns = torch.arange(p.probabilities.shape[1], device=drafted.device) if p.ids is None else p.ids
    if draws is None:
        return p.probabilities.masked_fill(columns == drafted[:, None], 0.0)
    q = draws.probabilities[rows, slot]
    if draws.token_ids is not None:
        size = int(max(columns.max(), draws.token_ids.max())) + 1
        q = q.new_zeros(len(q), size).index_copy_(1, draws.token_ids, q)
    if p.ids is not None:
        q = q.gather(1, p.ids)
    return (p.probabilities - q).clamp_(min=0.0)


def accept(drafted_p: Tensor, drafted_q: Tensor, generator: torch.Generator | None) -> Tensor:
    """`[N]` bool: true with probability min(1, p/q)."""
    uniform = torch.rand(len(drafted_p), dtype=torch.float64, device=drafted_p.device, generator=generator)
    return uniform * drafted_q < drafted_p


def verify_sampled(logits: Tensor, proposal: Proposal, lengths: Tensor, sampling: Sampling, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Rejection sampling of one round.

    Slot by slot over the rows that are still undecided: on average a few slots of a block decide it, and the distributions of
    the others are never needed.

    Args:
        logits: `[B, W + 1, V]` of the verifier after the anchor and after each of `W` drafts.
        lengths: `[B]` drafts that count, at most `W`.
    Returns:
        accepted `[B]`, and committed tokens `[B, W + 1]` of which the first `accepted[b] + 1` are valid.
    """
    rows = torch.arange(len(logits), device=logits.device)
    accepted = torch.zeros_like(lengths)
    width = logits.shape[1] - 1
    committed = torch.zeros(len(logits), width + 1, dtype=torch.long, device=logits.device)
    committed[:, :width] = proposal.tokens[:, :width]
    for slot in range(width + 1):
        p = distribution(logits[rows, slot], sampling)
        weights = p.probabilities
        drafting = lengths[rows] > slot
        good = torch.zeros_like(drafting)
        if slot < width and bool(drafting.any()):
            token = proposal.tokens[rows, slot]
            of_draft = p.of(token)
            q = torch.ones_like(of_draft) if proposal.draws is None else proposal.draws.drafted[rows, slot]
            good = accept(of_draft, q, generator) & drafting
            refused = drafting & ~good
            if bool(refused.any()):
                where = refused.nonzero()[:, 0]
                part = Distribution(weights[where], None if p.ids is None else p.ids[where])
                left = residual(part, proposal.draws, token[where], rows[where], slot)
                # Rounding can leave nothing where p and q are equal; then p itself is right.
                empty = left.sum(dim=-1, keepdim=True) <= 0.0
                weights = weights.index_copy(0, where, torch.where(empty, part.probabilities, left))
        ends = ~good
        if bool(ends.any()):
            last = ends.nonzero()[:, 0]
            final = Distribution(weights[last], None if p.ids is None else p.ids[last])
            chosen = final.tokens(draw(final.probabilities, generator))
            committed[rows[last], slot] = chosen
            accepted[rows[last]] = slot
            rows = rows[good]
        if len(rows) == 0:
            break
    return accepted, committed


def verify_greedy(logits: Tensor, proposal: Proposal | None, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy verification: accept while a draft is the verifier's own choice. Arguments and result as `verify_sampled`; no softmax."""
    choice = logits.argmax(dim=-1)
    width = logits.shape[1] - 1
    if proposal is None or width == 0:
        return torch.zeros_like(lengths), choice
    slots = torch.arange(width, device=lengths.device)
    agree = (proposal.tokens[:, :width] == choice[:, :width]) & (slots < lengths[:, None])
    return agree.long().cumprod(dim=1).sum(dim=1), choice
