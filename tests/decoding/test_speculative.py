"""What vLLM is told about a drafter decides silently how well it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages import installed
from stages.artifacts import read_json
from stages.decoding.speculative import ngram_config, spec_config
from stages.errors import ArtifactError, DraftlineError
from stages.installed import Device, installed_device
from tests.drafters.kinds import write_checkpoint
from tests.drafters.shapes import config

CHECKPOINT = Path("/checkpoint")
DFLASH = {"algorithm": "dflash", "markov_rank": 0, "confidence_head": False, "confidence_head_with_markov": False}


@pytest.mark.parametrize(
    ("changes", "device", "method", "tokens"),
    [
        ({}, "cpu", "dflash", 4),
        ({}, "ascend", "dflash", 4),
        ({}, "cuda", "dspark", 4),
        ({"markov_head_type": "gated"}, "cuda", "dflash", 4),
        ({"markov_head_type": "rnn"}, "cuda", "dflash", 4),
        # The runner that serves it here feeds the anchor and K masks: five inputs, as in training, are four drafts.
        ({"sample_from_anchor": True}, "cpu", "dflash", 4),
        ({"sample_from_anchor": True}, "cuda", "dspark", 5),
        (DFLASH, "cpu", "dflash", 4),
        (DFLASH, "cuda", "dflash", 4),
    ],
)
def test_method_and_number_of_drafts(changes: dict[str, object], device: Device, method: str, tokens: int) -> None:
    exported = config(**changes).to_speculators("name", [])
    told = spec_config(CHECKPOINT, exported, device)
    # Understood by the plug-in's class alone.
    assert told.pop("use_local_argmax_reduction", False) == (exported["speculators_model_type"] == "dspark" and method == "dflash")
    assert told == {"method": method, "model": str(CHECKPOINT), "num_speculative_tokens": tokens}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("algorithm", "more"), [("eagle3", {}), ("draft_model", {}), ("ngram", {"prompt_lookup_min": 1, "prompt_lookup_max": 3})], ids=lambda value: str(value)
)
def test_what_drafts_token_by_token_is_vllm_s_own_everywhere(algorithm: str, more: dict[str, int], device: Device, tiny_verifier: Path, tmp_path: Path) -> None:
    exported = read_json(write_checkpoint(tmp_path, algorithm, tiny_verifier) / "config.json")
    assert spec_config(CHECKPOINT, exported, device) == {"method": algorithm, "model": str(CHECKPOINT), "num_speculative_tokens": 4} | more


def test_a_config_of_no_drafter_is_named() -> None:
    with pytest.raises(ArtifactError, match=r"^/checkpoint/config\.json: a drafter of kind 'medusa'; supported: dspark"):
        spec_config(CHECKPOINT, {"speculators_model_type": "medusa"}, "cpu")


def test_prompt_lookup() -> None:
    assert ngram_config(7, 1, 3) == {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_the_device_is_that_of_the_installed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_device() in ("cpu", "cuda", "ascend")
    monkeypatch.setattr(installed, "DISTRIBUTIONS", {"no-such-distribution-of-vllm": "cpu"})
    with pytest.raises(DraftlineError, match="no vLLM is installed"):
        installed_device()
