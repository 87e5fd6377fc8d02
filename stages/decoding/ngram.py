"""Prompt lookup: what followed the last tokens where they stood before, as drafts; with a guard against loops.

A verifier that has begun to repeat itself makes prompt lookup look brilliant: every draft is another turn of the loop, and
every one is accepted. The output is the verifier's either way, but a measured gain is then a gain on text that nobody wants. The
guard drops drafts from the token on with which a loop would be extended, and counts what it dropped.

Letters: `B` rows, `S` slots, `N` longest n-gram, `K` drafts, `P` periods.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.decoding.proposer import Batch, DecodingError, Observed, Proposal, Sampling


@dataclass(frozen=True)
class LoopGuard:
    """What counts as a loop: the last tokens are `repeats` copies of one piece of at most `longest_period` tokens, `tokens` of them at least."""

    repeats: int = 3
    longest_period: int = 16
    tokens: int = 8

    def __post_init__(self) -> None:
        if self.repeats < 2 or self.longest_period < 1 or self.tokens < 2:
            raise DecodingError(f"{self}: allowed are repeats >= 2, longest_period >= 1, tokens >= 2")

    @property
    def window(self) -> int:
        """Tokens before a draft that can be part of a loop with it."""
        return max(self.repeats * self.longest_period, self.tokens)


def lookup(batch: Batch, shortest: int, longest: int, limit: int) -> tuple[Tensor, Tensor]:
    """Prompt lookup as vLLM does it: the longest n-gram of `shortest` to `longest` tokens that ends the row and stands earlier in it, where it stands first.

    Returns:
        drafts `[B, limit]` and how many each row has `[B]`: those that follow the match, up to the row's end.
    """
    tokens, lengths = batch.tokens, batch.lengths
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    # matched[b, e]: how many tokens up to slot e equal the row's last ones.
    matched = torch.zeros_like(tokens)
    run = slots < lengths[:, None] - 1
    for back in range(longest):
        wanted = tokens.gather(1, (lengths[:, None] - 1 - back).clamp(min=0))
        run = run & (tokens.roll(back, dims=1) == wanted) & (slots >= back)
        matched += run
    length = matched.amax(dim=1)
    # argmax of equal values may be any of them; of these it must be the first.
    first = torch.where(matched == length[:, None], slots, tokens.shape[1]).amin(dim=1)
    drafts = tokens.gather(1, (first[:, None] + 1 + torch.arange(limit, device=tokens.device)).clamp(max=tokens.shape[1] - 1))
    counts = torch.where(length >= shortest, (lengths - 1 - first).clamp(max=limit), 0)
    return drafts, counts


def before_loop(batch: Batch, drafts: Tensor, counts: Tensor, guard: LoopGuard) -> Tensor:
    """`[B]` leading drafts of `[B, K]` that extend no loop, at most `counts`."""
    device, window = drafts.device, guard.window
    slots = batch.lengths[:, None] - window + torch.arange(window, device=device)
    # Negative stand-ins before a row's start, each different from all others: they repeat nothing.
    before = torch.where(slots >= 0, batch.tokens.gather(1, slots.clamp(min=0)), -1 - torch.arange(window, device=device))
    line = torch.cat([before, drafts], dim=1)
    periods = torch.arange(1, guard.longest_period + 1, device=device)
    places = torch.arange(line.shape[1], device=device)
    back = places - periods[:, None]
    same = (line[:, None, :] == line[:, back.clamp(min=0)]) & (back >= 0)
    # A run of r equal pairs at distance p is a piece of r + p tokens with period p.
    needed = (torch.clamp(periods * guard.repeats, min=guard.tokens) - periods)[None, :, None]
    breaks = torch.where(same, -1, places).cummax(dim=2).values
    looping = ((places - breaks) >= needed).any(dim=1)[:, window:]
    free = (~looping).long().cumprod(dim=1).sum(dim=1)
    return torch.minimum(counts, free)


class NgramProposer:
    """See the module. Its drafts are certain (`draws` None) under every sampling; it keeps nothing between rounds."""

    name = "ngram"
    layer_ids: tuple[int, ...] = ()
    head_seconds = 0.0

    def __init__(self, draft_tokens: int, shortest: int = 1, longest: int = 3, guard: LoopGuard | None = None) -> None:
        """
        Args:
            draft_tokens: `K`. shortest, longest: n-gram sizes. guard: None: no guard, as vLLM has none.
        Raises:
            DecodingError: sizes that make no n-gram.
        """
        if draft_tokens < 1 or not 1 <= shortest <= longest:
            raise DecodingError(f"prompt lookup: {draft_tokens} drafts, n-grams of {shortest} to {longest}; allowed are at least 1, 1 <= shortest <= longest")
        self.draft_tokens = draft_tokens
        self.shortest, self.longest, self.guard = shortest, longest, guard
        self._rounds = self._tokens = 0

    def begin(self, rows: int, capacity: int, sampling: Sampling, generator: torch.Generator | None) -> None:
        """Nothing to forget."""

    def observe(self, observed: Observed) -> None:
        """Nothing to keep: all it needs stands in the batch."""

    @torch.inference_mode()
    def propose(self, batch: Batch, limit: int) -> Proposal:
        drafts, counts = lookup(batch, self.shortest, self.longest, limit)
        if self.guard is not None:
            kept = before_loop(batch, drafts, counts, self.guard)
            self._tokens += int((counts - kept).sum())
            self._rounds += int((kept < counts).sum())
            counts = kept
        return Proposal(drafts, counts)

    def keep(self, index: Tensor) -> None:
        """Nothing to keep."""

    def positions(self) -> Tensor | None:
        return None

    def counters(self) -> dict[str, int]:
        """The guard's effect: drafts (one per row and round) that it cut, and the tokens it dropped of them."""
        return {} if self.guard is None else {"guarded_drafts": self._rounds, "guarded_tokens": self._tokens}
