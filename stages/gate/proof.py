"""The gate's runs: the same prompts through vLLM with and without the drafter, in the served dtype and in fp32.

Four engines, each alone in its process. The fp32 engine without the drafter comes last, because it is the reference
that also answers how close the verifier's choice was wherever any of the runs diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from stages.decoding.engine import Completion, EngineConfig, Request
from stages.decoding.isolated import EngineProcess
from stages.gate.cases import WHOLE, Case, block_cases
from stages.gate.judge import Divergence, Finding, first_divergence, judge

LOGPROBS = 20
"""Likeliest tokens that the reference lists, the most that vLLM allows by default."""

REFERENCE = "float32"

Start = Callable[[EngineConfig, str], AbstractContextManager[EngineProcess]]
"""Starts an engine, given its configuration and the name of its progress bar."""


@dataclass
class Run:
    """One dtype: cases with both outputs of each, in one order.

    `extra` of `cases` were constructed from the drafted run's rounds and stand at the end.
    """

    dtype: str
    cases: list[Case]
    drafted: list[Completion]
    baseline: list[Completion] = field(default_factory=list)

    def divergences(self) -> list[tuple[int, Divergence]]:
        """Index of the case and where its outputs part."""
        pairs = ((index, first_divergence(base.token_ids, ours.token_ids)) for index, (base, ours) in enumerate(zip(self.baseline, self.drafted, strict=True)))
        return [(index, divergence) for index, divergence in pairs if divergence is not None]

    def findings(self, margins: Sequence[dict[int, float] | None], near_tie: float) -> list[Finding]:
        """Every divergence with its verdict.

        Args:
            margins: for each of `divergences()`, the reference's likeliest tokens there.
        """
        out = []
        for (index, divergence), logprobs in zip(self.divergences(), margins, strict=True):
            verdict, margin = judge(divergence, logprobs, near_tie)
            out.append(
                Finding(
                    dtype=self.dtype,
                    prompt=self.cases[index].request.id,
                    kind=self.cases[index].kind,
                    position=divergence.position,
                    baseline=divergence.baseline,
                    drafted=divergence.drafted,
                    top2_margin=margin.top2 if margin else None,
                    margin=margin.spread if margin else None,
                    verdict=verdict,
                )
            )
        return out


def decode_drafted(engine: EngineProcess, cases: list[Case], dtype: str) -> Run:
    """Decode the cases with the drafter, then once more where a block can be cut."""
    completions = engine.generate([case.request for case in cases])
    # Only whole runs: a case with a short limit says nothing about where blocks lie.
    whole = [index for index, case in enumerate(cases) if case.why in WHOLE]
    extra = block_cases([cases[index] for index in whole], [completions[index] for index in whole])
    return Run(dtype, cases + extra, completions + engine.generate([case.request for case in extra]))


def compare(
    start: Start, baseline: EngineConfig, speculative: dict[str, object], cases: list[Case], near_tie: dict[str, float]
) -> tuple[list[Run], list[Finding]]:
    """Decode the cases with and without the drafter and judge every divergence.

    Args:
        baseline: the engine that serves, without the drafter.
        speculative: vLLM's speculative config of the drafter.
        near_tie: dtype → largest margin of a near-tie, for the served dtype and for fp32.
    Returns:
        The runs, fp32 last, and the findings of all of them.
    """
    dtypes = [REFERENCE] if baseline.dtype == REFERENCE else [baseline.dtype, REFERENCE]
    runs: list[Run] = []
    for dtype in dtypes:
        plain = replace(baseline, dtype=dtype)
        with start(replace(plain, speculative=speculative), f"gate: {dtype}, drafter") as engine:
            run = decode_drafted(engine, cases, dtype)
        runs.append(run)
        with start(plain, f"gate: {dtype}, verifier alone") as engine:
            requests = [case.request for case in run.cases]
            if dtype != REFERENCE:
                run.baseline = engine.generate(requests)
                continue
            run.baseline = engine.generate([replace(request, logprobs=LOGPROBS) for request in requests])
            findings = [finding for served in runs[:-1] for finding in served.findings(_ask(engine, served), near_tie[served.dtype])]
    return runs, findings + run.findings(_read(run), near_tie[REFERENCE])


def _ask(engine: EngineProcess, run: Run) -> list[dict[int, float] | None]:
    """The reference's likeliest tokens after the common part of each diverging pair; None where one output had ended."""
    found = run.divergences()
    # An early end is wrong whatever the reference says.
    asked = [(index, divergence) for index, divergence in found if divergence.baseline is not None and divergence.drafted is not None]
    requests = []
    for index, divergence in asked:
        request = run.cases[index].request
        prefix = run.baseline[index].token_ids[: divergence.position]
        requests.append(Request(request.id, request.prompt_ids + prefix, 1, logprobs=LOGPROBS))
    answers = dict(zip([index for index, _ in asked], engine.generate(requests) if requests else [], strict=True))
    return [_listed(answers[index], 0) if index in answers else None for index, _ in found]


def _read(run: Run) -> list[dict[int, float] | None]:
    """The same from the reference's own run, which had listed its likeliest tokens at every position."""
    return [_listed(run.baseline[index], divergence.position) for index, divergence in run.divergences()]


def _listed(completion: Completion, position: int) -> dict[int, float] | None:
    logprobs = completion.logprobs or []
    return logprobs[position] if position < len(logprobs) else None
