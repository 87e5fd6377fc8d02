"""What the decoding loop asks of a drafter, and what a drafter gets to see: the interface of every proposer.

One round of `stages.decoding.loop`, for `B` rows (sequences) at once:

    limit = scheduler.limit(context_lengths)                  # 0: no drafting in this round
    proposal = proposer.propose(batch, limit)                 # up to K drafts per row, with q and confidence
    lengths = scheduler.lengths(offer)                        # how many of them each row has verified; 0: a plain verifier step
    verify the anchor and `lengths[b]` drafts per row         # one forward of the verifier
    proposer.observe(observed)                                # what the verifier has read and kept
    proposer.keep(index)                                      # only after rows have ended

Positions. A row of `n` committed tokens (prompt and output) has its anchor, the last of them, at position `n - 1`. The verifier
has read, and the proposer has observed, positions `0 … n - 2`; nobody has hidden states of the anchor. Draft `j` (from 1)
is a guess for position `n - 1 + j`. Verifying reads anchor and drafts, positions `n - 1 … n - 1 + length`; with `a` accepted it
commits `a + 1` tokens, and positions `n - 1 … n - 1 + a` are observed. So each position is observed once, in order, and a
proposer that wrote its own guesses into a cache rewinds to the observed ones before it reads new ones.

Letters: `B` rows that are still being decoded, `N` tokens, `K` drafts, `V` verifier vocabulary, `D` draft vocabulary,
`L` tapped layers, `H` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stages.errors import DraftlineError


class DecodingError(DraftlineError):
    """A proposer does not fit its verifier, or a request cannot be decoded."""


class PositionError(RuntimeError):
    """Verifier and drafter have read different lengths of a row: a fault of ours, never of the user."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, the same for all rows of a batch and for both models.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 truncate nothing; with both, top-k comes first, as in vLLM and transformers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0.0 and self.top_k >= 0 and 0.0 < self.top_p <= 1.0):
            raise DecodingError(f"{self}: allowed are temperature >= 0, top_k >= 0, 0 < top_p <= 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Batch:
    """The rows as they stand; proposers read it and never write it.

    Attributes:
        tokens: `[B, S]` int64, committed tokens from position 0; what lies behind a row's length means nothing.
        lengths: `[B]` int64, committed tokens `n` of each row; the anchor is `tokens[b, lengths[b] - 1]`.
    """

    tokens: Tensor
    lengths: Tensor

    def anchors(self) -> Tensor:
        """`[B]` last committed tokens."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]


@dataclass(frozen=True)
class Observed:
    """What the verifier has read since the last time: the prompts at first, then anchors and accepted drafts.

    Row `b` holds `counts[b]` tokens at positions `starts[b] …`; the rest of the row is padding.

    Attributes:
        tokens: `[B, N]` int64. starts, counts: `[B]` int64. A row's count is at least 1.
        states: `[B, N, L·H]`, the aux hidden states of the layers the proposer names in `layer_ids`, in their order; None where it names none.
    """

    tokens: Tensor
    starts: Tensor
    counts: Tensor
    states: Tensor | None


@dataclass(frozen=True)
class Draws:
    """The distributions that sampled drafts were really drawn from: Markov bias, temperature and truncation included.

    Attributes:
        probabilities: `[B, K, D]`, each slot sums to 1.
        token_ids: `[D]` verifier ids of the columns; None: column = id, D = V.
        drafted: `[B, K]`, probability of the drafted token itself (above 0).
    """

    probabilities: Tensor
    token_ids: Tensor | None
    drafted: Tensor


@dataclass(frozen=True)
class Proposal:
    """Drafts of one round.

    Attributes:
        tokens: `[B, k]` int64 verifier ids, `k` at most the round's limit; slots from `lengths[b]` on hold any valid id.
        lengths: `[B]` int64 in `0 … k`: 0 where the proposer has nothing (no match, its position limit is reached).
        draws: None where each draft had probability 1 given those before it: under greedy, and for prompt lookup always.
        confidence: `[B, k]` in 0 … 1: probability that the slot survives, given that all before it did; None without a confidence
            head. That of slot j may depend on drafts before j and on nothing after them.
    """

    tokens: Tensor
    lengths: Tensor
    draws: Draws | None = None
    confidence: Tensor | None = None


class Proposer(Protocol):
    """A drafter as the loop sees it. One instance decodes one batch at a time; `begin` starts the next.

    Attributes:
        name: for reports: "dspark", "ngram", …
        draft_tokens: `K`, the most drafts of a round.
        layer_ids: tapped verifier layers whose states it observes; id i is the input of layer i, the number of layers is the
            last layer's output before the final norm. Empty: none.
        head_seconds: seconds spent so far in sequential heads (the Markov chain), part of its drafting time; 0 without one.
    """

    @property
    def name(self) -> str: ...

    @property
    def draft_tokens(self) -> int: ...

    @property
    def layer_ids(self) -> tuple[int, ...]: ...

    @property
    def head_seconds(self) -> float: ...

    def begin(self, rows: int, capacity: int, sampling: Sampling, generator: torch.Generator | None) -> None:
        """Forget the last batch.

        Args:
            rows: `B`. capacity: the longest that any row can become, tokens; a row is never longer, drafts included.
            sampling: drafts must follow it too: greedy drafts under greedy, else drafts drawn from `Draws`.
            generator: the only source of randomness, on the verifier's device; None under greedy.
        """
        ...

    def observe(self, observed: Observed) -> None:
        """Take in what the verifier has read; own guesses beyond `observed.starts` are to be forgotten.

        Called with the prompts, then after every round, also where no drafts were asked for: but for the prompts (`starts` 0), costly
        work belongs into `propose`.
        """
        ...

    def propose(self, batch: Batch, limit: int) -> Proposal:
        """Draft for all rows; `1 ≤ limit ≤ draft_tokens` is the most that this round will use."""
        ...

    def keep(self, index: Tensor) -> None:
        """Rows have ended: go on with rows `index` (`[B']` int64, ascending) alone, numbered anew from 0."""
        ...

    def positions(self) -> Tensor | None:
        """`[B]` int64: how many leading tokens of each row have been observed; None for a proposer that keeps nothing per position.

        The loop compares it with the verifier's cache after every round.
        """
        ...

    def counters(self) -> dict[str, int]:
        """What else a report should say, counted since construction; may be empty."""
        ...


@dataclass(frozen=True)
class Offer:
    """All that a scheduler may know when it chooses verify lengths: neither drafts nor anything that the verifier says of them.

    Attributes:
        available: `[B]` int64, drafts of each row. confidence: `[B, k]` as in `Proposal`, or None. context_lengths: `[B]` int64, committed tokens.
    """

    available: Tensor
    confidence: Tensor | None
    context_lengths: Tensor


class Scheduler(Protocol):
    """Chooses how much is drafted and verified. Without one everything that was drafted is verified."""

    def limit(self, context_lengths: Tensor, draft_tokens: int) -> int:
        """Before drafting: the most drafts worth making for rows of `context_lengths` `[B]`, `0 … draft_tokens`; 0 skips the drafter."""
        ...

    def lengths(self, offer: Offer) -> Tensor:
        """After drafting: `[B]` int64, drafts to verify per row, `0 ≤ lengths ≤ offer.available`.

        Lossless sampling demands that whether slot j is verified depends on confidences of slots up to j alone (its own
        comes before its token is drawn): a choice that looks behind a slot's token biases which tokens are kept.
        """
        ...
