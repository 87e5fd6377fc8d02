"""A dtype that the processor cannot multiply fast is named before hours are spent on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages import processor
from stages.params_edit import use_profile
from tests.paths import REPOSITORY


def test_bf16_on_a_processor_without_it_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(processor, "multiplies_bf16", lambda: False)
    warning = processor.slow_dtype("bfloat16")
    assert warning is not None
    assert "engine.dtype = 'bfloat16'" in warning
    assert "profiles/fp32.yaml" in warning
    assert processor.slow_dtype("float32") is None
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert processor.slow_dtype("bfloat16") is None
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(processor, "multiplies_bf16", lambda: True)
    assert processor.slow_dtype("bfloat16") is None


def test_the_way_out_leaves_no_bf16_engine(tmp_path: Path) -> None:
    copy = tmp_path / "params.yaml"
    copy.write_bytes((REPOSITORY / "params.yaml").read_bytes())
    parsed = use_profile(REPOSITORY / "profiles" / "fp32.yaml", copy)
    assert parsed.engine.dtype == parsed.extraction.dtype == "float32"
