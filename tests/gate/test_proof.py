"""The proof's flow on toy engines: who is asked what, in which order, and what each slip of an engine is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pytest

from stages.decoding.engine import Completion, EngineConfig, EngineError, Request, Round
from stages.gate.cases import Case
from stages.gate.judge import NEAR_TIE, WRONG
from stages.gate.proof import LOGPROBS, REFERENCE, Comparison, compare, quantises_activations

K = 3
EOS = 2
TIES = {"float32": 1e-4, "bfloat16": 0.3}
"""How close the first two tokens are where a toy verifier hesitates; the margins of both dtypes are fp32's."""

NEAR = {"float32": 1e-3, "bfloat16": 0.75}


def hesitates(tokens: list[int]) -> bool:
    return len(tokens) % 11 == 0


def choices(tokens: list[int], close: float) -> dict[int, float]:
    """The toy verifier: its five likeliest tokens after `tokens`, log probabilities a nat or more apart but for ties."""
    best = 10 + (7 * tokens[-1] + 3 * len(tokens)) % 40
    second = close if hesitates(tokens) else 1.5
    return {best: -0.1, best + 50: -0.1 - second, best + 100: -3.0, best + 150: -4.0, best + 200: -5.0}


@dataclass
class Toy:
    """An engine over `choices`. What a test lets it do wrong:

    accept_all: commits every draft. flips: takes the second choice where the verifier hesitates, with a drafter only.
    early: stops a token early.
    """

    config: EngineConfig
    log: list[str]
    accept_all: bool = False
    flips: float = 0.0
    early: bool = False
    fails: bool = False
    asked: list[list[Request]] = field(default_factory=list)

    def __enter__(self) -> Toy:
        self.log.append(f"{self.config.dtype}{' drafter' if self.config.speculative else ''}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.log.append("end")

    def wait_ready(self) -> None:
        if self.fails:
            raise EngineError("no kernel for float32")

    def generate(self, requests: list[Request]) -> list[Completion]:
        self.asked.append(requests)
        return [self._one(request) for request in requests]

    def _pick(self, tokens: list[int]) -> int:
        ranked = sorted(choices(tokens, self.flips or 1.0).items(), key=lambda item: -item[1])
        return ranked[1 if self.flips and hesitates(tokens) and self.config.speculative else 0][0]

    def _draft(self, tokens: list[int]) -> list[int]:
        """Right, right, then wrong at every third length."""
        drafts: list[int] = []
        for _ in range(K):
            guess = self._pick(tokens + drafts)
            drafts.append(guess if (len(tokens) + len(drafts)) % 3 else 999)
        return drafts

    def _one(self, request: Request) -> Completion:
        tokens, rounds = list(request.prompt_ids), []
        output: list[int] = []
        logprobs: list[dict[int, float]] = []

        def commit(token: int) -> bool:
            logprobs.append(choices(tokens, TIES[self.config.dtype]))
            tokens.append(token)
            output.append(token)
            return len(output) >= request.max_tokens - self.early or token in request.stop_token_ids

        done = commit(self._pick(tokens))
        while not done:
            context, drafts = len(tokens), self._draft(tokens) if self.config.speculative else []
            accepted = committed = 0
            for draft in drafts:
                right = self.accept_all or draft == self._pick(tokens)
                done = commit(draft if right else self._pick(tokens))
                committed += 1
                accepted += right
                if done or not right:
                    break
            else:
                done = commit(self._pick(tokens))
                committed += 1
            rounds.append(Round(context, drafts, accepted, committed))
        return Completion(request.id, output, "length", rounds, logprobs if request.logprobs else None)


def case(name: str, prompt: list[int], max_tokens: int = 20) -> Case:
    return Case(Request(name, prompt, max_tokens), "story", "held-out", 1)


CASES = [case("a", [5, 6, 7]), case("b", [9, 8, 7, 6])]
SPECULATIVE: dict[str, Any] = {"method": "dflash"}


def config(dtype: str) -> EngineConfig:
    return EngineConfig("toy", dtype, 256, 4, 1 << 20)


def compared(dtype: str, engine: Callable[[EngineConfig, list[str]], Toy], quantised: bool = False) -> tuple[Comparison, list[str], list[Toy]]:
    log: list[str] = []
    engines: list[Toy] = []

    def start(wanted: EngineConfig, desc: str) -> Toy:
        engines.append(engine(wanted, log))
        return engines[-1]

    return compare(start, config(dtype), SPECULATIVE, CASES, NEAR, quantised), log, engines


def test_honest_engines_are_identical_and_one_is_alive_at_a_time() -> None:
    result, log, _ = compared("bfloat16", Toy)
    assert result.findings == []
    assert [run.dtype for run in result.runs] == ["bfloat16", REFERENCE]
    assert log == ["bfloat16 drafter", "end", "bfloat16", "end", "float32 drafter", "end", "float32", "end"]
    for run in result.runs:
        assert {case.why for case in run.cases} == {"held-out", "block-limit", "block-stop"}
        assert [completion.id for completion in run.baseline] == [case.request.id for case in run.cases]


def test_fp32_alone_needs_two_engines() -> None:
    result, log, _ = compared("float32", Toy)
    assert log == ["float32 drafter", "end", "float32", "end"]
    assert [run.dtype for run in result.runs] == [REFERENCE]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_acceptance_rule_that_takes_every_draft_is_wrong_in_every_dtype(dtype: str) -> None:
    result, _, _ = compared(dtype, lambda wanted, log: Toy(wanted, log, accept_all=True))
    for run in result.runs:
        verdicts = [finding.verdict for finding in result.findings if finding.dtype == run.dtype]
        assert WRONG in verdicts
        assert NEAR_TIE not in verdicts
    first = result.findings[0]
    # The draft that no verifier chose, at the place where it was committed.
    assert (first.prompt, first.drafted, first.margin) == ("a", 999, None)
    assert first.top2_margin == pytest.approx(1.5)


def test_a_flip_at_a_tie_is_a_near_tie_in_the_dtype_that_allows_it() -> None:
    served, _, engines = compared("bfloat16", lambda wanted, log: Toy(wanted, log, flips=0.3 if wanted.dtype == "bfloat16" else 0.0))
    assert {(finding.dtype, finding.verdict) for finding in served.findings} == {("bfloat16", NEAR_TIE)}
    # The margin is fp32's own at that prefix, and it was asked for the one next token.
    assert all(finding.margin == pytest.approx(TIES["float32"]) for finding in served.findings)
    asked = engines[-1].asked[1]
    assert {(request.max_tokens, request.logprobs) for request in asked} == {(1, LOGPROBS)}
    assert all(hesitates(request.prompt_ids) for request in asked)


def test_an_fp32_flip_is_judged_by_the_listed_margin_and_the_strict_threshold() -> None:
    result, _, _ = compared("float32", lambda wanted, log: Toy(wanted, log, flips=1e-4))
    assert {finding.verdict for finding in result.findings} == {NEAR_TIE}
    strict = compare(lambda wanted, desc: Toy(wanted, [], flips=1e-4), config("float32"), SPECULATIVE, CASES, {"float32": 1e-5})
    assert {finding.verdict for finding in strict.findings} == {WRONG}


def test_an_output_that_ends_early_is_wrong_without_asking_for_a_margin() -> None:
    result, _, engines = compared("bfloat16", lambda wanted, log: Toy(wanted, log, early=bool(wanted.speculative) and wanted.dtype == "bfloat16"))
    assert {(finding.verdict, finding.drafted, finding.margin) for finding in result.findings} == {(WRONG, None, None)}
    assert len(engines[-1].asked) == 1


def without_fp32(wanted: EngineConfig, log: list[str]) -> Toy:
    return Toy(wanted, log, flips=0.3, fails=wanted.dtype == REFERENCE)


def test_a_quantised_verifier_without_fp32_kernels_is_its_own_reference_and_says_so() -> None:
    result, _, _ = compared("bfloat16", without_fp32, quantised=True)
    assert result.without_fp32 == "no kernel for float32"
    assert [run.dtype for run in result.runs] == ["bfloat16"]
    assert {finding.verdict for finding in result.findings} == {NEAR_TIE}
    assert all(finding.margin == pytest.approx(TIES["bfloat16"]) for finding in result.findings)


def test_a_verifier_that_is_not_quantised_must_run_in_fp32() -> None:
    with pytest.raises(EngineError, match="no kernel"):
        compared("bfloat16", without_fp32)


W8A8 = {"config_groups": {"group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}}}
W4A16 = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"method": "none", "kv_cache_dtype": "auto", "details": {}}, False),
        ({"method": "none", "kv_cache_dtype": "float8", "details": {}}, True),
        ({"method": "gptq", "kv_cache_dtype": "auto", "details": {"desc_act": True}}, False),
        ({"method": "compressed-tensors", "kv_cache_dtype": "auto", "details": W8A8}, True),
        ({"method": "compressed-tensors", "kv_cache_dtype": "auto", "details": W4A16}, False),
        ({"method": "fp8", "kv_cache_dtype": "auto", "details": {}}, True),
        ({"method": "something new", "kv_cache_dtype": "auto", "details": {}}, True),
    ],
)
def test_verifiers_that_round_their_activations_are_known(quantization: dict[str, Any], expected: bool) -> None:
    assert quantises_activations(quantization) is expected
