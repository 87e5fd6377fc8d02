"""From the rounds of decoded prompts to acceptance length and acceptance per position.

Two things that skew these numbers if they are overlooked: a proposer without a proposal (prompt lookup that finds no
match) still costs a verifier pass, which counts; and where an end of sequence or the token limit cuts a block, the
positions behind the cut were neither accepted nor rejected, so they do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stages.decoding.engine import Completion, Round
from stages.evaluate.statistics import PromptCount


def prompt_count(completion: Completion, kind: str) -> PromptCount:
    """Tokens and verifier passes of one prompt; the pass that reads the prompt is none of them."""
    return PromptCount(prompt=completion.id, kind=kind, tokens=sum(entry.committed for entry in completion.rounds), passes=len(completion.rounds))


def reached(entry: Round, position: int) -> bool:
    """Was the draft at `position` (from 1) decided: all drafts before it accepted, itself accepted or rejected?"""
    if position > len(entry.drafted):
        return False
    cut = entry.committed == entry.accepted
    return position <= entry.accepted or (position == entry.accepted + 1 and not cut)


def per_position(rounds: Iterable[Round], draft_tokens: int) -> list[dict[str, Any]]:
    """Acceptance at each of the `draft_tokens` positions (K).

    Returns:
        For each position from 1: {"position", "reached", "accepted", "rate", "cumulative"}: of the rounds whose drafts
        before it were all accepted, how many accepted this one too, and the product of the rates so far (the share of
        rounds that survive to this position). `rate` is None where no round came so far; `cumulative` is 0 from there on.
    """
    entries = list(rounds)
    table: list[dict[str, Any]] = []
    survival = 1.0
    for position in range(1, draft_tokens + 1):
        decided = sum(reached(entry, position) for entry in entries)
        accepted = sum(entry.accepted >= position for entry in entries)
        rate = accepted / decided if decided else None
        survival *= rate or 0.0
        table.append({"position": position, "reached": decided, "accepted": accepted, "rate": rate, "cumulative": survival})
    return table


def survival(rounds: Iterable[Round], draft_tokens: int) -> list[float]:
    """Share of all rounds that accept up to each of the `draft_tokens` positions (K): what asking for K drafts is worth.

    `cumulative` of `per_position` speaks of drafts that were made. Here a round that had none left, as prompt lookup mostly has, has not survived.
    """
    entries = list(rounds)
    shares: list[float] = []
    for position in range(1, draft_tokens + 1):
        accepted = sum(entry.accepted >= position for entry in entries)
        decided = sum(reached(entry, position) for entry in entries)
        without = sum(entry.accepted == len(entry.drafted) == position - 1 and entry.committed > entry.accepted for entry in entries)
        rate = accepted / (decided + without) if decided else 0.0
        shares.append(rate * (shares[-1] if shares else 1.0))
    return shares


def positions_by_kind(completions: Sequence[Completion], kinds: dict[str, str], draft_tokens: int) -> dict[str, Any]:
    """Acceptance per position over all prompts and per kind.

    Args:
        kinds: prompt id → kind.
    Returns:
        {"all": table, "per_kind": {kind: table}}, tables as `per_position` gives them.
    """
    per_kind: dict[str, list[Round]] = {}
    for completion in completions:
        per_kind.setdefault(kinds[completion.id], []).extend(completion.rounds)
    everything = [entry for rounds in per_kind.values() for entry in rounds]
    return {
        "all": per_position(everything, draft_tokens),
        "per_kind": {kind: per_position(rounds, draft_tokens) for kind, rounds in sorted(per_kind.items())},
    }
