"""Parameters of a flow laid over params.yaml: what was given counts, a null too; what was not given is left as it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.errors import FlowError
from flows.parameters import Overrides, given, write_run_params
from stages.params import read_params
from tests.paths import REPOSITORY


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return Path(shutil.copy(REPOSITORY / "params.yaml", tmp_path / "base.yaml"))


def test_a_null_is_a_value_and_what_was_not_given_is_none(base: Path, tmp_path: Path) -> None:
    before = read_params(base)
    assert before.drafter.draft_vocab_size is not None, "else this shows nothing"
    overrides = Overrides.model_validate({"drafter": {"draft_vocab_size": None}, "train": {"steps": 7}})
    assert given(overrides) == {"drafter": {"draft_vocab_size": None}, "train": {"steps": 7}}
    params = write_run_params(base, tmp_path / "params.yaml", overrides)
    assert read_params(tmp_path / "params.yaml") == params
    assert params.drafter == before.drafter.model_copy(update={"draft_vocab_size": None})
    assert params.train == before.train.model_copy(update={"steps": 7})
    assert params.engine == before.engine


def test_a_later_layer_goes_before_an_earlier_one_only_where_it_says_something(base: Path, tmp_path: Path) -> None:
    layers = [Overrides.model_validate({"drafter": {"draft_vocab_size": size}}) for size in (None, 64)]
    assert write_run_params(base, tmp_path / "params.yaml", *layers, Overrides()).drafter.draft_vocab_size == 64
    assert write_run_params(base, tmp_path / "params.yaml", *reversed(layers), Overrides()).drafter.draft_vocab_size is None


@pytest.mark.parametrize("values", [{"train": {"steps": None}}, {"train": None}, {"train": {"steps": -1}}], ids=["knob", "section", "value"])
def test_what_the_schema_refuses_is_one_line_and_writes_nothing(base: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(FlowError, match="train") as refused:
        write_run_params(base, tmp_path / "params.yaml", Overrides.model_validate(values))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "params.yaml").exists()
