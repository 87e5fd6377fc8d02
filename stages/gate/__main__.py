"""Greedy decoding with the drafter must be token-identical to greedy decoding without it, through vLLM.

    python -m stages.gate            (dvc repro gate)

In fp32, where it must hold but for exact ties, and in the served dtype, where each divergence must be shown to be a
near-tie of the fp32 verifier. Identity cannot see a wrong drafter (it is only slow), so the engine's draft tokens are
also compared with our own forward. Writes `outputs/gate/report.json` with all evidence, also when the verdict is fail.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.artifacts import digest_json, read_json, read_manifest, read_object, write_json
from stages.dataset import TokenSample, choose_per_kind, read_split
from stages.decoding.engine import EngineConfig, engine_config
from stages.decoding.isolated import EngineProcess
from stages.decoding.speculative import spec_config
from stages.errors import ArtifactError, DraftlineError
from stages.gate.cases import WHOLE, Case, coverage, held_out, long_prompt, short_limits
from stages.gate.judge import NEAR_TIE, WRONG, tally
from stages.gate.proof import REFERENCE, Run, Start, compare, quantises_activations
from stages.pairing.identity import read_identity
from stages.pairing.lock import require_pair
from stages.pairing.store import verifier_directory
from stages.params import Gate, Params
from stages.process import OUTPUTS, stage_main


def make_cases(samples: list[TokenSample], settings: Gate, max_model_len: int, draft_tokens: int) -> list[Case]:
    """All prompts that do not depend on what the drafter does.

    Raises:
        DraftlineError: none of the samples leaves room for its answer and two blocks.
    """
    # Behind a sequence lies the block that is being verified, and behind that the next one. Where that does not fit, the engine drafts for
    # none of the batch, keeps no context of what the others commit meanwhile, and drafts for them with a gap from then on.
    longest = max_model_len - 2 * draft_tokens
    fitting = [sample for sample in samples if len(sample.prompt_ids) + settings.max_tokens <= longest]
    if not fitting:
        shortest = min(len(sample.prompt_ids) for sample in samples)
        raise DraftlineError(
            f"params.yaml: engine.max_model_len = {max_model_len}: the shortest held-out prompt ({shortest} tokens), gate.max_tokens "
            f"({settings.max_tokens}) and two blocks of {draft_tokens} drafts need {shortest + settings.max_tokens + 2 * draft_tokens}"
        )
    samples = fitting
    cases = held_out(choose_per_kind(samples, settings.prompts_per_kind), samples, settings.max_tokens)
    return [*cases, long_prompt(samples, settings.max_tokens, longest), *short_limits(cases)]


def drafts_report(checkpoint: Path, engine: EngineConfig, drafted: Run, rounds: int, near_tie: float) -> tuple[dict[str, Any], list[str]]:
    """The engine's drafts against our own forward (fp32).

    Args:
        engine: the verifier's. rounds: how many to compare. near_tie: smallest gap between our logits of the two tokens that is wrong.
    Returns:
        What the report says of it, and a line for each draft that no rounding explains.
    """
    # Imported here: torch and transformers are not needed before every engine has ended.
    from stages.decoding.parity import draft_parity

    # The other cases repeat rounds of these.
    whole = [index for index, case in enumerate(drafted.cases) if case.why in WHOLE]
    prompts = [drafted.cases[index].request.prompt_ids for index in whole]
    completions = [drafted.drafted[index] for index in whole]
    parity = draft_parity(
        checkpoint,
        Path(engine.model),
        prompts,
        completions,
        rounds,
        trust_remote_code=engine.trust_remote_code,
        desc="gate: drafts, our own forward",
    )
    wrong = [mismatch for mismatch in parity.mismatches if mismatch.gap >= near_tie]
    report = {
        "rounds": parity.rounds,
        "tokens": parity.tokens,
        "equal_rounds": parity.rounds - len(parity.mismatches),
        "near_tie": len(parity.mismatches) - len(wrong),
        "wrong": len(wrong),
        "mismatches": [
            {**asdict(mismatch), "gap": mismatch.gap if math.isfinite(mismatch.gap) else None, "verdict": WRONG if mismatch in wrong else NEAR_TIE}
            for mismatch in parity.mismatches
        ],
    }
    return report, [f"draft of {mismatch.line()}" for mismatch in wrong]


def describe_reference(without_fp32: str | None, noisy: bool) -> str:
    """What the verdicts rest on, for the report."""
    if without_fp32 is not None:
        return f"the served dtype itself, because this quantised verifier does not run in {REFERENCE}: {without_fp32}"
    if noisy:
        return f"{REFERENCE}: the same engine with the same weights; it rounds activations in {REFERENCE} too, so served_near_tie judges both dtypes"
    return f"{REFERENCE}: the same engine with the same weights"


def prove(
    settings: Gate, engine: EngineConfig, quantization: dict[str, Any], checkpoint: Path, samples: list[TokenSample], start: Start
) -> tuple[dict[str, Any], list[str], list[Run]]:
    """Decode, compare and judge.

    Args:
        engine: the verifier alone, as it is served.
        quantization: the verifier's, from its identity.
        checkpoint: absolute path of the drafter.
    Returns:
        The report without its verdict, a line for everything that is wrong, and the runs, the reference last.
    """
    noisy = quantises_activations(quantization)
    near_tie = {engine.dtype: settings.served_near_tie} | {REFERENCE: settings.served_near_tie if noisy else settings.fp32_near_tie}
    speculative = spec_config(checkpoint, read_json(checkpoint / "config.json"))
    cases = make_cases(samples, settings, engine.max_model_len, speculative["num_speculative_tokens"])
    compared = compare(start, engine, speculative, cases, near_tie, quantised=quantization["method"] != "none")
    runs, findings = compared.runs, compared.findings
    parity, wrong_drafts = drafts_report(checkpoint, engine, runs[-1], settings.parity_rounds, near_tie[runs[-1].dtype])
    report = {
        "reference": describe_reference(compared.without_fp32, noisy),
        "draft_tokens": speculative["num_speculative_tokens"],
        "near_tie": {run.dtype: near_tie[run.dtype] for run in runs},
        "dtypes": {run.dtype: tally(len(run.cases), [finding for finding in findings if finding.dtype == run.dtype]) for run in runs},
        "coverage": {run.dtype: coverage(run.cases, run.drafted) for run in runs},
        "divergences": [finding.as_json() for finding in findings],
        "parity": parity,
    }
    return report, [finding.line() for finding in findings if finding.verdict == WRONG] + wrong_drafts, runs


def run(params: Params, output: Path, start: Start = EngineProcess) -> None:
    """Prove the pair, write the report, and raise if anything is wrong.

    Args:
        start: how an engine is started; the tests start one with a broken acceptance rule.
    """
    identity = read_identity()
    checkpoint = OUTPUTS / "convert" / "checkpoint"
    manifest = read_manifest(checkpoint, identity.digest)
    # Before any forward pass: a pair that does not belong together is not worth a proof.
    require_pair(checkpoint, identity)
    lock = OUTPUTS / "lock" / "report.json"
    if read_object(lock, "verdict")["verdict"] != "match":
        raise DraftlineError(f"{lock}: the pair does not match; run dvc repro lock")
    samples = read_split(OUTPUTS / "prepare", "evaluation")
    if not samples:
        raise ArtifactError(f"{OUTPUTS / 'prepare' / 'evaluation'}: no held-out prompts; raise prepare.evaluation_fraction")
    engine = engine_config(verifier_directory(identity), params.engine, params.verifier.trust_remote_code)
    report, wrong, _ = prove(params.gate, engine, identity.quantization, checkpoint.absolute(), samples, start)
    verdict = {"verdict": "fail" if wrong else "pass", "verifier": identity.digest, "checkpoint": digest_json(manifest["files"])}
    # Before the verdict is acted on: a failure without its evidence helps nobody.
    write_json(output / "report.json", verdict | report)
    if wrong:
        raise DraftlineError(f"{output / 'report.json'}: verdict fail, {len(wrong)} wrong; the first: {wrong[0]}")
    for dtype, counts in report["dtypes"].items():
        print(f"{dtype}: {counts['identical']} of {counts['prompts']} identical, {counts['near_tie']} near-ties")
    print(f"drafts equal to our own forward: {report['parity']['equal_rounds']} of {report['parity']['rounds']} rounds; verdict pass")


if __name__ == "__main__":
    raise SystemExit(stage_main("gate", run))
