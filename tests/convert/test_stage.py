"""The convert stage: from a finished training to a directory that stands on its own, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.artifacts import read_manifest, write_json, write_manifest
from stages.convert.__main__ import portable_name, run
from stages.drafters.calibration import CALIBRATION_FILE, Calibration, ModeCalibration, read_calibration
from stages.drafters.checkpoint import load_drafter, save_trained
from stages.drafters.draft import greedy_drafts
from stages.drafters.model import Drafter
from stages.errors import ArtifactError
from stages.pairing.frozen import load_frozen
from stages.pairing.identity import VerifierIdentity, compute_identity
from stages.pairing.lock import check_pair
from stages.pairing.store import publish_link
from stages.params import Params, read_params
from tests.drafters.shapes import config, drafter
from tests.train.material import LAYER_IDS

REPOSITORY = Path(__file__).parents[2]


def finished_training(root: Path, verifier: Path) -> tuple[Drafter, VerifierIdentity]:
    """What convert reads, below `root/outputs`; the current directory is `root`."""
    identity = compute_identity(verifier)
    write_json(root / "outputs" / "verifier" / "identity.json", json.loads(identity.model_dump_json()))
    publish_link(verifier, identity)
    ends = load_frozen(verifier, torch.float32)
    vocab = len(ends.embedding)
    model = drafter(config(vocab=vocab, draft_vocab_size=200, layer_ids=LAYER_IDS), ends=ends)
    save_trained(root / "outputs" / "train" / "drafter", model, torch.bfloat16)
    write_manifest(root / "outputs" / "train" / "drafter", identity.digest)
    return model, identity


@pytest.fixture
def params() -> Params:
    return read_params(REPOSITORY / "params.yaml")


def test_the_checkpoint_gives_the_trained_models_logits_and_belongs_to_its_verifier(
    tiny_verifier: Path, tmp_path: Path, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, identity = finished_training(tmp_path, tiny_verifier)
    run(params, Path("outputs/convert"))
    checkpoint = Path("outputs/convert/checkpoint")
    read_manifest(checkpoint, identity.digest)
    assert check_pair(checkpoint, identity) == []
    again = load_drafter(checkpoint, load_frozen(tiny_verifier, torch.float32), torch.float32)
    context, anchors = torch.randn(12, 3 * 64), torch.tensor([5, 11])
    ours, theirs = (greedy_drafts(m, context, torch.tensor([20, 30]), anchors) for m in (model, again))
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.tokens, theirs.tokens)


def test_an_altered_training_is_refused_and_the_old_checkpoint_stands(
    tiny_verifier: Path, tmp_path: Path, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, identity = finished_training(tmp_path, tiny_verifier)
    run(params, Path("outputs/convert"))
    before = read_manifest(Path("outputs/convert/checkpoint"), identity.digest)
    weights = Path("outputs/train/drafter/model.safetensors")
    tensors = load_file(weights)
    tensors["norm.weight"][0] += 1
    save_file(tensors, weights)
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        run(params, Path("outputs/convert"))
    assert read_manifest(Path("outputs/convert/checkpoint"), identity.digest) == before


def test_the_verifiers_name_in_the_checkpoint_is_portable(params: Params) -> None:
    """A path of this machine would be loaded, or not found, on another one."""
    assert portable_name(params) == params.verifier.name
    hub = params.model_copy(update={"verifier": params.verifier.model_copy(update={"source": "hf:org/model@main"})})
    assert portable_name(hub) == "org/model"
    chosen = params.model_copy(update={"convert": params.convert.model_copy(update={"verifier_name_or_path": "mine/own"})})
    assert portable_name(chosen) == "mine/own"


def test_the_calibration_travels_with_the_weights(tiny_verifier: Path, tmp_path: Path, params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """A confidence head without it would be scheduled by what it says itself."""
    monkeypatch.chdir(tmp_path)
    _, identity = finished_training(tmp_path, tiny_verifier)
    trained = tmp_path / "outputs" / "train" / "drafter"
    mode = ModeCalibration(temperatures=[1.5] * 4, shifts=[0.0] * 4, fitted_on=9, held_out=[])
    calibration = Calibration(bins=10, modes={"sampling": mode})
    write_json(trained / CALIBRATION_FILE, calibration.model_dump(mode="json"))
    write_manifest(trained, identity.digest)
    run(params, Path("outputs/convert"))
    checkpoint = Path("outputs/convert/checkpoint")
    assert CALIBRATION_FILE in read_manifest(checkpoint, identity.digest)["files"]
    assert read_calibration(checkpoint) == calibration
