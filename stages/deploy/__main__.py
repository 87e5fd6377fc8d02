"""Write the serving plan of the registered drafter.

    python -m stages.deploy              (dvc repro deploy)
    python -m stages.deploy.serve        run the plan (make serve)

The plan names the checkpoint's copy from the registry, never the workspace's. A pair that the lock rejects gets no
plan; the server checks the pair once more against the verifier's files before it starts.
"""

from __future__ import annotations

import os
from pathlib import Path

from stages.artifacts import read_json, write_json
from stages.decoding.speculative import installed_device
from stages.pairing.identity import read_identity
from stages.pairing.lock import require_pair
from stages.pairing.store import verifier_directory
from stages.params import Params
from stages.process import OUTPUTS, stage_main
from stages.serving.fetch import fetch, prune
from stages.serving.plan import build_plan, installed_engine


def run(params: Params, output: Path) -> None:
    identity = read_identity()
    registered = read_json(OUTPUTS / "register" / "version.json")
    checkpoint = fetch(registered)
    require_pair(checkpoint, identity)
    device = installed_device() if params.deploy.device == "auto" else params.deploy.device
    verifier = Path(os.path.relpath(verifier_directory(identity)))
    plan = {
        "registered": registered,
        "verifier": {"digest": identity.digest, "directory": str(verifier)},
        "checkpoint": str(checkpoint),
        "device": device,
        "engine": installed_engine(),
        "model": params.verifier.name,
        "host": params.deploy.host,
        "port": params.deploy.port,
        "startup_seconds": params.deploy.startup_seconds,
        "max_model_len": params.engine.max_model_len,
        **build_plan(params, device, verifier, checkpoint, read_json(checkpoint / "config.json")),
    }
    write_json(output / "plan.json", plan)
    prune(checkpoint)
    print(f"plan: {registered['name']} version {registered['version']} on {device}, drafted by the {plan['served_by']}")
    for note in plan["notes"]:
        print(f"note: {note}")


if __name__ == "__main__":
    raise SystemExit(stage_main("deploy", run))
