"""Acceptance and speed of the drafter on held-out prompts, through vLLM in the served dtype.

    python -m stages.evaluate            (dvc repro evaluate)

Three engines: the drafter, prompt lookup with as many draft tokens, and the verifier alone. Writes `report.json`
(every numerator and denominator), `report.md` and `plots/*.png`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.artifacts import digest_json, read_json, read_manifest, staged_directory, write_atomic, write_json
from stages.dataset import TokenSample, choose_per_kind, read_split
from stages.decoding.engine import Completion, EngineConfig, Request, engine_config
from stages.decoding.isolated import EngineProcess
from stages.decoding.speculative import ngram_config, spec_config
from stages.errors import ArtifactError, DraftlineError
from stages.evaluate.acceptance import positions_by_kind, prompt_count
from stages.evaluate.report import markdown
from stages.evaluate.speed import Pair, Timed, measure, summarise
from stages.evaluate.statistics import acceptance_length, paired_difference
from stages.pairing.identity import read_identity
from stages.pairing.lock import require_pair
from stages.pairing.store import verifier_directory
from stages.params import Evaluate, Params
from stages.process import OUTPUTS, stage_main

WARM_UP_TOKENS = 4


def speed_requests(chosen: dict[str, list[TokenSample]], settings: Evaluate) -> list[Request]:
    """The first prompts of each kind in turn, as many as the speed measurement takes."""
    longest = max(len(group) for group in chosen.values())
    in_turn = [group[index] for index in range(longest) for group in chosen.values() if index < len(group)]
    return [Request(sample.id, sample.prompt_ids, settings.speed_tokens) for sample in in_turn[: settings.speed_prompts]]


def timed(engine: EngineProcess, request: Request) -> Timed:
    """Decode one prompt: its tokens and the seconds of the engine, process communication apart."""
    (completion,) = engine.generate([request])
    return len(completion.token_ids), engine.seconds


def decode(
    engine: EngineConfig, speculative: dict[str, Any], lookup: dict[str, Any], requests: list[Request], fast: list[Request], repeats: int
) -> tuple[list[Completion], list[Completion], list[Pair]]:
    """Run the three engines, at most two alive at a time.

    Args:
        engine: the verifier alone.
        speculative, lookup: vLLM's speculative config of the drafter and of prompt lookup.
        requests: for acceptance, decoded together; fast: for speed, one at a time.
    Returns:
        The drafter's completions, prompt lookup's, and the paired speed measurements.
    """
    with EngineProcess(replace(engine, speculative=lookup), "evaluate: prompt lookup") as process:
        looked_up = process.generate(requests)
    with (
        EngineProcess(replace(engine, speculative=speculative), "evaluate: drafter") as drafter,
        EngineProcess(engine, None) as alone,
    ):
        drafted = drafter.generate(requests)
        warm_up = replace(fast[0], max_tokens=WARM_UP_TOKENS)
        for process in (drafter, alone):
            process.desc = None
            process.generate([warm_up])
        pairs = measure(lambda request: timed(alone, request), lambda request: timed(drafter, request), fast, repeats, "evaluate: speed")
    return drafted, looked_up, pairs


def run(params: Params, output: Path) -> None:
    identity = read_identity()
    checkpoint = OUTPUTS / "convert" / "checkpoint"
    manifest = read_manifest(checkpoint, identity.digest)
    require_pair(checkpoint, identity)
    gate = read_json(OUTPUTS / "gate" / "report.json")
    content = digest_json(manifest["files"])
    if gate["verdict"] != "pass" or gate["checkpoint"] != content:
        raise DraftlineError(f"{OUTPUTS / 'gate' / 'report.json'}: this checkpoint has not passed the gate; run dvc repro gate")
    samples = read_split(OUTPUTS / "prepare", "evaluation")
    if not samples:
        raise ArtifactError(f"{OUTPUTS / 'prepare' / 'evaluation'}: no held-out prompts; raise prepare.evaluation_fraction")
    settings = params.evaluate
    chosen = choose_per_kind(samples, settings.prompts_per_kind)
    kinds = {sample.id: kind for kind, group in chosen.items() for sample in group}
    requests = [Request(sample.id, sample.prompt_ids, settings.max_tokens) for group in chosen.values() for sample in group]
    config = read_json(checkpoint / "config.json")
    speculative = spec_config(checkpoint, config)
    draft_tokens: int = speculative["num_speculative_tokens"]
    engine = engine_config(verifier_directory(identity), params.engine, params.verifier.trust_remote_code)
    fast = speed_requests(chosen, settings)
    drafted, looked_up, pairs = decode(
        engine, speculative, ngram_config(draft_tokens, settings.ngram_min, settings.ngram_max), requests, fast, settings.repeats
    )
    ours, theirs = ([prompt_count(completion, kinds[completion.id]) for completion in group] for group in (drafted, looked_up))
    length = acceptance_length(ours)
    report = {
        "verifier": identity.digest,
        "checkpoint": content,
        "dtype": params.engine.dtype,
        "draft_tokens": draft_tokens,
        "prompts": len(requests),
        "max_tokens": settings.max_tokens,
        "acceptance_length": length,
        "per_position": positions_by_kind(drafted, kinds, draft_tokens),
        "prompt_lookup": {
            "ngram_min": settings.ngram_min,
            "ngram_max": settings.ngram_max,
            "acceptance_length": acceptance_length(theirs),
            "per_position": positions_by_kind(looked_up, kinds, draft_tokens),
        },
        "lead_over_prompt_lookup": paired_difference(ours, theirs).as_json(),
        "speed": {"prompts": len(fast), "max_tokens": settings.speed_tokens, **summarise(pairs)},
    }
    write_reports(report, output)
    print(f"acceptance length {length['macro']:.2f} (macro average), details: {output / 'report.md'}")


def write_reports(report: dict[str, Any], output: Path) -> None:
    """Figures and Markdown, then the numbers, last."""
    from stages.evaluate.plots import draw_all

    with staged_directory(output / "plots") as directory:
        draw_all(report, directory)
    write_atomic(output / "report.md", markdown(report))
    write_json(output / "report.json", report)


if __name__ == "__main__":
    raise SystemExit(stage_main("evaluate", run))
