"""A dtype that the processor cannot multiply fast is named before hours are spent on it."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from stages import processor
from stages.params import parse_params
from stages.params_file import lay_over
from tests.paths import REPOSITORY


def test_bf16_on_a_processor_without_it_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bf16", lambda: False)
    warning = processor.slow_dtype("bfloat16")
    assert warning is not None
    assert "engine.dtype = 'bfloat16'" in warning
    assert "profiles/fp32.yaml" in warning
    assert processor.slow_dtype("float32") is None
    monkeypatch.setattr(processor, "multiplies_bf16", lambda: True)
    assert processor.slow_dtype("bfloat16") is None


def test_the_way_out_leaves_no_bf16_engine() -> None:
    yaml = YAML(typ="safe")
    params = yaml.load((REPOSITORY / "params.yaml").read_text())
    lay_over(params, yaml.load((REPOSITORY / "profiles" / "fp32.yaml").read_text()))
    parsed = parse_params(params, REPOSITORY / "params.yaml")
    assert parsed.engine.dtype == parsed.extraction.dtype == "float32"
