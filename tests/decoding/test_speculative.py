"""What vLLM is told about a drafter decides silently how well it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.decoding import speculative
from stages.decoding.speculative import Device, installed_device, ngram_config, spec_config
from stages.errors import DraftlineError
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


def test_prompt_lookup() -> None:
    assert ngram_config(7, 1, 3) == {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_the_device_is_that_of_the_installed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_device() in ("cpu", "cuda", "ascend")
    monkeypatch.setattr(speculative, "DISTRIBUTIONS", {"no-such-distribution-of-vllm": "cpu"})
    with pytest.raises(DraftlineError, match="no vLLM is installed"):
        installed_device()
