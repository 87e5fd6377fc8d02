"""What the gate decodes: held-out prompts, and the constructed cases where a block ends in the wrong place.

A block of drafts is cut by an end token or by `max_tokens` only where drafted tokens would have gone on. Such cases are
taken from the drafted run's own rounds: its output is decoded again with a stop token, or a limit, that falls inside a
block which it had accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stages.dataset import TokenSample
from stages.decoding.engine import Completion, Request

LONG_PROMPT = 1024
"""Tokens of the long prompt; the proof asks for more than 1,000."""

LIMITS = (1, 2, 5, 9)
"""Short `max_tokens`: the prefill's token alone, and ends at several places of a block."""

BLOCK_CASES = 3
"""Constructed cases of each sort: stop token, limit."""


WHOLE = ("held-out", "multi-turn", "long")
"""Cases whose output is not cut on purpose."""


@dataclass(frozen=True)
class Case:
    """One prompt to decode with and without the drafter. `why`: held-out, multi-turn, long, limit, block-limit, block-stop."""

    request: Request
    kind: str
    why: str
    turns: int


def held_out(chosen: dict[str, list[TokenSample]], samples: Sequence[TokenSample], max_tokens: int) -> list[Case]:
    """The chosen prompts of each kind, and a conversation of several turns if they hold none."""
    cases = [Case(Request(sample.id, sample.prompt_ids, max_tokens), sample.kind, "held-out", sample.turns) for group in chosen.values() for sample in group]
    if not any(case.turns > 1 for case in cases):
        several = min((sample for sample in samples if sample.turns > 1), key=lambda sample: sample.id, default=None)
        if several is not None:
            cases.append(Case(Request(several.id, several.prompt_ids, max_tokens), several.kind, "multi-turn", several.turns))
    return cases


def long_prompt(samples: Sequence[TokenSample], max_tokens: int, max_model_len: int) -> Case:
    """Whole conversations one after the other, and a last prompt to answer: `LONG_PROMPT` tokens, or as many as the engine takes.

    Args:
        samples: at least one; repeated if they are too few to fill the prompt.
    """
    length = max(1, min(LONG_PROMPT, max_model_len - max_tokens))
    last = min(samples, key=lambda sample: (len(sample.prompt_ids), sample.id))
    before: list[int] = []
    turns = last.turns
    while len(before) + len(last.prompt_ids) < length:
        for sample in samples:
            before.extend(sample.input_ids)
            turns += sample.turns
            if len(before) + len(last.prompt_ids) >= length:
                break
    # The oldest tokens go, as a chat client would cut a long history.
    tokens = (before + last.prompt_ids)[-length:]
    return Case(Request("long-prompt", tokens, max_tokens), last.kind, "long", turns)


def short_limits(cases: Sequence[Case]) -> list[Case]:
    """Some prompts once more, with the short `LIMITS`."""
    return [
        replace(case, request=replace(case.request, id=f"{case.request.id}#max_tokens={limit}", max_tokens=limit), why="limit")
        for case, limit in zip(_cycled(cases), LIMITS, strict=False)
    ]


def _cycled(cases: Sequence[Case]) -> Iterator[Case]:
    while cases:
        yield from cases


def block_cases(cases: Sequence[Case], completions: Sequence[Completion]) -> list[Case]:
    """Cases that cut a block of the drafted run: by a stop token, and by `max_tokens`.

    Blocks with the most accepted drafts come first, one per prompt. Without any accepted draft the stop token is the
    verifier's own token with all K drafts behind it.

    Args:
        cases, completions: the drafted run, in the same order.
    """
    candidates: list[tuple[int, int, int]] = []
    for index, completion in enumerate(completions):
        rounds = [entry for entry in completion.rounds[:-1] if entry.drafted]
        if rounds:
            best = max(rounds, key=lambda entry: (entry.accepted, -entry.context_length))
            candidates.append((-best.accepted, index, best.context_length - len(cases[index].request.prompt_ids)))
    limits: list[Case] = []
    stops: list[Case] = []
    for negative, index, offset in sorted(candidates):
        case, output = cases[index], completions[index].token_ids
        if len(limits) < BLOCK_CASES:
            request = replace(case.request, id=f"{case.request.id}#max_tokens={offset + 1}", max_tokens=offset + 1)
            limits.append(replace(case, request=request, why="block-limit"))
        # The first accepted draft that the output did not hold before: only then does the stop fall into this block.
        place = next((at for at in range(offset, offset + max(1, -negative)) if output[at] not in output[:at]), None)
        if place is not None and len(stops) < BLOCK_CASES:
            request = replace(case.request, id=f"{case.request.id}#stop={output[place]}", stop_token_ids=(output[place],))
            stops.append(replace(case, request=request, why="block-stop"))
    return limits + stops


def coverage(cases: Sequence[Case], completions: Sequence[Completion]) -> dict[str, Any]:
    """What the drafted run really covered, counted from its rounds.

    Returns:
        prompts per kind, conversations of several turns, the longest prompt (tokens), and for ends by a natural end
        token, by a constructed stop token and by `max_tokens`: how many fell inside a block (drafts behind the end),
        and how many of those on an accepted draft.
    """
    kinds: dict[str, int] = {}
    ends = {name: {"inside_block": 0, "on_accepted_draft": 0} for name in ("eos", "stop_token", "max_tokens")}
    for case, completion in zip(cases, completions, strict=True):
        kinds[case.kind] = kinds.get(case.kind, 0) + 1
        last = completion.rounds[-1] if completion.rounds else None
        if last is None or last.committed > len(last.drafted):
            continue
        name = "max_tokens" if completion.finish_reason == "length" else "stop_token" if case.why == "block-stop" else "eos"
        ends[name]["inside_block"] += 1
        ends[name]["on_accepted_draft"] += int(last.committed == last.accepted)
    return {
        "kinds": dict(sorted(kinds.items())),
        "multi_turn": sum(case.turns > 1 and case.why != "long" for case in cases),
        "longest_prompt": max(len(case.request.prompt_ids) for case in cases),
        "ends": ends,
    }
