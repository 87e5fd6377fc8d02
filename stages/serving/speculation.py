"""How many tokens the served engine drafts at each batch size: the evaluation's measured costs and acceptance, as vLLM's own setting.

vLLM 0.32, `num_speculative_tokens_per_batch_size`: inclusive ranges [first, last, K], ascending from batch size 1; K from 0 to
`num_speculative_tokens`; the batch is the number of requests that a step schedules, those whose prompt it reads included. It works with
every method of model runner V1, not with data parallelism. K = 0 spares verification; a drafter that keeps a cache still follows the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.decoding.costs import Machine, read_costs
from stages.decoding.schedule import TOLERANCE, Choice, batch_ranges, choose_draft_tokens, too_slow


@dataclass(frozen=True)
class Speculation:
    """What the plan says of speculation.

    Attributes:
        ranges: vLLM's setting; None: nothing was measured, always as many drafts as the drafter makes; empty: none at all, the verifier is served alone.
        note: the same for people; "" where nothing was measured.
    """

    ranges: list[list[int]] | None
    note: str = ""

    @property
    def alone(self) -> bool:
        return self.ranges == []


def _expected(choice: Choice) -> str:
    return f"{choice.rate:.1f} tokens/s expected, {choice.alone:.1f} alone, at {choice.requests} request{'s' if choice.requests > 1 else ''}"


def plan_speculation(report: Mapping[str, Any], machine: Machine, dtype: str, draft_tokens: int | None, max_requests: int, where: str) -> Speculation:
    """Choose by what an evaluation measured.

    Args:
        report: evaluate's; without measured costs nothing is chosen. Its table must be of the verifier and checkpoint that the report is about.
        machine, dtype: that will serve. draft_tokens: the drafter's own K; None: as many as were measured. max_requests: served at a time.
        where: the report's path, for messages.
    Raises:
        CostError: the table is damaged, or of another machine, verifier, drafter or dtype.
    """
    measured = read_costs(report, where)
    if measured is None:
        return Speculation(None)
    table, acceptance = measured
    table.require(machine, report["verifier"], report["checkpoint"], dtype, where)
    acceptance = {count: survival for count, survival in acceptance.items() if draft_tokens is None or count <= draft_tokens}
    if not acceptance:
        return Speculation(None)
    choices = choose_draft_tokens(table, acceptance, max_requests)
    slow = too_slow(choices)
    if slow:
        return Speculation([], f"speculation is off: even without drafts the pair is over {TOLERANCE:.0%} slower than the verifier ({_expected(slow[0])})")
    ranges = batch_ranges(choices, max_requests)
    if not any(count for _, _, count in ranges):
        return Speculation([], f"speculation is off: it pays at no batch size ({_expected(choices[0])})")
    sizes = ", ".join(f"{count} at {first}" + (f" to {last}" if last > first else "") for first, last, count in ranges)
    return Speculation(ranges, f"draft tokens by requests in a step: {sizes} ({_expected(choices[0])})")
