"""Every algorithm comes back from its directory alone, and says no to what does not belong to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.convert.__main__ import different
from stages.drafters.algorithms import ALGORITHMS, checkpoint_algorithm, trained_algorithm
from stages.drafters.draft import Drafts
from stages.errors import ArtifactError, DraftlineError, PairError
from stages.pairing.frozen import load_frozen
from stages.pairing.identity import compute_identity
from stages.pairing.lock import check_pair, require_pair
from tests.drafters.kinds import drafter_params, make_drafter, target, write_checkpoint
from tests.pairing.edits import copy_model, edit_json, flip_weight_byte
from tests.tiny import make_verifier

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "eagle3, reduced vocabulary": ("eagle3", {"draft_ids": torch.arange(1, 512, 2)}),
    "eagle3, one layer": ("eagle3", {"layer_ids": [4]}),
    "draft_model": ("draft_model", {}),
    "ngram": ("ngram", {}),
}


def redraft(algorithm: str, drafter: Any) -> Drafts:
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(4, 12, (24,), generator=g).tolist()
    layers = len(getattr(drafter, "config", drafter).layer_ids)
    context = torch.randn(24, layers * 64, generator=g) if layers else None
    return ALGORITHMS[algorithm].redraft(drafter, tokens, context, torch.tensor([3, 11, 23]))


@pytest.mark.parametrize("case", CASES)
def test_read_back_from_disk_alone_drafts_the_same(case: str, tiny_verifier: Path, tmp_path: Path) -> None:
    algorithm, changes = CASES[case]
    made = make_drafter(algorithm, tiny_verifier, **changes)
    ends = load_frozen(tiny_verifier, torch.float32)
    ALGORITHMS[algorithm].save_trained(tmp_path / "trained", made, torch.float32)
    trained = trained_algorithm(tmp_path / "trained").load_trained(tmp_path / "trained", ends, torch.float32)
    write_checkpoint(tmp_path / "checkpoint", algorithm, tiny_verifier, trained)
    again = checkpoint_algorithm(tmp_path / "checkpoint").load(tmp_path / "checkpoint", ends, torch.float32)
    assert different(made, trained) == different(made, again) == []
    ours, theirs = redraft(algorithm, made), redraft(algorithm, again)
    assert torch.equal(ours.tokens, theirs.tokens)
    if ours.logits is not None:
        assert theirs.logits is not None
        # The weights are equal bit for bit; where a tensor lies in memory may still choose another kernel.
        torch.testing.assert_close(theirs.logits, ours.logits, rtol=1e-5, atol=1e-5)
    assert check_pair(tmp_path / "checkpoint", compute_identity(tiny_verifier)) == []


@pytest.mark.parametrize("algorithm", ["eagle3", "draft_model", "ngram"])
def test_a_changed_verifier_or_weight_is_refused(algorithm: str, tiny_verifier: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", algorithm, tiny_verifier)
    flip_weight_byte(copy_model(tiny_verifier, tmp_path / "other"))
    assert [item.field for item in check_pair(checkpoint, compute_identity(tmp_path / "other"))] == ["weights"]
    weights = checkpoint / "model.safetensors"
    if weights.is_file():
        flip_weight_byte(checkpoint)
    else:
        weights.write_bytes(b"not its own")
    assert [item.field for item in check_pair(checkpoint, compute_identity(tiny_verifier))] == ["drafter.weights"]


def test_a_draft_model_with_another_tokenizer_is_one_clear_line(tiny_verifier: Path, tmp_path: Path) -> None:
    """Engines compare no tokenizers: its ids would mean other words, and nothing would be accepted."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "draft_model", tiny_verifier)
    make_verifier(tmp_path / "other", vocab=400)
    shutil.copy(tmp_path / "other" / "tokenizer.json", checkpoint / "tokenizer.json")
    with pytest.raises(PairError, match=r"1 field differs: drafter\.tokenizer\.tokenizer\.json: drafter \w+, verifier \w+$"):
        require_pair(checkpoint, compute_identity(tiny_verifier))
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises((PairError, ArtifactError), match="tokenizer"):
        require_pair(checkpoint, compute_identity(tiny_verifier))


def test_a_directory_that_names_no_drafter_is_one_clear_line(tiny_verifier: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "ngram", tiny_verifier)
    edit_json(checkpoint, "config.json", lambda content: content.pop("draftline"))
    with pytest.raises(ArtifactError, match=r"config\.json: key 'speculators_model_type' or 'draftline' is missing"):
        require_pair(checkpoint, compute_identity(tiny_verifier))
    edit_json(checkpoint, "config.json", lambda content: content.update(speculators_model_type="mtp"))
    with pytest.raises(ArtifactError, match="a drafter of kind 'mtp'; supported: dspark, dflash, eagle3, draft_model, ngram"):
        require_pair(checkpoint, compute_identity(tiny_verifier))


@pytest.mark.parametrize(
    ("algorithm", "changes", "named"),
    [
        ("draft_model", {"num_layers": 7}, r"drafter\.num_layers = 7: a draft model takes at most the verifier's layers, 6"),
        ("eagle3", {"draft_vocab_size": 513}, r"drafter\.draft_vocab_size = 513: must be at most the verifier's vocabulary, 512"),
    ],
)
def test_a_knob_that_the_verifier_cannot_satisfy_is_named(algorithm: str, changes: dict[str, Any], named: str, tiny_verifier: Path) -> None:
    with pytest.raises(DraftlineError, match=named):
        ALGORITHMS[algorithm].configure(drafter_params(algorithm, **changes), target(tiny_verifier, [1, 3, 5]))


def test_a_checkpoint_of_another_make_is_refused_by_its_flag(tiny_verifier: Path, tmp_path: Path) -> None:
    """Read as ours, its layer would add another residual, unseen."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "eagle3", tiny_verifier)
    content = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(content | {"norm_before_residual": False}))
    with pytest.raises(ArtifactError, match="norm_before_residual = False; supported: True"):
        ALGORITHMS["eagle3"].load(checkpoint, load_frozen(tiny_verifier, torch.float32), torch.float32)
