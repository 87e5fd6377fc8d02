"""Embedding, head and final norm read from the files are those of the verifier: a drafter trained on others learns nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.errors import ArtifactError
from stages.pairing.frozen import load_frozen
from tests.pairing.edits import copy_model, edit_json
from tests.tiny import make_verifier


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "150KB"])
def test_they_continue_the_models_own_last_layer(tied: bool, shard: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = make_verifier(tmp_path / "model", layers=2, tied=tied, max_shard_size=shard)
    frozen = load_frozen(directory, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.arange(4, 40)[None]
    residual = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: residual.append(inputs[0]))
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.equal(frozen.embedding[ids], model.get_input_embeddings()(ids))
    assert (frozen.lm_head is frozen.embedding) == tied
    normed = torch.nn.functional.rms_norm(residual[0], (64,), frozen.norm_weight, frozen.norm_eps)
    torch.testing.assert_close(normed @ frozen.lm_head.T, logits, rtol=1e-4, atol=1e-5)


def test_dtype_and_bf16_weights(tmp_path: Path) -> None:
    directory = make_verifier(tmp_path / "model", layers=1, dtype="bfloat16")
    assert {t.dtype for t in (load_frozen(directory, torch.float32).embedding, load_frozen(directory, torch.float32).norm_weight)} == {torch.float32}
    assert load_frozen(directory, torch.bfloat16).lm_head.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"logits_scaling": 8}, "logits_scaling"),
    ],
)
def test_a_model_whose_output_is_something_else_is_refused(change: dict[str, object], named: str, tiny_verifier: Path, tmp_path: Path) -> None:
    model = copy_model(tiny_verifier, tmp_path / "model")
    edit_json(model, "config.json", lambda c: c.update(change))
    with pytest.raises(ArtifactError, match=named):
        load_frozen(model, torch.float32)
