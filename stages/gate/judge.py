"""The gate's judgement, without an engine: two token lists and the verifier's log probabilities in, a verdict out.

A divergence is a *near-tie* if the verifier itself hardly prefers one of the two tokens: rounding then decides, and
rounding depends on the shape of a matrix product (one token against a block of K + 1). Everything else is *wrong*:
another token was committed than the verifier would have chosen. What cannot be shown to be a near-tie is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["near-tie", "wrong"]

NEAR_TIE: Verdict = "near-tie"
WRONG: Verdict = "wrong"


@dataclass(frozen=True)
class Divergence:
    """The first position where two outputs of one prompt differ.

    Attributes:
        position: index into the outputs; both agree before it.
        baseline: token without the drafter, None where that output had ended.
        drafted: token with the drafter, None where that output had ended.
    """

    position: int
    baseline: int | None
    drafted: int | None


@dataclass(frozen=True)
class Margin:
    """How strongly the verifier preferred its first token, nats of log probability (equal to logit differences).

    Attributes:
        top2: first minus second choice.
        spread: first choice minus the less likely of the two tokens that diverged; None where the verifier's list of
            likeliest tokens does not reach down to it.
    """

    top2: float
    spread: float | None


@dataclass(frozen=True)
class Finding:
    """One divergence with its evidence, as it stands in the report."""

    dtype: str
    prompt: str
    kind: str
    position: int
    baseline: int | None
    drafted: int | None
    top2_margin: float | None
    margin: float | None
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """One line for people."""
        margin = "not in the verifier's likeliest tokens" if self.margin is None else f"margin {self.margin:.4g}"
        return (
            f"{self.dtype} {self.prompt} position {self.position}: {_shown(self.baseline)} without, {_shown(self.drafted)} with the drafter, "
            f"{margin}: {self.verdict}"
        )


def _shown(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"


def first_divergence(baseline: Sequence[int], drafted: Sequence[int]) -> Divergence | None:
    """Compare two outputs of one prompt; None if they are identical, their ends included."""
    for position, (ours, theirs) in enumerate(zip(baseline, drafted, strict=False)):
        if ours != theirs:
            return Divergence(position, ours, theirs)
    if len(baseline) == len(drafted):
        return None
    position = min(len(baseline), len(drafted))
    return Divergence(position, baseline[position] if position < len(baseline) else None, drafted[position] if position < len(drafted) else None)


def margin_between(logprobs: Mapping[int, float], divergence: Divergence) -> Margin:
    """The verifier's margins at the position of a divergence.

    Args:
        logprobs: the verifier's likeliest tokens (two or more) with their log probabilities.
        divergence: both of its tokens must be there: an early end has no margin.
    """
    best, second = sorted(logprobs.values(), reverse=True)[:2]
    tokens = (divergence.baseline, divergence.drafted)
    likely = [logprobs[token] for token in tokens if token is not None and token in logprobs]
    return Margin(top2=best - second, spread=best - min(likely) if len(likely) == 2 else None)


def judge(divergence: Divergence, logprobs: Mapping[int, float] | None, near_tie: float) -> tuple[Verdict, Margin | None]:
    """Near-tie or wrong.

    Args:
        logprobs: the reference verifier's likeliest tokens at that position; None where there is none to ask.
        near_tie: a spread below this is a near-tie.
    """
    if divergence.baseline is None or divergence.drafted is None or logprobs is None:
        # One output simply ends: neither an end token nor the token limit explains that.
        return WRONG, None
    margin = margin_between(logprobs, divergence)
    return (NEAR_TIE if margin.spread is not None and margin.spread < near_tie else WRONG), margin


def tally(prompts: int, findings: Iterable[Finding]) -> dict[str, int]:
    """Counts of one dtype: prompts, identical, near_tie, wrong."""
    verdicts = Counter(finding.verdict for finding in findings)
    diverged = sum(verdicts.values())
    return {"prompts": prompts, "identical": prompts - diverged, "near_tie": verdicts[NEAR_TIE], "wrong": verdicts[WRONG]}
