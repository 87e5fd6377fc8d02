"""Does this drafter belong to this verifier? Field by field, before any forward pass.    python -m stages.lock"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stages.artifacts import read_manifest, write_json
from stages.errors import PairError
from stages.pairing.identity import Difference, read_identity
from stages.pairing.lock import all_checks, refusal
from stages.pairing.store import revalidate
from stages.params import Params
from stages.process import OUTPUTS, stage_main


def run(params: Params, output: Path) -> None:
    report = output / "report.json"
    report.unlink(missing_ok=True)  # a verdict of an earlier pair must not outlive a failure below
    identity = read_identity()
    revalidate(identity)
    checkpoint = OUTPUTS / "convert" / "checkpoint"
    checks = all_checks(checkpoint, identity)
    found = [Difference(check.field, check.expected, check.actual) for check in checks if not check.match]
    content: dict[str, Any] = {
        "verdict": "mismatch" if found else "match",
        "verifier": identity.digest,
        "checked": [{"field": check.field, "drafter": check.expected, "verifier": check.actual, "match": check.match} for check in checks],
    }
    if not found:
        read_manifest(checkpoint, identity.digest)
    write_json(report, content)
    if found:
        raise PairError(refusal(checkpoint, found))
    print(f"lock: {len(checks)} fields match, verifier {identity.digest[:16]}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(stage_main("lock", run))
