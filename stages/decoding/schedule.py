"""How much is drafted and verified: DSpark's prefix scheduler, and the number of drafts per batch size.

    lengths = static_lengths(survival, 0.4)               # cut each tail where survival falls below a threshold
    lengths = hardware_lengths(survival, seconds)         # spend verifier tokens over the whole batch while that pays
    choices = choose_draft_tokens(table, acceptance)      # before anything is drafted: K for each measured batch size

Lossless. Whether slot j of a request is verified may depend on what was known before its token was drawn: the confidences
up to its own. Both schedulers keep to it, the second because it admits slots from the likeliest on and stops at the first that does
not pay: what is behind that slot is never looked at. Looking on for a better place to stop would use confidences that hang on the
very tokens in question, and would change what is sampled (tests/decoding/test_schedule.py measures it).

Letters: `R` requests, `K` slots. `survival` `[R, K]` is the calibrated probability that a draft and all before it are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.decoding.costs import CostTable
from stages.errors import DraftlineError

TOLERANCE = 0.02
"""Share by which a chosen schedule may be slower than the verifier alone, in any measured cell."""


class ScheduleError(DraftlineError):
    """A schedule needs something that the drafter or the table does not have."""


def static_lengths(survival: Tensor, threshold: float, available: Tensor | None = None) -> Tensor:
    """`[R]` int64: leading slots whose survival is at least `threshold`.

    Args:
        survival: `[R, K]`, non-increasing along a row. available: `[R]` drafts that there are; None: K.
    """
    lengths = (survival >= threshold).long().cumprod(dim=1).sum(dim=1)
    return lengths if available is None else torch.minimum(lengths, available)


def hardware_lengths(survival: Tensor, seconds: Tensor, available: Tensor | None = None) -> Tensor:
    """`[R]` int64: how many drafts of each request are verified (DSpark paper, early stop).

    All slots by falling survival (equal ones: the earlier slot, then the earlier request) are admitted one by one, as long as each
    raises the expected tokens per second τ / seconds: from b = R tokens and τ = R on, b grows by one and τ by the slot's survival.

    Args:
        survival: `[R, K]`, non-increasing along a row.
        seconds: `[1 + R·K]`, of a round whose verifier pass reads R, R + 1, … tokens.
        available: `[R]` drafts that there are; None: K.
    """
    requests, slots = survival.shape
    by_slot = survival.double().T.clone()
    if available is not None:
        by_slot[torch.arange(slots)[:, None] >= available[None, :]] = -1.0
    value, order = by_slot.reshape(-1).sort(descending=True, stable=True)
    # Sorted: what is not there comes last.
    value, order = value[value >= 0.0], order[value >= 0.0]
    expected = requests + torch.cat([value.new_zeros(1), value.cumsum(dim=0)])
    rate = expected / seconds.double()[: len(expected)]
    grows = (rate[1:] > rate[:-1]).long().cumprod(dim=0)
    return torch.bincount(order[: int(grows.sum())] % requests, minlength=requests)


@dataclass(frozen=True)
class Choice:
    """Drafts per request at one batch size, and what is expected of it.

    Attributes:
        draft_tokens: 0: no speculation. rate, alone: tokens per second with it and of the verifier alone.
    """

    requests: int
    draft_tokens: int
    rate: float
    alone: float


def expected_tokens(acceptance: Sequence[float], draft_tokens: int) -> float:
    """Tokens that a round commits per request: 1 + Σ_{j ≤ K} survival to j; `acceptance` `[≥ K]` are those survivals."""
    if draft_tokens > len(acceptance):
        raise ScheduleError(f"acceptance is known for {len(acceptance)} positions, asked for {draft_tokens}; evaluate the drafter with as many draft tokens")
    return 1.0 + sum(acceptance[:draft_tokens])


def _survivals(acceptance: Mapping[int, Sequence[float]], draft_tokens: int) -> Sequence[float]:
    """Measured with just so many drafts, else with the next more: a block drafter's guesses hang on the length of the block."""
    known = min((count for count in acceptance if count >= draft_tokens), default=None)
    if known is None:
        raise ScheduleError(f"acceptance is measured with {sorted(acceptance)} draft tokens, asked for {draft_tokens}")
    return acceptance[known]


def choose_at(table: CostTable, acceptance: Mapping[int, Sequence[float]], requests: int) -> Choice:
    """The measured draft count with the highest expected rate; of equal ones the smallest.

    Args:
        acceptance: draft tokens of a measurement → share of the rounds that survive to each position (as evaluate's report has them).
    Raises:
        CostError: the table does not reach `requests`.
    """
    counts = [count for count in table.draft_tokens if count <= max(acceptance)]
    seconds = table.round_seconds(requests, [requests * (1 + count) for count in counts])
    rates = [
        requests * (expected_tokens(_survivals(acceptance, count), count) if count else 1.0) / second for count, second in zip(counts, seconds, strict=True)
    ]
    best = rates.index(max(rates))
    return Choice(requests, counts[best], rates[best], requests / table.alone_seconds(requests))


def choose_draft_tokens(table: CostTable, acceptance: Mapping[int, Sequence[float]], max_requests: int | None = None) -> list[Choice]:
    """`choose_at` for each batch size from 1 (or the smallest measured) to the largest measured, or to `max_requests`."""
    last = table.requests[-1] if max_requests is None else min(table.requests[-1], max_requests)
    return [choose_at(table, acceptance, requests) for requests in range(table.requests[0], last + 1)]


def too_slow(choices: Sequence[Choice]) -> list[Choice]:
    """Those that even at their best are slower than the verifier alone by more than `TOLERANCE`."""
    return [choice for choice in choices if choice.rate < (1.0 - TOLERANCE) * choice.alone]


def batch_ranges(choices: Sequence[Choice], max_requests: int) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [first, last, K], inclusive, from 1 to `max_requests` without a gap.

    Batches beyond the largest measured one get 0: what is not measured is not speculated on.
    """
    ranges: list[list[int]] = []
    known = {choice.requests: choice.draft_tokens for choice in choices}
    for requests in range(1, max_requests + 1):
        count = known.get(requests, 0)
        if ranges and ranges[-1][2] == count:
            ranges[-1][1] = requests
        else:
            ranges.append([requests, requests, count])
    return ranges
