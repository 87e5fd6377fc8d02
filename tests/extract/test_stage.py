"""The stage as DVC runs it: refusals before an engine starts, kill -9 and resume, re-use, and what training reads from it."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from stages.artifacts import read_json, write_json
from stages.dataset import read_split
from stages.extract.__main__ import dump, run
from stages.hidden_states.format import HiddenSample, Plan
from stages.hidden_states.launch import ExtractionError, Refused
from stages.hidden_states.shards import ShardWriter, open_dump
from stages.params import Params, StageParams, parse_params, read_params
from tests.extract.workspace import extract, last_line, make_workspace, start, token_sample
from tests.hidden_states.samples import make_arguments, make_plan

SHARD = 1
"""Samples per shard: many small shards, so that a kill falls between two of them."""
TRAIN = 60


@pytest.mark.parametrize(
    ("extraction", "expected"),
    [
        ({"layer_ids": [2, 7]}, "draftline extract: params.yaml: extraction.layer_ids = [2, 7]: 7 is outside 1..6 (the verifier has 6 layers)"),
        ({"disk_reserve_bytes": 1 << 60}, "draftline extract: outputs/extract: the dump needs about "),
    ],
)
def test_refusals_are_one_line_and_come_before_any_engine(tmp_path: Path, tiny_verifier: Path, extraction: dict[str, Any], expected: str) -> None:
    make_workspace(tmp_path, tiny_verifier, 4, **extraction)
    status, output = extract(tmp_path)
    assert status == 1
    assert len(output.strip().splitlines()) == 1
    assert output.startswith(expected)
    assert not list((tmp_path / "outputs" / "extract").rglob("shard-*"))


class StartedError(Exception):
    """Stands for an engine: it is started, and that is all."""


@pytest.mark.parametrize("trusted", [False, True])
def test_the_engine_may_run_the_model_s_code_where_the_user_lets_it(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    def start(plan: Plan, model: Path, spool: Path, kv_cache_bytes: int, trust_remote_code: bool = False) -> None:
        raise StartedError(make_arguments(plan, model, spool, kv_cache_bytes, trust_remote_code)["trust_remote_code"])

    make_workspace(tmp_path, tiny_verifier, 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stages.extract.__main__.Extractor", start)
    data = read_params().model_dump()
    data["verifier"]["trust_remote_code"] = trusted
    with pytest.raises(StartedError) as started:
        run(cast(Params, StageParams(parse_params(data), "extract")), Path("outputs/extract"))
    assert started.value.args == (trusted,)


@pytest.mark.integration
def test_a_verifier_that_ships_code_is_extracted_where_the_user_lets_it(tmp_path: Path, tiny_verifier: Path) -> None:
    verifier = tmp_path / "verifier"
    shutil.copytree(tiny_verifier, verifier)
    config = read_json(verifier / "config.json")
    write_json(verifier / "config.json", config | {"model_type": "homegrown", "auto_map": {"AutoConfig": "configuration.HomegrownConfig"}})
    code = "from transformers import LlamaConfig\n\n\nclass HomegrownConfig(LlamaConfig):\n    model_type = 'homegrown'\n"
    (verifier / "configuration.py").write_text(code, encoding="utf-8")
    make_workspace(tmp_path, verifier, 4)
    status, output = extract(tmp_path)
    assert status == 1
    assert "trust_remote_code" in last_line(output)
    params = tmp_path / "params.yaml"
    params.write_text(params.read_text(encoding="utf-8").replace("trust_remote_code: false", "trust_remote_code: true"), encoding="utf-8")
    status, output = extract(tmp_path)
    assert status == 0, output


@pytest.fixture(scope="module")
def finished(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which the stage has run undisturbed."""
    folder = tmp_path_factory.mktemp("extract")
    make_workspace(folder, tiny_verifier, TRAIN, samples_per_shard=SHARD)
    status, output = extract(folder)
    assert status == 0, output
    return folder


