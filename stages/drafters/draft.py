"""Greedy drafting, the way an engine does it: one backbone forward, then the Markov chain left to right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.drafters.model import Blocks, Drafter, make_segments


@dataclass(frozen=True)
class Drafts:
    """Drafts of `A` anchors.

    Attributes:
        tokens: `[A, K]` verifier ids. logits: `[A, K, D]` with the Markov bias of the drafted chain; None where tokens are looked up.
        confidence: `[A, K]` survival probabilities, or None without a confidence head.
    """

    tokens: Tensor
    logits: Tensor | None
    confidence: Tensor | None


@torch.no_grad()
def greedy_drafts(drafter: Drafter, context: Tensor, anchor_tokens: Tensor, anchor_positions: Tensor) -> Drafts:
    """Draft from several anchors of one sequence.

    Args:
        context: `[T, L·H]` aux hidden states of positions `0…T-1`; an anchor at position p uses those before p.
        anchor_tokens, anchor_positions: `[A]`.
    """
    blocks = Blocks(
        context=context,
        context_positions=torch.arange(len(context), device=context.device),
        anchor_tokens=anchor_tokens,
        anchor_positions=anchor_positions,
        segments=make_segments([len(context)], [anchor_positions]),
    )
    hidden = drafter.hidden(blocks)
    base = hidden @ drafter.head.to(hidden.dtype).T
    previous = anchor_tokens
    markov = drafter.markov_head
    state = markov.initial_state(hidden) if markov is not None else None
    tokens, logits, confidence = [], [], []
    for k in range(hidden.shape[1]):
        slot = base[:, k]
        embedded = None
        if markov is not None and state is not None:
            embedded = markov.markov_w1(previous)
            features, state = markov.step(previous, hidden[:, k], state)
            slot = slot + markov.markov_w2(features)
        survival = drafter.confidence(hidden[:, k], embedded)
        if survival is not None:
            confidence.append(torch.sigmoid(survival.float()))
        previous = drafter.draft_ids[slot.argmax(dim=-1)]
        tokens.append(previous)
        logits.append(slot)
    return Drafts(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidence, 1) if confidence else None)


def greedy_draft(drafter: Drafter, context: Tensor, anchor_token: int, anchor_position: int) -> tuple[list[int], Tensor]:
    """Draft from one anchor: `K` verifier ids and their logits `[K, D]`."""
    device = context.device
    out = greedy_drafts(drafter, context, torch.tensor([anchor_token], device=device), torch.tensor([anchor_position], device=device))
    assert out.logits is not None
    return out.tokens[0].tolist(), out.logits[0]
