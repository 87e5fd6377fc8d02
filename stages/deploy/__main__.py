"""Write the serving plan of the registered drafter.

    python -m stages.deploy              (dvc repro deploy)
    python -m stages.deploy.serve        run the plan (make serve)

The plan names the checkpoint's copy from the registry, never the workspace's. A pair that the lock rejects gets no
plan; the server checks the pair once more against the verifier's files before it starts. How much is drafted at each batch
size follows from what evaluate measured; where speculation does not pay, the verifier is served alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stages.artifacts import read_json, read_object, write_json
from stages.decoding.costs import this_machine
from stages.decoding.speculative import spec_config
from stages.errors import ArtifactError
from stages.installed import installed_device
from stages.pairing.identity import read_identity
from stages.pairing.lock import require_pair
from stages.pairing.store import verifier_directory
from stages.params import Params
from stages.process import OUTPUTS, stage_main
from stages.serving.fetch import fetch, prune
from stages.serving.plan import build_plan, installed_engine
from stages.serving.speculation import Speculation, plan_speculation

VERSION_KEYS = ("name", "version", "run_id", "content", "verifier", "tracking_uri")


def choose(params: Params, registered: dict[str, Any], draft_tokens: int) -> Speculation:
    """Draft tokens by batch size, from evaluate's report.

    Raises:
        ArtifactError: the report is about another checkpoint than the registered one.
        CostError: its costs were measured on another machine or pair.
    """
    if params.deploy.speculation == "fixed":
        return Speculation(None)
    path = OUTPUTS / "evaluate" / "report.json"
    report = read_object(path)
    if report.get("checkpoint") != registered["content"]:
        raise ArtifactError(f"{path}: about checkpoint {str(report.get('checkpoint'))[:12]}, registered is {registered['content'][:12]}; run dvc repro")
    return plan_speculation(report, this_machine("vllm"), params.engine.dtype, draft_tokens, params.deploy.max_num_seqs, str(path))


def run(params: Params, output: Path) -> None:
    identity = read_identity()
    registered = read_object(OUTPUTS / "register" / "version.json", *VERSION_KEYS)
    checkpoint = fetch(registered)
    require_pair(checkpoint, identity)
    device = installed_device() if params.deploy.device == "auto" else params.deploy.device
    verifier = Path(os.path.relpath(verifier_directory(identity)))
    config = read_json(checkpoint / "config.json")
    speculation = choose(params, registered, spec_config(checkpoint, config, device)["num_speculative_tokens"])
    drafter = None if speculation.alone else checkpoint
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
        "speculation": speculation.ranges,
        **build_plan(params, device, verifier, drafter, config, speculation.ranges),
    }
    write_json(output / "plan.json", plan)
    prune(checkpoint)
    how = "the verifier alone" if speculation.alone else f"drafted by the {plan['served_by']}"
    print(f"plan: {registered['name']} version {registered['version']} on {device}, {how}")
    for note in [*plan["notes"], *filter(None, [speculation.note])]:
        print(f"note: {note}")


if __name__ == "__main__":
    raise SystemExit(stage_main("deploy", run))
