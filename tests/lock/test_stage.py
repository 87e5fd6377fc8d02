"""The lock stage leaves a verdict that later stages trust: `match` only for the pair that is really on this disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.artifacts import write_manifest
from stages.errors import DraftlineError
from stages.lock.__main__ import run
from stages.pairing.lock import LOCK_FILE
from stages.process import OUTPUTS
from tests.pairing.checkpoints import write_checkpoint
from tests.pairing.edits import copy_model, edit_json, flip_weight_byte
from tests.verifier.running import identity_after, run_stage

REPORT = OUTPUTS / "lock" / "report.json"
CHECKPOINT = OUTPUTS / "convert" / "checkpoint"


@pytest.fixture
def folder(tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder after the verifier and convert stages."""
    copy_model(tiny_verifier, tmp_path / "local")
    identity = identity_after(tmp_path, source="local")
    write_checkpoint(tmp_path / CHECKPOINT, identity)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_match_is_reported_with_every_checked_field(folder: Path) -> None:
    done = run_stage(folder, "lock")
    assert done.returncode == 0, done.stderr
    report = json.loads(REPORT.read_text())
    assert report["verdict"] == "match"
    fields = {item["field"] for item in report["checked"]}
    assert {"weights", "chat_template", "tokenizer.tokenizer.json", "quantization.bits", "generation.eos_token_ids"} <= fields
    assert {"num_layers", "hidden_size", "vocab_size", "mask_token_id", "layer_ids"} <= fields
    assert all(item["match"] for item in report["checked"])


def _other_verifier(folder: Path) -> None:
    """The verifier changed and its stage has run; the drafter is still the old one."""
    flip_weight_byte(folder / "local")
    edit_json(folder / "local", "config.json", lambda c: c.update(quantization_config={"quant_method": "awq", "bits": 4}))
    identity_after(folder, source="local")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_other_verifier, ["quantization.bits: drafter 32, verifier 4", "quantization.method", "weights: drafter "]),
        (lambda f: flip_weight_byte(f / "local"), ["weights: recorded "]),
        (lambda f: flip_weight_byte(f / CHECKPOINT), ["drafter.weights: drafter "]),
        (lambda f: (f / CHECKPOINT / LOCK_FILE).unlink(), [LOCK_FILE]),
        (lambda f: (f / CHECKPOINT / "manifest.json").unlink(), ["manifest.json"]),
        (lambda f: (f / OUTPUTS / "verifier" / "identity.json").unlink(), ["identity.json"]),
    ],
)
def test_no_verdict_of_an_earlier_pair_survives(change: Callable[[Path], None], named: list[str], folder: Path) -> None:
    assert run_stage(folder, "lock").returncode == 0
    change(folder)
    done = run_stage(folder, "lock")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    for text in named:
        assert text in done.stderr
    assert not REPORT.exists() or json.loads(REPORT.read_text())["verdict"] == "mismatch"


def test_a_moved_verifier_still_matches_after_its_stage_ran(folder: Path) -> None:
    (folder / "local").rename(folder / "moved")
    with pytest.raises(DraftlineError, match="run dvc repro verifier"):
        run(None, OUTPUTS / "lock")  # type: ignore[arg-type]
    identity_after(folder, source="moved")
    run(None, OUTPUTS / "lock")  # type: ignore[arg-type]
    assert json.loads(REPORT.read_text())["verdict"] == "match"


def test_a_checkpoint_made_for_another_identity_is_refused_by_its_manifest(folder: Path) -> None:
    write_manifest(folder / CHECKPOINT, "0" * 64)
    with pytest.raises(DraftlineError, match=r"manifest\.json: made for verifier 000000000000"):
        run(None, OUTPUTS / "lock")  # type: ignore[arg-type]
