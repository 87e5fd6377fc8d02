"""The whole stage through the real engine, with a tiny pair: what it writes, and what it refuses before any engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from stages.artifacts import digest_json, read_json, read_manifest, write_json
from stages.dataset import read_split, write_split
from stages.decoding.engine import EngineConfig
from stages.errors import ArtifactError, DraftlineError, PairError
from stages.evaluate.__main__ import run, speed_requests
from stages.params import Evaluate, Params, StageParams, parse_params, read_params
from tests.gate.pair import KINDS, make_bigram_verifier, write_outputs, write_samples
from tests.paths import REPOSITORY


def stage_params(trust_remote_code: bool = False, **evaluate: int) -> Params:
    """params.yaml of the repository with a tiny engine."""
    data = read_params(REPOSITORY / "params.yaml").model_dump()
    data["verifier"]["trust_remote_code"] = trust_remote_code
    data["engine"] |= {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "kv_cache_bytes": 1 << 26}
    data["prepare"]["max_seq_len"] = 128
    data["evaluate"] |= evaluate
    return cast(Params, StageParams(parse_params(data), "evaluate"))


def write_gate(outputs: Path, verdict: str = "pass") -> None:
    content = digest_json(read_manifest(outputs / "convert" / "checkpoint")["files"])
    write_json(outputs / "gate" / "report.json", {"verdict": verdict, "checkpoint": content})


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_outputs(tmp_path, make_bigram_verifier(tmp_path / "verifier"))
    write_gate(tmp_path / "outputs")
    return tmp_path / "outputs"


def test_speed_prompts_come_from_all_kinds_in_turn(tmp_path: Path) -> None:
    from stages.dataset import choose_per_kind

    chosen = choose_per_kind(write_samples(tmp_path, per_kind=3), 3)
    settings = Evaluate(speed_prompts=7, speed_tokens=16)
    requests = speed_requests(chosen, settings)
    assert [request.id.split("-")[0] for request in requests] == [*KINDS, *KINDS[:2]]
    assert {request.max_tokens for request in requests} == {16}
    assert len(speed_requests(chosen, Evaluate(speed_prompts=99))) == 15


def test_a_pair_that_does_not_belong_together_is_refused_before_any_engine(outputs: Path) -> None:
    identity = outputs / "verifier" / "identity.json"
    data = read_json(identity)
    write_json(identity, data | {"weights": "0" * 64})
    with pytest.raises((PairError, ArtifactError), match=r"verifier|weights"):
        run(stage_params(), outputs / "evaluate")


@pytest.mark.parametrize("case", ["failed", "another checkpoint"])
def test_only_what_passed_the_gate_is_evaluated(outputs: Path, case: str) -> None:
    if case == "failed":
        write_gate(outputs, "fail")
    else:
        write_json(outputs / "gate" / "report.json", {"verdict": "pass", "checkpoint": "0" * 64})
    with pytest.raises(DraftlineError, match="has not passed the gate"):
        run(stage_params(), outputs / "evaluate")


def test_without_held_out_prompts_there_is_nothing_to_say(outputs: Path) -> None:
    write_split(outputs / "prepare", "evaluation", [])
    with pytest.raises(ArtifactError, match="no held-out prompts"):
        run(stage_params(), outputs / "evaluate")


class StartedError(Exception):
    """Stands for an engine: it is started, and that is all."""


@pytest.mark.parametrize("trusted", [False, True])
def test_the_engines_may_run_the_model_s_code_where_the_user_lets_them(outputs: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool) -> None:
    def start(config: EngineConfig, desc: str | None) -> None:
        raise StartedError(config.trust_remote_code)

    monkeypatch.setattr("stages.evaluate.__main__.EngineProcess", start)
    with pytest.raises(StartedError) as started:
        run(stage_params(trust_remote_code=trusted), outputs / "evaluate")
    assert started.value.args == (trusted,)


@pytest.mark.integration
def test_acceptance_and_speed_are_measured_through_the_engine(outputs: Path) -> None:
    run(stage_params(prompts_per_kind=2, max_tokens=40, repeats=2, speed_prompts=2, speed_tokens=12), outputs / "evaluate")
    report = read_json(outputs / "evaluate" / "report.json")
    samples = read_split(outputs / "prepare", "evaluation")
    length = report["acceptance_length"]
    assert set(length["per_kind"]) == set(KINDS)
    for entry in length["per_kind"].values():
        # Every prompt decodes 40 tokens (or ends earlier), the first of them while the prompt is read.
        assert entry["passes"] <= entry["tokens"] <= entry["prompts"] * 39
        assert entry["value"] == pytest.approx(entry["tokens"] / entry["passes"])
    # The planted drafter is right about half of the time, and knows more than what stands in the prompt.
    assert 1.3 < length["macro"] < 4.5
    assert length["macro"] > report["prompt_lookup"]["acceptance_length"]["macro"] >= 1.0
    assert report["lead_over_prompt_lookup"]["macro"]["low"] > 0
    table = report["per_position"]["all"]
    assert [row["position"] for row in table] == [1, 2, 3, 4] == list(range(1, report["draft_tokens"] + 1))
    assert table[0]["reached"] >= table[0]["accepted"] >= table[1]["reached"] > 0
    assert report["prompts"] == len(samples)
    assert [repeat["baseline"]["tokens"] for repeat in report["speed"]["repeats"]] == [24, 24]
    assert all(repeat["drafted"]["seconds"] > 0 for repeat in report["speed"]["repeats"])
    assert (outputs / "evaluate" / "report.md").is_file()
    assert len(list((outputs / "evaluate" / "plots").glob("*.png"))) == 3
