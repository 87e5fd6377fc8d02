"""The gate's runs: the same prompts through vLLM with and without the drafter, in the served dtype and in fp32.

Four engines, one alive at a time. The fp32 engine without the drafter comes last, because it is the reference that also
answers how close the verifier's choice was wherever any of the runs diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stages.decoding.engine import Completion, EngineConfig, EngineError, Request
from stages.gate.cases import WHOLE, Case, block_cases
from stages.gate.judge import Divergence, Finding, first_divergence, judge

LOGPROBS = 20
"""Likeliest tokens that the reference lists, the most that vLLM allows by default."""

REFERENCE = "float32"

WEIGHT_ONLY = ("none", "awq", "gptq", "bitsandbytes")
"""Methods that leave activations as they are."""


class Decoder(Protocol):
    """What the proof needs of an engine: see `stages.decoding.isolated.EngineProcess`."""

    def wait_ready(self) -> None: ...

    def generate(self, requests: list[Request]) -> list[Completion]: ...


Start = Callable[[EngineConfig, str], AbstractContextManager[Decoder]]
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


def decode_drafted(engine: Decoder, cases: list[Case], dtype: str) -> Run:
    """Decode the cases with the drafter, then once more where a block can be cut."""
    completions = engine.generate([case.request for case in cases])
    # Only whole runs: a case with a short limit says nothing about where blocks lie.
    whole = [index for index, case in enumerate(cases) if case.why in WHOLE]
    extra = block_cases([cases[index] for index in whole], [completions[index] for index in whole])
    return Run(dtype, cases + extra, completions + engine.generate([case.request for case in extra]))


@dataclass(frozen=True)
class Comparison:
    """All runs (the reference's last) with the findings of all of them.

    `without_fp32`: why there is no fp32 run; None where there is one.
    """

    runs: list[Run]
    findings: list[Finding]
    without_fp32: str | None = None


def quantises_activations(quantization: Mapping[str, Any]) -> bool:
    """Does this verifier round its activations, or its KV cache, while it runs?

    Then fp32 has no smaller noise than the served dtype: a last-bit difference tips a value into the next of 255 steps.
    Measured with 135M parameters in W8A8: an fp32 divergence of margin 0.3 behind a prompt of 1,024 tokens.

    Args:
        quantization: the identity's field. Unknown methods count as rounding.
    """
    method = quantization["method"]
    if quantization["kv_cache_dtype"] != "auto":
        return True
    if method == "compressed-tensors":
        return any(group.get("input_activations") for group in quantization["details"].get("config_groups", {}).values())
    return method not in WEIGHT_ONLY


def compare(
    start: Start, baseline: EngineConfig, speculative: dict[str, Any], cases: list[Case], near_tie: Mapping[str, float], quantised: bool = False
) -> Comparison:
    """Decode the cases with and without the drafter and judge every divergence.

    Args:
        baseline: the engine that serves, without the drafter.
        speculative: vLLM's speculative config of the drafter.
        near_tie: dtype → largest margin of a near-tie, for the served dtype and for fp32.
        quantised: the verifier's kernels may not exist in fp32; then the served dtype is its own reference.
    """
    dtypes = [REFERENCE] if baseline.dtype == REFERENCE else [baseline.dtype, REFERENCE]
    runs: list[Run] = []
    for dtype in dtypes:
        plain = replace(baseline, dtype=dtype)
        with start(replace(plain, speculative=speculative), f"gate: {dtype}, drafter") as engine:
            try:
                engine.wait_ready()
            except EngineError as error:
                if not (quantised and runs):
                    raise
                return Comparison(runs, runs[0].findings(_read(runs[0]), near_tie[runs[0].dtype]), str(error))
            run = decode_drafted(engine, cases, dtype)
        runs.append(run)
        with start(plain, f"gate: {dtype}, verifier alone") as engine:
            run.baseline = engine.generate([replace(case.request, logprobs=LOGPROBS) for case in run.cases])
            if dtype == REFERENCE:
                findings = [finding for served in runs[:-1] for finding in served.findings(_ask(engine, served), near_tie[served.dtype])]
    return Comparison(runs, findings + run.findings(_read(run), near_tie[REFERENCE]))


def _ask(engine: Decoder, run: Run) -> list[dict[int, float] | None]:
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
    """The same from a run's own engine without the drafter, which had listed its likeliest tokens at every position."""
    return [_listed(run.baseline[index], divergence.position) for index, divergence in run.divergences()]


def _listed(completion: Completion, position: int) -> dict[int, float] | None:
    logprobs = completion.logprobs or []
    return logprobs[position] if position < len(logprobs) else None
