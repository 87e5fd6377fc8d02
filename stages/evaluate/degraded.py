"""Are outputs with a drafter worse than the verifier's own?

A small verifier loops, stops after three words and answers nothing all by itself, so an output alone proves nothing. Each is
held against a *reference*: the verifier alone, same prompt, same sampling settings. It is `degraded` where it shows a sign that the
reference does not show:

    loops      it ends in one piece repeated over and over
    empty      it holds nothing but an end of sequence
    truncated  it ended by itself with fewer than half of the other's tokens

A lossless drafter's outputs are exchangeable with their references: equal under greedy decoding but for near-ties, two draws from one
distribution under sampling. So each sign falls on either side alone with the same chance, and of the prompts where exactly one of the two
shows it, the drafter's share is binomial with ½ (sign test). The stage fails where that is beyond chance.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import comb
from typing import Any

from stages.decoding.engine import Completion

SIGNS = ("loops", "empty", "truncated")
VERBS = {"loops": "loop", "empty": "are empty", "truncated": "are truncated early"}
LONGEST_PIECE = 32
LOOP_REPEATS, LOOP_TOKENS = 4, 24
"""A loop is at least so many copies of its piece, and at least so many tokens."""
CHANCE = 1e-3
"""Chance that one evaluation, all its tests together, fails a lossless drafter: the most that is accepted."""


def loops(tokens: Sequence[int]) -> bool:
    """Do the tokens end in a piece of at most `LONGEST_PIECE` tokens, repeated `LOOP_REPEATS` times and over `LOOP_TOKENS` tokens?"""
    for period in range(1, min(LONGEST_PIECE, len(tokens) // LOOP_REPEATS) + 1):
        length = max(LOOP_REPEATS * period, LOOP_TOKENS)
        if length <= len(tokens) and all(tokens[-back] == tokens[-back - period] for back in range(1, length - period + 1)):
            return True
    return False


def text(completion: Completion, eos_ids: Collection[int]) -> list[int]:
    """Its tokens without the final end of sequence."""
    tokens = completion.token_ids
    return tokens[:-1] if tokens and tokens[-1] in eos_ids else tokens


def signs(output: Completion, reference: Completion, eos_ids: Collection[int]) -> frozenset[str]:
    """What is wrong with `output`; `reference` tells what counts as truncated."""
    ours, theirs = text(output, eos_ids), text(reference, eos_ids)
    found = set()
    if loops(ours):
        found.add("loops")
    if not ours:
        found.add("empty")
    elif output.finish_reason == "stop" and 2 * len(ours) < len(theirs):
        found.add("truncated")
    return frozenset(found)


def degraded(output: Completion, reference: Completion, eos_ids: Collection[int]) -> frozenset[str]:
    """Signs of `output` that `reference` does not show; empty: the output is `ok`."""
    return signs(output, reference, eos_ids) - signs(reference, output, eos_ids)


def chance(worse: int, better: int) -> float:
    """One-sided sign test: how probable `worse` or more of `worse + better` fair coins are."""
    total = worse + better
    return float(sum(comb(total, count) for count in range(worse, total + 1)) / 2**total)


def compare_outputs(outputs: Sequence[Completion], references: Sequence[Completion], eos_ids: Collection[int]) -> dict[str, Any]:
    """Class every output.

    Args:
        outputs, references: the same prompts in the same order.
    Returns:
        {"prompts", "identical", "ok", "degraded", "signs": {sign: {"worse", "better", "chance"}}, "examples": {sign: up to three prompt ids}}.
    Raises:
        ValueError: not the same prompts.
    """
    if [output.id for output in outputs] != [reference.id for reference in references]:
        raise ValueError("outputs and references are not of the same prompts")
    worse = [degraded(output, reference, eos_ids) for output, reference in zip(outputs, references, strict=True)]
    better = [degraded(reference, output, eos_ids) for output, reference in zip(outputs, references, strict=True)]
    tests = {}
    for sign in SIGNS:
        counts = sum(sign in found for found in worse), sum(sign in found for found in better)
        tests[sign] = {"worse": counts[0], "better": counts[1], "chance": chance(*counts)}
    bad = sum(bool(found) for found in worse)
    return {
        "prompts": len(outputs),
        "identical": sum(output.token_ids == reference.token_ids for output, reference in zip(outputs, references, strict=True)),
        "ok": len(outputs) - bad,
        "degraded": bad,
        "signs": tests,
        "examples": {sign: [output.id for output, found in zip(outputs, worse, strict=True) if sign in found][:3] for sign in SIGNS},
    }


def failures(comparisons: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is worse than chance explains, one line each.

    Args:
        comparisons: what was measured, for people → `compare_outputs` of it. All tests of all of them share `CHANCE`.
    """
    limit = CHANCE / (len(SIGNS) * max(1, len(comparisons)))
    return [
        f"{name}: {test['worse']} of {comparison['prompts']} outputs {VERBS[sign]} where the verifier's own {'do' if sign == 'loops' else 'are'} not "
        f"(the other way round {test['better']}; by chance {test['chance']:.1e})"
        for name, comparison in comparisons.items()
        for sign, test in comparison["signs"].items()
        if test["chance"] <= limit
    ]


def enough_prompts(comparisons: int) -> int:
    """Fewest prompts with which a drafter that breaks every output is found out."""
    limit = CHANCE / (len(SIGNS) * max(1, comparisons))
    prompts = 1
    while chance(prompts, 0) > limit:
        prompts += 1
    return prompts
