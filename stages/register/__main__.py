"""Register the converted checkpoint as a version of `drafter.<verifier name>`, alias `candidate`.

    python -m stages.register            (dvc repro register)

What is registered is what was proven: the directory must still be what convert wrote, belong to the current
verifier, and have passed the gate. Writes `outputs/register/version.json`; deploy serves from the registry by it.
"""

from __future__ import annotations

from pathlib import Path

from stages.artifacts import digest_json, read_json, read_manifest, read_object, write_json
from stages.errors import ArtifactError, DraftlineError
from stages.pairing.identity import VerifierIdentity, read_identity
from stages.pairing.lock import LOCK_FILE, require_pair
from stages.params import Params
from stages.process import OUTPUTS, stage_main
from stages.register.registry import Candidate, register
from stages.tracking import redacted

EVIDENCE: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
    ("lock", "match", ("verifier",)),
    ("gate", "pass", ("verifier", "checkpoint")),
    ("evaluate", None, ("verifier", "checkpoint")),
)
"""Stage, the verdict that its report must hold, and what the report must be about."""


def read_candidate(outputs: Path, identity: VerifierIdentity) -> Candidate:
    """The checkpoint below `outputs` and the evidence for it.

    Raises:
        ArtifactError: a missing, altered or added file; a report that is absent, or about another checkpoint or verifier.
        PairError: the checkpoint belongs to another verifier.
        DraftlineError: the lock's or the gate's verdict refuses it.
    """
    checkpoint = outputs / "convert" / "checkpoint"
    manifest = read_manifest(checkpoint, identity.digest)
    require_pair(checkpoint, identity)
    subjects = {"verifier": identity.digest, "checkpoint": digest_json(manifest["files"])}
    for stage, wanted, names in EVIDENCE:
        path = outputs / stage / "report.json"
        report = read_object(path)
        if wanted is not None and report.get("verdict") != wanted:
            raise DraftlineError(f"{path}: verdict = {report.get('verdict')!r}: only a drafter with verdict {wanted!r} is registered")
        for name in names:
            found = str(report.get(name))
            if found != subjects[name]:
                raise ArtifactError(f"{path}: {name} = {found[:12]}, the current one is {subjects[name][:12]}; run dvc repro")
    evaluation = read_object(outputs / "evaluate" / "report.json", "acceptance_length", "per_position")
    return Candidate(
        directory=checkpoint,
        files=manifest["files"],
        verifier=identity.digest,
        lock=read_json(checkpoint / LOCK_FILE),
        gate="pass",
        acceptance={**evaluation["acceptance_length"], "per_position": evaluation["per_position"]},
        data=digest_json(read_object(outputs / "prepare" / "manifest.json", "files")["files"]),
        costs=evaluation.get("costs"),
    )


def run(params: Params, output: Path) -> None:
    identity = read_identity()
    candidate = read_candidate(OUTPUTS, identity)
    uri = params.mlflow.tracking_uri
    version = register(uri, params.mlflow.experiment, f"drafter.{params.verifier.name}", candidate)
    write_json(
        output / "version.json",
        {
            "name": version.name,
            "version": int(version.version),
            "run_id": version.run_id,
            "content": candidate.content,
            "verifier": candidate.verifier,
            "tracking_uri": redacted(uri),
        },
    )
    print(f"registered {version.name} version {version.version} ({redacted(uri)})")


if __name__ == "__main__":
    raise SystemExit(stage_main("register", run))
