"""Acceptance length of sets of prompts, and whether the difference of two drafters is more than chance.

Acceptance length is a ratio of sums, tokens committed over verifier passes, never a mean of ratios: a prompt that ends
after three tokens must not weigh as much as one of 128. Kinds of prompts are averaged with equal weight (macro).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PromptCount:
    """What decoding one prompt took.

    Attributes:
        prompt: id, the key that pairs two measurements.
        kind: prompt kind, the stratum.
        tokens: committed by the verifier passes that follow the prefill.
        passes: those passes.
    """

    prompt: str
    kind: str
    tokens: int
    passes: int


@dataclass(frozen=True)
class Interval:
    """A point estimate and its bootstrap percentile interval."""

    estimate: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class PairedDifference:
    """Acceptance length of the first minus that of the second, on the same prompts; `relative`: macro average of the first over that of the second, minus 1."""

    macro: Interval
    per_kind: dict[str, Interval]
    relative: Interval

    def as_json(self) -> dict[str, Any]:
        per_kind = {kind: interval.as_json() for kind, interval in self.per_kind.items()}
        return {"macro": self.macro.as_json(), "per_kind": per_kind, "relative": self.relative.as_json()}


def ratio(tokens: int, passes: int) -> float:
    """Tokens per pass; 1 where there was no pass (every output ended with its prefill): nothing was saved."""
    return tokens / passes if passes else 1.0


def by_kind(counts: Sequence[PromptCount]) -> dict[str, list[PromptCount]]:
    """Counts per kind, kinds in alphabetical order."""
    kinds: dict[str, list[PromptCount]] = {}
    for count in counts:
        kinds.setdefault(count.kind, []).append(count)
    return dict(sorted(kinds.items()))


def acceptance_length(counts: Sequence[PromptCount]) -> dict[str, Any]:
    """Acceptance length per kind and their mean.

    Returns:
        {"macro": float, "per_kind": {kind: {"value", "tokens", "passes", "prompts"}}}.
    """
    per_kind = {}
    for kind, members in by_kind(counts).items():
        tokens, passes = sum(m.tokens for m in members), sum(m.passes for m in members)
        per_kind[kind] = {"value": ratio(tokens, passes), "tokens": tokens, "passes": passes, "prompts": len(members)}
    return {"macro": float(np.mean([entry["value"] for entry in per_kind.values()])), "per_kind": per_kind}


def _resampled(pairs: NDArray[np.int64], generator: np.random.Generator, resamples: int) -> NDArray[np.float64]:
    """The two ratios in each resample of one kind's prompts.

    Args:
        pairs: `[N, 2, 2]` prompt, system, (tokens, passes).
    Returns:
        `[resamples, 2]`.
    """
    picks = generator.integers(0, len(pairs), size=(resamples, len(pairs)))
    # A resample as prompt weights: [resamples, N] @ [N, 4] needs no [resamples, N, 4] copy.
    weights = np.zeros((resamples, len(pairs)), dtype=np.int64)
    np.add.at(weights, (np.arange(resamples)[:, None], picks), 1)
    sums = (weights @ pairs.reshape(len(pairs), 4)).reshape(resamples, 2, 2)
    ratios: NDArray[np.float64] = np.where(sums[:, :, 1] > 0, sums[:, :, 0] / np.maximum(sums[:, :, 1], 1), 1.0)
    return ratios


def paired_difference(
    first: Sequence[PromptCount], second: Sequence[PromptCount], *, resamples: int = 4000, confidence: float = 0.95, seed: int = 0
) -> PairedDifference:
    """Paired bootstrap of the difference in acceptance length, over prompts within each kind.

    Both measurements of a drawn prompt enter together, so what makes a prompt easy for both cancels out.

    Args:
        first, second: the same prompts, in any order.
        confidence: mass of the percentile interval.
        seed: of the resampling; equal inputs and seed give equal intervals.
    Raises:
        ValueError: the two do not hold the same prompts with the same kinds, or none at all.
    """
    ours, theirs = _keyed(first), _keyed(second)
    if ours.keys() != theirs.keys() or not ours:
        raise ValueError(f"not the same prompts: {sorted(ours.keys() ^ theirs.keys())[:3] or 'none at all'}")
    generator = np.random.default_rng(seed)
    tail = 100 * (1 - confidence) / 2
    per_kind: dict[str, Interval] = {}
    draws: list[NDArray[np.float64]] = []
    values: list[tuple[float, float]] = []
    kinds: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(ours):
        kinds.setdefault(key[0], []).append(key)
    for kind, keys in kinds.items():
        pairs = np.array([[(c.tokens, c.passes) for c in (ours[key], theirs[key])] for key in keys], dtype=np.int64)
        totals = pairs.sum(axis=0)
        values.append((ratio(int(totals[0, 0]), int(totals[0, 1])), ratio(int(totals[1, 0]), int(totals[1, 1]))))
        drawn = _resampled(pairs, generator, resamples)
        draws.append(drawn)
        per_kind[kind] = _interval(values[-1][0] - values[-1][1], drawn[:, 0] - drawn[:, 1], tail)
    first_macro, second_macro = np.mean(values, axis=0)
    macros = np.mean(draws, axis=0)
    difference = _interval(first_macro - second_macro, macros[:, 0] - macros[:, 1], tail)
    return PairedDifference(difference, per_kind, _interval(first_macro / second_macro - 1.0, macros[:, 0] / macros[:, 1] - 1.0, tail))


def macro_interval(counts: Sequence[PromptCount], *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0) -> Interval:
    """The macro-averaged acceptance length with the bootstrap interval over the prompts of each kind."""
    generator = np.random.default_rng(seed)
    draws = []
    for members in by_kind(counts).values():
        pairs = np.array([[(count.tokens, count.passes)] * 2 for count in members], dtype=np.int64)
        draws.append(_resampled(pairs, generator, resamples)[:, 0])
    return _interval(acceptance_length(counts)["macro"], np.mean(draws, axis=0), 100 * (1 - confidence) / 2)


def _keyed(counts: Sequence[PromptCount]) -> Mapping[tuple[str, str], PromptCount]:
    keyed = {(count.kind, count.prompt): count for count in counts}
    if len(keyed) != len(counts):
        raise ValueError("a prompt is counted twice")
    return keyed


def _interval(estimate: float, draws: NDArray[np.float64], tail: float) -> Interval:
    low, high = np.percentile(draws, [tail, 100 - tail])
    return Interval(float(estimate), float(low), float(high))
