"""`drafter.algorithm` selects: the same graph trains, proves, registers and serves each of them, with the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from stages.artifacts import read_json, read_manifest
from stages.servers import free_port
from tests.gate.pair import make_chatting_verifier
from tests.pipeline.clone import SMALL, Clone
from tests.tiny import MASK_TOKEN_ID

NO_HEADS = {"markov_rank": 0, "confidence_head": False}
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": NO_HEADS | {"num_layers": 1, "draft_tokens": 4, "draft_vocab_size": 256},
    "draft_model": NO_HEADS | {"num_layers": 2, "draft_tokens": 4},
    "ngram": NO_HEADS | {"draft_tokens": 4, "ngram_min": 1, "ngram_max": 3},
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """Prepared and extracted once for all algorithms."""
    return Clone(tmp_path_factory.mktemp("clone") / "repository", make_chatting_verifier(tmp_path_factory.mktemp("algorithms") / "verifier"))


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_from_params_to_a_server_that_drafts(algorithm: str, clone: Clone) -> None:
    # Whether drafting pays for a verifier this small is the machine's mood; what is asked is whether it is served.
    deploy = SMALL["deploy"] | {"port": free_port(), "startup_seconds": 600, "speculation": "fixed"}
    clone.write_params(SMALL | {"drafter": DRAFTERS[algorithm] | {"algorithm": algorithm, "mask_token_id": MASK_TOKEN_ID}, "deploy": deploy})
    run = clone.repro()
    assert run.status == 0, run.output[-4000:]
    outputs = clone.root / "outputs"
    gate, evaluation, plan = (read_json(outputs / name) for name in ("gate/report.json", "evaluate/report.json", "deploy/plan.json"))
    assert gate["verdict"] == "pass"
    assert gate["dtypes"]["float32"]["wrong"] == gate["parity"]["wrong"] == 0
    assert gate["parity"]["rounds"] > 0
    assert gate["draft_tokens"] == evaluation["draft_tokens"] == 4
    told = json.loads(plan["argv"][plan["argv"].index("--speculative-config") + 1])
    assert (told["method"], told["model"], plan["served_by"]) == (algorithm, plan["checkpoint"], "engine")
    read_manifest(clone.root / plan["checkpoint"], plan["verifier"]["digest"])
    # It follows most of the tiny verifier's bigrams once it is trained; looked up, some repeat.
    assert evaluation["acceptance_length"]["macro"] > 1.0
    served = subprocess.run(
        [sys.executable, "-m", "stages.deploy.serve", "--once"], cwd=clone.root, env=clone.environment, capture_output=True, text=True, timeout=900
    )
    assert served.returncode == 0, served.stdout + served.stderr
    assert "acceptance length" in served.stdout
