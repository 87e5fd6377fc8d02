"""What an engine's dtype is on which machine, and that a slow one is named before hours are spent on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages import processor
from stages.params import Engine, Extraction, read_params
from stages.processor import engine_dtype, slow_dtype
from tests.paths import REPOSITORY

WITHOUT, WITH = "flags\t\t: fpu avx2 avx512f\n", "flags\t\t: fpu avx2 avx512_bf16\n"


@pytest.mark.parametrize(
    ("installed", "machine", "cpuinfo", "dtype"),
    [
        ("cpu", "x86_64", WITHOUT, "float32"),
        ("cpu", "x86_64", WITH, "bfloat16"),
        ("cuda", "x86_64", WITHOUT, "bfloat16"),  # the host's processor says nothing about the GPU
        ("cpu", "aarch64", "Features : fp asimd bf16\n", "bfloat16"),  # not known: as served elsewhere
        ("cpu", "x86_64", None, "bfloat16"),
    ],
)
def test_auto_takes_what_the_engine_multiplies_fast(
    installed: str, machine: str, cpuinfo: str | None, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And from then on nothing sees "auto": answers, states, costs and reports are compared by dtype."""
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(processor, "installed_device", lambda: installed)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert engine_dtype() == dtype
    assert Engine(dtype="auto").dtype == Engine(dtype="auto").model_dump()["dtype"] == dtype
    assert Extraction(dtype="auto", layer_ids=[1]).dtype == dtype
    assert Engine(dtype="bfloat16").dtype == "bfloat16"
    assert (slow_dtype("bfloat16") is not None) == (dtype == "float32")
    assert slow_dtype("float32") is None


def test_a_slow_dtype_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "engine_dtype", lambda: "float32")
    warning = slow_dtype("bfloat16")
    assert warning is not None
    assert "engine.dtype = 'bfloat16'" in warning
    assert "auto" in warning


def test_the_demo_runs_in_what_the_machine_is_fast_in() -> None:
    params = read_params(REPOSITORY / "params.yaml")
    assert params.engine.dtype == params.extraction.dtype == engine_dtype()