@pytest.mark.integration
def test_training_reads_every_sample_with_its_states(finished: Path, tiny_verifier: Path) -> None:
    from transformers import AutoModelForCausalLM

    outputs = finished / "outputs"
    manifest = read_json(outputs / "extract" / "manifest.json")
    samples = [sample for split in ("train", "validation") for sample in read_split(outputs / "prepare", split)]
    dumped = open_dump(outputs / "extract" / "manifest.json", manifest["verifier"])
    assert dumped.ids == [sample.id for sample in samples]
    assert dumped.plan.layer_ids == (2, 4, 6)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32).eval()
    for sample in samples[::16]:
        states = dumped.read(sample.id, sample.input_ids).hidden_states
        with torch.no_grad():
            hidden = model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states
            # transformers' last entry is after the final norm, ours before it.
            normed = model.model.norm(states[:, 2])
        expected = torch.stack([hidden[2][0], hidden[4][0], hidden[6][0]], dim=1)
        actual = torch.stack([states[:, 0], states[:, 1], normed], dim=1)
        assert float((actual - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.integration
def test_killed_and_run_again_it_ends_in_the_same_bytes(finished: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    make_workspace(tmp_path, tiny_verifier, TRAIN, samples_per_shard=SHARD)
    output = tmp_path / "outputs" / "extract"
    process = start(tmp_path)
    deadline = time.monotonic() + 240
    while len(list(output.glob("dumps/*/shard-*.json"))) < 5:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate()
    done = {path.name: path.stat().st_mtime_ns for path in output.glob("dumps/*/shard-*.json")}
    assert 5 <= len(done) < TRAIN
    assert not (output / "manifest.json").exists()

    status, printed = extract(tmp_path)
    assert status == 0, printed
    assert (output / "manifest.json").read_bytes() == (finished / "outputs" / "extract" / "manifest.json").read_bytes()
    again = {path.name: path.stat().st_mtime_ns for path in output.glob("dumps/*/shard-*.json")}
    assert {name: again[name] for name in done} == done, "what was final is not extracted again"
    assert [path.name for path in output.iterdir() if path.name not in (".lock", "dumps", "manifest.json", "work")] == []
    assert not list((output / "work").glob("*/*"))


@pytest.mark.integration
def test_a_finished_dump_is_used_again_without_an_engine(finished: Path, tmp_path: Path) -> None:
    output = finished / "outputs" / "extract"
    before = (output / "manifest.json").read_bytes()
    (output / "manifest.json").unlink()  # as DVC does before it runs a stage
    models = finished / "outputs" / "verifier" / "models"
    models.rename(tmp_path / "models")  # no engine can start
    try:
        status, printed = extract(finished)
    finally:
        (tmp_path / "models").rename(models)
    assert status == 0, printed
    assert (output / "manifest.json").read_bytes() == before
    assert f"{TRAIN + 4} samples" in last_line(printed)


class ScriptedSource:
    """Made-up states, and a refusal for each sample named in `refuse`."""

    def __init__(self, plan: Plan, refuse: set[str]) -> None:
        self.plan = plan
        self.refuse = refuse

    def extract(self, samples: list[tuple[str, list[int]]], on_done: Callable[[int], object] | None = None) -> Iterator[HiddenSample | Refused]:
        for name, tokens in samples:
            if name in self.refuse:
                yield Refused(name, f"sample {name}: states that are not finite")
            else:
                yield HiddenSample(name, torch.tensor(tokens), torch.zeros(len(tokens), 3, self.plan.hidden_size))


def test_a_few_bad_samples_are_rejected_alone_and_many_stop_the_stage(tmp_path: Path) -> None:
    draw = random.Random(0)
    samples = [token_sample(f"s{index}", draw) for index in range(200)]
    plan = make_plan([len(sample.input_ids) for sample in samples], samples_per_shard=50)
    bad = {"s3", "s60", "s120"}
    writer = ShardWriter(tmp_path / "dump", plan)
    with pytest.raises(ExtractionError, match="3 of 200 samples gave unusable hidden states, at most 2 may; the last: sample s120: states that are not finite"):
        dump(writer, samples, ScriptedSource(plan, bad))
    assert sorted(writer.finished) == [0, 1]
    # Run again, the shard that failed is tried again.
    writer = ShardWriter(tmp_path / "dump", plan)
    dump(writer, samples, ScriptedSource(plan, bad - {"s120"}))
    writer.write_manifest(tmp_path / "manifest.json")
    dumped = open_dump(tmp_path / "manifest.json", plan.verifier)
    assert set(dumped.ids) == {sample.id for sample in samples} - {"s3", "s60"}
    assert set(read_json(tmp_path / "manifest.json")["rejected"]) == {"s3", "s60"}
    for sample in samples:
        if sample.id in dumped:
            dumped.read(sample.id, sample.input_ids)
