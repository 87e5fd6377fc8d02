"""Everything that register reads: a tiny pair that has passed lock, gate and evaluation."""

from __future__ import annotations

from pathlib import Path

from stages.artifacts import digest_json, read_manifest, write_json, write_manifest
from stages.pairing.identity import VerifierIdentity
from tests.gate.pair import make_bigram_verifier, write_outputs
from tests.paths import REPOSITORY


def write_evidence(outputs: Path, verifier: str) -> None:
    """Reports of gate and evaluation about the checkpoint that lies in `outputs`."""
    subjects = {"verifier": verifier, "checkpoint": digest_json(read_manifest(outputs / "convert" / "checkpoint")["files"])}
    write_json(outputs / "gate" / "report.json", {"verdict": "pass", **subjects})
    evaluation = {
        **subjects,
        "acceptance_length": {"macro": 1.625, "per_kind": {"code": {"value": 1.5}, "story": {"value": 1.75}}},
        "per_position": {"all": [{"position": 1, "rate": 0.5}]},
    }
    write_json(outputs / "evaluate" / "report.json", evaluation)


def write_proven(root: Path, verifier: Path) -> VerifierIdentity:
    """Fill `root/outputs`, and put params.yaml beside it; the current directory must be `root`."""
    identity = write_outputs(root, verifier)
    outputs = root / "outputs"
    write_manifest(outputs / "prepare", identity.digest)
    write_evidence(outputs, identity.digest)
    params = (REPOSITORY / "params.yaml").read_text(encoding="utf-8")
    # As the costs in evaluate's report say, on whatever machine this runs.
    (root / "params.yaml").write_text(params.replace("dtype: auto", "dtype: bfloat16"), encoding="utf-8")
    return identity


__all__ = ["make_bigram_verifier", "write_evidence", "write_proven"]
