"""The verifier stage is the root of the graph: its answer is right, reproducible, and cheap when nothing changed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.pairing.identity import compute_identity, differences
from stages.verifier.sources import VerifierError
from tests.pairing.edits import copy_model, edit_json, flip_weight_byte
from tests.tiny import make_verifier
from tests.verifier.running import command, identity_after, run_stage, write_params

HEAVY = ("torch", "transformers", "mlflow", "vllm", "huggingface_hub")


@pytest.fixture
def local(tiny_verifier: Path, tmp_path: Path) -> Path:
    return copy_model(tiny_verifier, tmp_path / "local")


def store(folder: Path) -> Path:
    return folder / "outputs" / "verifier" / "models"


def test_a_local_model_is_linked_and_its_changes_are_seen_at_the_next_run(local: Path, tmp_path: Path) -> None:
    first = identity_after(tmp_path, source="local")
    entry = store(tmp_path) / first.digest[:16]
    assert entry.is_symlink()
    assert entry.samefile(local)
    assert first.digest == compute_identity(local).digest

    before = resource_seconds(tmp_path)
    assert before < 1.5, f"{before:.2f} s of CPU for an unchanged verifier"

    flip_weight_byte(local)
    second = identity_after(tmp_path, source="local")
    assert [item.field for item in differences(first, second)] == ["weights"]
    flip_weight_byte(local)
    moved = shutil.move(local, tmp_path / "moved")
    assert identity_after(tmp_path, source=str(moved)).digest == first.digest
    assert entry.samefile(moved)


def resource_seconds(folder: Path) -> float:
    """CPU seconds of one run of the stage: unlike the wall clock, not those of its neighbours."""
    process = subprocess.Popen(command("verifier"), cwd=folder, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_the_unchanged_path_imports_nothing_heavy(local: Path, tmp_path: Path) -> None:
    identity_after(tmp_path, source="local", quantization="w8a8")
    code = f"""
import sys
from stages.process import stage_main
from stages.verifier.__main__ import run
sys.exit(stage_main("verifier", run) or len({set(HEAVY)!r} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=False).returncode == 0


def test_w8a8_changes_quantization_and_weights_and_back_again(local: Path, tmp_path: Path) -> None:
    plain = identity_after(tmp_path, source="local")
    quantised = identity_after(tmp_path, source="local", quantization="w8a8")
    fields = {item.field for item in differences(plain, quantised)}
    assert {"quantization.method", "quantization.bits", "quantization.ignored", "weights"} <= fields
    assert {field.split(".")[0] for field in fields} == {"quantization", "weights"}
    assert (quantised.quantization["method"], quantised.quantization["bits"]) == ("compressed-tensors", 8)
    made = store(tmp_path) / quantised.digest[:16]
    written = (made / "model.safetensors").stat().st_mtime_ns
    assert identity_after(tmp_path, source="local").digest == plain.digest
    assert identity_after(tmp_path, source="local", quantization="w8a8").digest == quantised.digest
    assert (made / "model.safetensors").stat().st_mtime_ns == written, "changing back makes nothing again"

    # The copy follows the model it was made from, and a damaged copy is made again.
    flip_weight_byte(made)
    assert identity_after(tmp_path, source="local", quantization="w8a8").digest == quantised.digest
    assert compute_identity(made).digest == quantised.digest
    flip_weight_byte(local)
    assert identity_after(tmp_path, source="local", quantization="w8a8").digest != quantised.digest


def test_killed_while_materialising_then_run_again(tmp_path: Path) -> None:
    make_verifier(tmp_path / "local", hidden=256, layers=8)
    (tmp_path / "clean").mkdir()
    undisturbed = identity_after(tmp_path / "clean", source="../local", quantization="w8a8")
    write_params(tmp_path, source="local", quantization="w8a8")
    work = tmp_path / "outputs" / "verifier" / "work"
    for moment in ("*/.model.*.tmp", "*/.model.*.tmp/*.safetensors"):
        process = subprocess.Popen(command("verifier"), cwd=tmp_path, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not list(work.glob(moment)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "outputs" / "verifier" / "identity.json").exists()
    again = identity_after(tmp_path, source="local", quantization="w8a8")
    assert again.digest == undisturbed.digest
    assert not [entry for entry in work.iterdir() if entry.is_dir()], "nothing half made is left"
    assert compute_identity(store(tmp_path) / again.digest[:16]).digest == again.digest


@pytest.mark.parametrize(
    ("verifier", "named"),
    [
        ({"source": "nowhere"}, "'nowhere': no such directory"),
        ({"source": "~nouser/x"}, "'~nouser/x': no home directory is known for ~nouser"),
        ({"source": "empty"}, "config.json"),
        ({"source": "local", "quantisation": "w8a8"}, "verifier.quantisation = 'w8a8': unknown key"),
        ({"source": "local", "quantization": "w4"}, "verifier.quantization = 'w4'"),
        ({"source": "pypi:a==1/model.safetensors"}, ".gguf"),
        ({"source": "models:/a@b@c"}, "models:/<name>@<alias>"),
    ],
)
def test_a_wrong_source_is_one_clear_line(verifier: dict[str, object], named: str, local: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_params(tmp_path, **verifier)
    done = run_stage(tmp_path)
    assert done.returncode == 1
    assert named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "outputs" / "verifier" / "identity.json").exists()


def test_foreign_code_needs_the_users_word(local: Path, tmp_path: Path) -> None:
    edit_json(local, "config.json", lambda c: c.update(model_type="homegrown", auto_map={"AutoModelForCausalLM": "modeling_homegrown.Model"}))
    (local / "modeling_homegrown.py").write_text("class Model: pass")
    with pytest.raises(VerifierError, match=r"model_type 'homegrown'.*verifier\.trust_remote_code") as error:
        identity_after(tmp_path, source="local")
    assert "\n" not in str(error.value)
    identity_after(tmp_path, source="local", trust_remote_code=True)
    with pytest.raises(VerifierError, match="homegrown"):  # trusted once is not trusted without the parameter
        identity_after(tmp_path, source="local")


def test_an_already_quantised_model_is_not_quantised_again(local: Path, tmp_path: Path) -> None:
    edit_json(local, "config.json", lambda c: c.update(quantization_config={"quant_method": "awq", "bits": 4}))
    with pytest.raises(VerifierError, match=r"already quantised \(awq\)"):
        identity_after(tmp_path, source="local", quantization="w8a8")
