"""The result of a whole run on one screen.

    python -m stages.evaluate.summary            (last command of `make demo`)

Reads the reports that the stages wrote; it measures nothing and writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stages.artifacts import read_json, read_manifest, read_object
from stages.errors import DraftlineError
from stages.evaluate.tables import Row, percent, table
from stages.pairing.identity import VerifierIdentity, read_identity
from stages.pairing.shapes import algorithm_of
from stages.params import Params, read_params
from stages.process import OUTPUTS


def verifier_line(params: Params, identity: VerifierIdentity) -> str:
    architecture = (identity.architecture.get("architectures") or ["?"])[0]
    method = identity.quantization["method"]
    quantization = "not quantised" if method == "none" else f"{method} {identity.quantization['bits']} bits"
    return (
        f"{params.verifier.name} · {architecture}, {identity.num_layers} layers × {identity.hidden_size}, vocabulary {identity.vocab_size}, "
        f"{quantization} · identity {identity.digest[:12]}"
    )


def drafter_line(config: dict[str, Any], files: dict[str, Any]) -> str:
    """What the drafter is, from the checkpoint's `config.json` and the manifest's file table."""
    algorithm, own = algorithm_of(config), config.get("draftline", {})
    if algorithm == "ngram":
        return f"ngram · {own['ngram_min']} to {own['ngram_max']} tokens looked up, up to {own['draft_tokens']} draft tokens, no weights"
    layers = config.get("transformer_layer_config", config)["num_hidden_layers"]
    head = f", Markov rank {config['markov_rank']} ({config['markov_head_type']})" if config.get("markov_rank") else ""
    draft_tokens = own["draft_tokens"] if own else config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    vocabulary = config.get("draft_vocab_size") or config["vocab_size"]
    megabytes = files["model.safetensors"]["bytes"] / 1e6
    return f"{algorithm} · {layers} layers{head}, {draft_tokens} draft tokens, vocabulary {vocabulary} · {megabytes:.0f} MB"


def gate_facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    parity = report["parity"]
    return [
        ("gate", report["verdict"]),
        *(
            (f"  {dtype}", f"{tally['identical']} of {tally['prompts']} prompts identical, {tally['near_tie']} near-ties, {tally['wrong']} wrong")
            for dtype, tally in report["dtypes"].items()
        ),
        ("  drafts", f"{parity['equal_rounds']} of {parity['rounds']} rounds equal to our own forward"),
    ]


def summary(outputs: Path, params: Params) -> str:
    """The table.

    Raises:
        ArtifactError: a stage's output is missing.
    """
    identity = read_identity(outputs / "verifier" / "identity.json")
    checkpoint = outputs / "convert" / "checkpoint"
    manifest = read_manifest(checkpoint, verify=False)
    evaluation = read_object(outputs / "evaluate" / "report.json", "speed", "verdict", "reason", "acceptance_length", "per_position", "prompt_lookup")
    version = read_object(outputs / "register" / "version.json", "name", "version")
    speed = evaluation["speed"]
    ratio = speed["ratio"]
    facts = [
        ("verifier", verifier_line(params, identity)),
        ("drafter", drafter_line(read_json(checkpoint / "config.json"), manifest["files"])),
        *gate_facts(read_object(outputs / "gate" / "report.json", "dtypes", "parity")),
        ("registered", f"{version['name']} version {version['version']}"),
        ("verdict", f"{evaluation['verdict']}: {evaluation['reason']}"),
        (
            "speed",
            f"{speed['drafted']['median']:.1f} against {speed['baseline']['median']:.1f} tokens/s, one prompt at a time: "
            f"× {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
        ),
    ]
    width = max(len(name) for name, _ in facts)
    lines = ["", *(f"{name.ljust(width)}  {text}" for name, text in facts), ""]
    lines += ["Acceptance length, tokens per verifier pass (1 = no speculation), on held-out prompts", ""]
    # Counts and intervals stand in report.md.
    lines += table(("kind", "prompts", "drafter", "guarded prompt lookup"), _lengths(evaluation))
    lines += ["", "Acceptance per position of the draft block", "", *table(*_positions(evaluation)), ""]
    plots = sorted((outputs / "evaluate" / "plots").glob("*.png"))
    lines += ["plots   " + "\n        ".join(str(path) for path in plots), f"report  {outputs / 'evaluate' / 'report.md'}", ""]
    return "\n".join(lines)


def _lengths(evaluation: dict[str, Any]) -> list[Row]:
    ours, theirs = evaluation["acceptance_length"], evaluation["prompt_lookup"]["guarded"]["acceptance_length"]
    rows: list[Row] = [
        (kind, str(entry["prompts"]), f"{entry['value']:.2f}", f"{theirs['per_kind'][kind]['value']:.2f}") for kind, entry in ours["per_kind"].items()
    ]
    return [*rows, ("macro average", "", f"{ours['macro']:.2f}", f"{theirs['macro']:.2f}")]


def _positions(evaluation: dict[str, Any]) -> tuple[Row, list[Row]]:
    tables = {"all prompts": evaluation["per_position"]["all"], **evaluation["per_position"]["per_kind"]}
    header = ["accepted", *(str(row["position"]) for row in tables["all prompts"])]
    rows: list[Row] = [[name, *(percent(row["rate"]) for row in rows)] for name, rows in tables.items()]
    rows.append(["up to here, all", *(percent(row["cumulative"]) for row in tables["all prompts"])])
    return header, rows


def main() -> int:
    try:
        print(summary(OUTPUTS, read_params()))
    except DraftlineError as error:
        print(f"draftline summary: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
