"""How much a champion drafts, by what its evaluation measured and by how its verifier is served here."""

from __future__ import annotations

import json

from flows.registry import DrafterVersion
from flows.serving.places import Places
from flows.workspace import WORKSPACES
from stages.decoding.costs import COSTS, CostError, this_machine
from stages.params import PARAMS_FILE, Params, read_params
from stages.serving.speculation import Speculation, plan_speculation


def served_params(places: Places, name: str) -> Params:
    """How a verifier's engines are started: by its workspace's params, else by the repository's."""
    workspace = places.root / WORKSPACES / name / PARAMS_FILE
    params = read_params(workspace if workspace.is_file() else places.root / PARAMS_FILE)
    return params.model_copy(update={"verifier": params.verifier.model_copy(update={"name": name})})


def speculation(params: Params, champion: DrafterVersion | None) -> Speculation:
    """Draft tokens by batch size. Costs of another machine, or of another dtype than is served, say nothing here: then it is always the same."""
    if champion is None or params.deploy.speculation == "fixed":
        return Speculation(None)
    report = {"verifier": champion.verifier, "checkpoint": champion.content, COSTS: json.loads(champion.costs)}
    label = f"{champion.name} version {champion.version}"
    try:
        return plan_speculation(report, this_machine("vllm"), params.engine.dtype, None, params.deploy.max_num_seqs, label)
    except CostError as error:
        return Speculation(None, f"always the same number of draft tokens: {error}")
