"""No engine compares a drafter with its verifier: a wrong pair runs, and accepts nothing. The lock is what refuses it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.errors import ArtifactError, PairError, ParamsError
from stages.pairing.identity import VerifierIdentity, compute_identity
from stages.pairing.lock import LOCK_FILE, build_lock, check_layer_ids, check_pair, read_lock, require_pair
from tests.pairing.checkpoints import drafter_config, write_checkpoint
from tests.pairing.edits import Edit, copy_model, edit_json, flip_weight_byte
from tests.tiny import make_verifier


@pytest.fixture(scope="module")
def identity(tiny_verifier: Path) -> VerifierIdentity:
    return compute_identity(tiny_verifier)


@pytest.fixture
def checkpoint(identity: VerifierIdentity, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", identity)


def test_the_pair_matches_and_a_moved_verifier_still_does(checkpoint: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    moved = copy_model(tiny_verifier, tmp_path / "downloaded again")
    assert check_pair(checkpoint, compute_identity(moved)) == []
    require_pair(shutil.move(checkpoint, tmp_path / "elsewhere"), compute_identity(moved))


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (lambda d: flip_weight_byte(d), "weights"),
        (lambda d: edit_json(d, "config.json", lambda c: c.update(quantization_config={"quant_method": "awq", "bits": 4})), "quantization.bits"),
        (lambda d: (d / "chat_template.jinja").write_text("{{ messages }}") and None, "chat_template"),
        (lambda d: edit_json(d, "tokenizer.json", lambda c: c["model"]["merges"].pop()), "tokenizer.tokenizer.json"),
        (lambda d: edit_json(d, "generation_config.json", lambda c: c.update(eos_token_id=0)), "generation.eos_token_ids"),
    ],
)
def test_a_changed_verifier_is_refused_with_field_and_both_values(
    edit: Edit, field: str, checkpoint: Path, identity: VerifierIdentity, tiny_verifier: Path, tmp_path: Path
) -> None:
    edit(model := copy_model(tiny_verifier, tmp_path / "model"))
    found = {item.field: item for item in check_pair(checkpoint, compute_identity(model))}
    assert field in found
    with pytest.raises(PairError) as error:
        require_pair(checkpoint, compute_identity(model))
    message = str(error.value)
    assert "\n" not in message
    for item in found.values():
        assert f"{item.field}: drafter " in message
        for value in (item.expected, item.actual):
            assert (value[:16] if isinstance(value, str) else "absent" if value is None else json.dumps(value)) in message


def test_every_differing_field_is_named_not_only_the_first(checkpoint: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    model = copy_model(tiny_verifier, tmp_path / "model")
    flip_weight_byte(model)
    (model / "chat_template.jinja").unlink()
    edit_json(model, "config.json", lambda c: c.update(dtype="bfloat16"))
    with pytest.raises(PairError, match=r"4 fields differ: chat_template.*quantization\.bits.*quantization\.dtype.*weights"):
        require_pair(checkpoint, compute_identity(model))


def test_a_verifier_with_fewer_layers_of_the_same_width_is_refused_by_number(checkpoint: Path, tmp_path: Path) -> None:
    """Elsewhere this is a shape error at the first decode step, or none at all."""
    shallow = compute_identity(make_verifier(tmp_path / "shallow", layers=3))
    found = {item.field: item for item in check_pair(checkpoint, shallow)}
    assert found["num_layers"].actual == 3
    with pytest.raises(PairError, match=r"num_layers: drafter at least 5 \(tapped layers \[1, 3, 5\]\), verifier 3"):
        require_pair(checkpoint, shallow)


def test_another_width_and_vocabulary_are_refused_by_number(checkpoint: Path, tmp_path: Path) -> None:
    other = compute_identity(make_verifier(tmp_path / "wide", hidden=96, vocab=320))
    found = {item.field: (item.expected, item.actual) for item in check_pair(checkpoint, other)}
    assert found["hidden_size"] == (64, 96)
    assert found["vocab_size"] == (512, 320)


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (lambda c: edit_json(c, "config.json", lambda d: d.update(aux_hidden_state_layer_ids=[1, 5, 3])), "drafter.aux_hidden_state_layer_ids"),
        (lambda c: edit_json(c, "config.json", lambda d: d.update(aux_hidden_state_layer_ids=[1, 3])), "drafter.fc.weight.shape"),
        (lambda c: edit_json(c, "config.json", lambda d: d.update(mask_token_id=4)), "drafter.mask_token_id"),
        (lambda c: edit_json(c, "config.json", lambda d: d.update(draft_vocab_size=300)), "drafter.draft_vocab_size"),
        (lambda c: edit_json(c, "config.json", lambda d: d["transformer_layer_config"].update(vocab_size=256)), "drafter.vocab_size"),
        (lambda c: edit_json(c, "config.json", lambda d: d.update(target_hidden_size=128)), "drafter.target_hidden_size"),
        (lambda c: edit_json(c, LOCK_FILE, lambda d: d.update(mask_token_id=512)), "mask_token_id"),
        (lambda c: edit_json(c, LOCK_FILE, lambda d: d.update(draft_vocab_size=1024)), "draft_vocab_size"),
        (lambda c: edit_json(c, LOCK_FILE, lambda d: d.update(layer_ids=[5, 3, 1])), "layer_ids"),
        (lambda c: edit_json(c, LOCK_FILE, lambda d: d["identity"].update(weights="0" * 64)), "weights"),
        (lambda c: flip_weight_byte(c), "drafter.weights"),
    ],
)
def test_a_checkpoint_that_contradicts_its_lock_is_refused(edit: Callable[[Path], None], field: str, checkpoint: Path, identity: VerifierIdentity) -> None:
    edit(checkpoint)
    assert field in [item.field for item in check_pair(checkpoint, identity)]


@pytest.mark.parametrize(
    ("edit", "error", "named"),
    [
        (lambda c: (c / LOCK_FILE).unlink(), ArtifactError, LOCK_FILE),
        (lambda c: (c / LOCK_FILE).write_text("{"), ArtifactError, LOCK_FILE),
        (lambda c: edit_json(c, LOCK_FILE, lambda d: d.update(format_version=2)), PairError, "format_version = 2"),
        (lambda c: edit_json(c, LOCK_FILE, lambda d: d.pop("layer_ids")), ArtifactError, "layer_ids"),
        (lambda c: edit_json(c, "config.json", lambda d: d.pop("draft_vocab_size")), ArtifactError, "draft_vocab_size"),
        (lambda c: (c / "model.safetensors").unlink(), ArtifactError, "model.safetensors"),
    ],
)
def test_a_checkpoint_that_cannot_be_judged_is_one_clear_error(
    edit: Callable[[Path], None], error: type[Exception], named: str, checkpoint: Path, identity: VerifierIdentity
) -> None:
    edit(checkpoint)
    with pytest.raises(error, match=named) as raised:
        require_pair(checkpoint, identity)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_ids": [1, 3, 7]}, "num_layers: drafter at least 7"),
        ({"layer_ids": [3, 1]}, "layer_ids"),
        ({"mask_token_id": 512}, r"mask_token_id: drafter 512, verifier ids 0\.\.511"),
        ({"draft_vocab_size": 513}, "draft_vocab_size: drafter 513 tokens, verifier 512 tokens"),
        ({"hidden_size": 96}, "drafter.hidden_size: drafter 96, verifier 64"),
    ],
)
def test_no_lock_is_made_for_a_drafter_that_cannot_fit(changes: dict[str, object], named: str, identity: VerifierIdentity) -> None:
    with pytest.raises(PairError, match=named):
        build_lock(identity, drafter_config(**changes), "0" * 64)


def test_the_lock_travels_whole(checkpoint: Path, identity: VerifierIdentity) -> None:
    lock = read_lock(checkpoint)
    assert lock.identity.digest == identity.digest
    assert (lock.layer_ids, lock.num_layers, lock.draft_vocab_size, lock.mask_token_id) == ([1, 3, 5], 6, 256, 3)


@pytest.mark.parametrize(
    ("ids", "named"),
    [([2, 31], r"31 is outside 1\.\.30"), ([0, 2], "0 is outside"), ([4, 2], "ascending"), ([2, 2], "ascending"), ([], "empty")],
)
def test_layer_ids_outside_the_model_are_one_line(ids: list[int], named: str) -> None:
    with pytest.raises(ParamsError, match=named):
        check_layer_ids(ids, 30)


def test_layer_ids_of_the_model_pass() -> None:
    check_layer_ids([1], 1)
    check_layer_ids([2, 8, 15, 22, 28, 30], 30)
