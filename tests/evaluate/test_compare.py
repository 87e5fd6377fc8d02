"""Several drafters on the same prompts: named on the command line, kept as they are measured, gone on with after an interruption."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import read_json
from stages.dataset import write_split
from stages.errors import DraftlineError, ParamsError
from stages.evaluate import own_loop
from stages.evaluate.compare import compare, main, named_checkpoints, with_options
from stages.evaluate.store import Store, completions_from_json, completions_to_json
from stages.evaluate.subjects import GUARDED
from stages.pairing.identity import read_identity
from stages.params import Params, parse_params, read_params
from tests.evaluate.reports import samples, simulated
from tests.gate.pair import make_bigram_verifier, write_drafter, write_outputs, write_samples
from tests.paths import REPOSITORY


def params(**evaluate: Any) -> Params:
    data = read_params(REPOSITORY / "params.yaml").model_dump()
    data["engine"] |= {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "kv_cache_bytes": 1 << 26}
    data["prepare"]["max_seq_len"] = 128
    data["evaluate"] |= {"max_tokens": 24, "batch_size": 4, "prompts_per_kind": 2, "speed_tokens": 8, "temperatures": [0.0, 1.0], **evaluate}
    return parse_params(data)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with verifier and prompts, and two drafters of it: `long` (K = 4) and `short` (K = 2)."""
    monkeypatch.chdir(tmp_path)
    verifier = make_bigram_verifier(tmp_path / "verifier")
    identity = write_outputs(tmp_path, verifier)
    write_samples(tmp_path / "outputs" / "prepare", per_kind=2)
    write_drafter(tmp_path / "long", verifier, identity, block_size=5)
    write_drafter(tmp_path / "short", verifier, identity, block_size=3)
    return tmp_path


def test_drafters_are_named_once_and_belong_to_the_verifier(workplace: Path) -> None:
    identity = read_identity()
    assert [(drafter.name, drafter.trained) for drafter in named_checkpoints(["a=long", "b=short"], identity)] == [("a", 4), ("b", 2)]
    for values, message in (
        (["long"], "expected NAME=DIR"),
        (["=long"], "expected NAME=DIR"),
        (["a=long", "a=short"], "named twice"),
        ([f"{GUARDED}=long"], "is taken"),
        (["a=nowhere"], "nowhere"),
    ):
        with pytest.raises(DraftlineError, match=message):
            named_checkpoints(values, identity)


def test_options_are_the_knobs_of_the_evaluate_section() -> None:
    changed = with_options(params(), {"draft_tokens": "[2, 4]", "max_tokens": "99", "repeats": None})
    assert changed.evaluate.draft_tokens == [2, 4]
    assert changed.evaluate.max_tokens == 99
    assert changed.evaluate.repeats == params().evaluate.repeats
    with pytest.raises(ParamsError, match=r"evaluate.*batch_size"):
        with_options(params(), {"batch_size": "0"})
    with pytest.raises(DraftlineError, match=r"^--draft-tokens \[4: not YAML; "):
        with_options(params(), {"draft_tokens": "[4"})


def test_acceptance_of_both_in_the_loop_and_an_interrupted_comparison_goes_on(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = workplace / "comparison"
    decoded: list[int] = []
    original = own_loop.Decoder.decode

    def counting(self: own_loop.Decoder, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if len(decoded) == 7:
            raise KeyboardInterrupt
        decoded.append(len(prompts))
        return original(self, prompts, *args, **kwargs)

    monkeypatch.setattr(own_loop.Decoder, "decode", counting)
    with pytest.raises(KeyboardInterrupt):
        compare(params(), ["long=long", "short=short"], output, engine_too=False)
    monkeypatch.setattr(own_loop.Decoder, "decode", original)
    rest: list[int] = []
    monkeypatch.setattr(own_loop.Decoder, "decode", lambda self, prompts, *args: rest.append(len(prompts)) or original(self, prompts, *args))
    compare(params(), ["long=long", "short=short"], output, engine_too=False)
    report = read_json(output / "report.json")
    cells = {(cell["drafter"], cell["temperature"]): cell for cell in report["cells"]}
    # Ten prompts in batches of 4, 4 and 2: verifier alone, two drafters and guarded lookup at two temperatures, lookup at one.
    assert len(decoded) + len(rest) == 3 * (2 + 2 * 2 + 2 + 1)
    assert cells["long", 1.0]["acceptance_length"]["macro"] > cells["short", 1.0]["acceptance_length"]["macro"] > 1.0
    assert all(cell["outputs"]["identical"] == 10 for (_, temperature), cell in cells.items() if temperature == 0.0)
    assert {lead["first"] for lead in report["leads"] if lead["second"] == "short"} == {"long"}
    assert "| long over short " in (output / "report.md").read_text(encoding="utf-8")
    rest.clear()
    compare(params(), ["long=long", "short=short"], output, engine_too=False)
    assert rest == []
    assert read_json(output / "report.json") == report


def test_without_prompts_there_is_one_clear_line(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(workplace / "outputs" / "prepare", "evaluation", [])
    shutil.copy(REPOSITORY / "params.yaml", workplace)
    assert main(["--checkpoint", "a=long", "--output", "out"]) == 1
    assert capsys.readouterr().err.startswith("draftline compare: outputs/prepare/evaluation: no held-out prompts; ")


def test_an_output_that_cannot_be_written_is_one_clear_line_before_anything_is_measured(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(REPOSITORY / "params.yaml", workplace)
    assert main(["--checkpoint", "a=long", "--output", "params.yaml"]) == 1
    assert capsys.readouterr().err == "draftline compare: params.yaml/measured: Not a directory\n"


def test_what_is_stored_comes_back_as_it_was(tmp_path: Path) -> None:
    completions = simulated(samples(), 1.0, 0)
    store = Store(tmp_path, {"verifier": "a"})
    assert completions_from_json(store.get({"k": 1}, lambda: completions_to_json(completions))) == completions
    assert completions_from_json(store.get({"k": 1}, lambda: pytest.fail("measured twice"))) == completions
    assert store.get({"k": 2}, lambda: 7) == 7
    assert Store(tmp_path, {"verifier": "b"}).get({"k": 2}, lambda: 8) == 8, "another verifier is another measurement"
    assert Store(None, {}).get({"k": 2}, lambda: 9) == 9
