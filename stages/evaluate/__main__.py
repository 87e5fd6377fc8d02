"""Is the drafter any good? Acceptance, speed, outputs and a verdict, on held-out prompts.

    python -m stages.evaluate            (dvc repro evaluate)

The drafter beside the verifier alone and beside prompt lookup with and without a guard against loops. Writes `report.json`
(every numerator and denominator), `report.md` and `plots/*.png`; then fails where outputs are degraded.
`python -m stages.evaluate.compare` does the same for several drafters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.artifacts import digest_json, read_manifest, read_object, staged_directory, write_atomic, write_json
from stages.dataset import TokenSample, choose_per_kind, read_split
from stages.decoding.engine import engine_config
from stages.errors import ArtifactError, DraftlineError
from stages.evaluate.headline import headline
from stages.evaluate.measure import Evaluation
from stages.evaluate.store import Store
from stages.evaluate.subjects import read_drafter
from stages.pairing.identity import read_identity
from stages.pairing.lock import require_pair
from stages.pairing.store import verifier_directory
from stages.params import Params
from stages.process import OUTPUTS, stage_main

NAME = "drafter"


def held_out_prompts(prompts_per_kind: int) -> dict[str, list[TokenSample]]:
    """Kind → prompts of the evaluation split.

    Raises:
        ArtifactError: there are none.
    """
    samples = read_split(OUTPUTS / "prepare", "evaluation")
    if not samples:
        raise ArtifactError(f"{OUTPUTS / 'prepare' / 'evaluation'}: no held-out prompts; raise prepare.evaluation_fraction or name prepare.evaluation_inputs")
    return choose_per_kind(samples, prompts_per_kind)


def run(params: Params, output: Path) -> None:
    identity = read_identity()
    checkpoint = OUTPUTS / "convert" / "checkpoint"
    manifest = read_manifest(checkpoint, identity.digest)
    require_pair(checkpoint, identity)
    gate = read_object(OUTPUTS / "gate" / "report.json", "verdict", "checkpoint")
    content = digest_json(manifest["files"])
    if gate["verdict"] != "pass" or gate["checkpoint"] != content:
        raise DraftlineError(f"{OUTPUTS / 'gate' / 'report.json'}: this checkpoint has not passed the gate; run dvc repro gate")
    chosen = held_out_prompts(params.evaluate.prompts_per_kind)
    verifier = verifier_directory(identity)
    engine = engine_config(verifier, params.engine, params.verifier.trust_remote_code)
    drafter = read_drafter(NAME, checkpoint, identity)
    evaluation = Evaluation([drafter], chosen, verifier, engine, params.evaluate, Store(None, {}))
    evaluation.run()
    report = {"verifier": identity.digest, "checkpoint": content, **headline(evaluation.report(), NAME)}
    report["costs"] = evaluation.costs(drafter, identity.digest)
    write_reports(report, output)
    if report["failures"]:
        raise DraftlineError(f"degraded outputs: {'; '.join(report['failures'])}; see {output / 'report.md'}")
    print(f"acceptance length {report['acceptance_length']['macro']:.2f} (macro average), verdict {report['verdict']}; details: {output / 'report.md'}")


def write_reports(report: dict[str, Any], output: Path) -> None:
    """Figures and Markdown, then the numbers, last."""
    from stages.evaluate.plots import draw_all
    from stages.evaluate.report import markdown

    with staged_directory(output / "plots") as directory:
        draw_all(report, directory)
    write_atomic(output / "report.md", markdown(report))
    write_json(output / "report.json", report)


if __name__ == "__main__":
    raise SystemExit(stage_main("evaluate", run))
