"""The command of the small process that stands where vLLM stands. (A module of its own: a flow's process should not import more.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stages.params import Params

TINY_ENGINE = Path(__file__).resolve().with_name("tiny_engine.py")
STARTUP_SECONDS = 12.0
PATIENT_SECONDS = 60.0
"""Where every new engine either comes up or ends, and the machine does something else too."""
DRAIN_SECONDS = 15


def tiny_plan(
    params: Params, device: str, verifier: Path, checkpoint: Path | None, config: dict[str, Any] | None, ranges: list[list[int]] | None
) -> dict[str, Any]:
    """As `build_plan`, for the small process."""
    argv = ["python", str(TINY_ENGINE), "--model", str(verifier), "--name", params.verifier.name, "--port", str(params.deploy.port)]
    if checkpoint is not None:
        assert config is not None
        argv += ["--speculative-config", json.dumps({"model": str(checkpoint), "ranges": ranges})]
    return {"served_by": "engine", "argv": argv, "env": {}, "notes": []}
