"""The store finds a verifier by what it is, survives moved models, and never deletes what it does not own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stages.errors import ArtifactError, PairError
from stages.pairing.identity import VerifierIdentity, compute_identity
from stages.pairing.store import publish_directory, publish_link, revalidate, store_path, verifier_directory
from tests.pairing.edits import copy_model, flip_weight_byte


@pytest.fixture
def identity(tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerifierIdentity:
    monkeypatch.chdir(tmp_path)
    return compute_identity(tiny_verifier)


def test_absent_and_gone_models_are_named(identity: VerifierIdentity, tiny_verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not materialised"):
        verifier_directory(identity)
    local = copy_model(tiny_verifier, tmp_path / "local")
    publish_link(local, identity)
    assert verifier_directory(identity).samefile(local)
    shutil.rmtree(local)
    with pytest.raises(ArtifactError, match=r"local.*is gone"):
        verifier_directory(identity)
    again = copy_model(tiny_verifier, tmp_path / "moved")
    assert publish_link(again, identity).samefile(again)


def test_a_local_model_is_linked_never_copied_and_never_deleted(identity: VerifierIdentity, tiny_verifier: Path, tmp_path: Path) -> None:
    local = copy_model(tiny_verifier, tmp_path / "local")
    assert publish_link(local, identity).is_symlink()
    made = copy_model(tiny_verifier, tmp_path / "made")
    publish_directory(made, identity)
    assert not store_path(identity).is_symlink()
    assert (local / "config.json").is_file()
    # A user may point at the store's own entry.
    assert publish_link(store_path(identity).resolve(), identity) == store_path(identity)
    assert (store_path(identity) / "config.json").is_file()


def test_a_damaged_copy_is_found_and_replaced(identity: VerifierIdentity, tiny_verifier: Path, tmp_path: Path) -> None:
    publish_directory(copy_model(tiny_verifier, tmp_path / "made"), identity)
    assert revalidate(identity) == store_path(identity)
    flip_weight_byte(store_path(identity))
    with pytest.raises(PairError, match=r"weights: recorded .*, on disk "):
        revalidate(identity)
    publish_directory(copy_model(tiny_verifier, tmp_path / "made"), identity)
    revalidate(identity)
    flip_weight_byte(store_path(identity))
    publish_link(copy_model(tiny_verifier, tmp_path / "local"), identity)
    revalidate(identity)
