"""The real engine drafts, token by token, what our own forward of each algorithm drafts: no state, position or token is one off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.decoding.isolated import EngineProcess
from stages.decoding.parity import draft_parity
from tests.decoding.pairs import engine_config, requests
from tests.drafters.kinds import write_checkpoint
from tests.gate.pair import make_bigram_verifier

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "eagle3, reduced vocabulary, one layer": ("eagle3", {"draft_ids": torch.arange(1, 512, 2), "layer_ids": [4]}),
    "eagle3, five extracted layers": ("eagle3", {"layer_ids": [1, 2, 3, 4, 6], "draft_tokens": 6}),
    "draft_model": ("draft_model", {}),
    "ngram": ("ngram", {}),
}


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_the_engine_drafts_what_we_draft_and_stays_lossless(case: str, tmp_path: Path) -> None:
    algorithm, changes = CASES[case]
    verifier = make_bigram_verifier(tmp_path / "verifier", strength=0.3)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", algorithm, verifier, **changes)
    asked = requests(5, max_tokens=48)
    with EngineProcess(engine_config(verifier)) as engine:
        plain = engine.generate(asked)
    with EngineProcess(engine_config(verifier, checkpoint)) as engine:
        drafted = engine.generate(asked)
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    parity = draft_parity(checkpoint, verifier, [request.prompt_ids for request in asked], drafted, 200)
    assert parity.rounds >= 20
    assert [mismatch.line() for mismatch in parity.mismatches if mismatch.gap >= 1e-3] == []
