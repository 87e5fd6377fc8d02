"""The whole stage through the real engine, with a tiny pair: what it writes, and what it refuses before any engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from stages.artifacts import digest_json, read_json, read_manifest, write_json
from stages.dataset import TokenSample, choose_per_kind, read_split, write_split
from stages.decoding.costs import parse_table, this_machine
from stages.decoding.engine import EngineConfig
from stages.errors import ArtifactError, DraftlineError, PairError
from stages.evaluate.__main__ import run
from stages.evaluate.measure import Evaluation
from stages.evaluate.store import Store
from stages.evaluate.subjects import choose_draft_tokens
from stages.params import Evaluate, Params, StageParams, parse_params, read_params
from stages.serving.speculation import plan_speculation
from tests.evaluate.reports import drafter
from tests.gate.pair import KINDS, make_bigram_verifier, write_outputs, write_samples
from tests.paths import REPOSITORY


def stage_params(trust_remote_code: bool = False, **evaluate: Any) -> Params:
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


def evaluation(chosen: dict[str, list[TokenSample]], settings: Evaluate) -> Evaluation:
    engine = EngineConfig("nowhere", "float32", 256, 8, 1 << 20)
    return Evaluation([drafter("drafter", 4)], chosen, Path("nowhere"), engine, settings, Store(None, {}))


def test_speed_prompts_come_from_all_kinds_in_turn(tmp_path: Path) -> None:
    chosen = choose_per_kind(write_samples(tmp_path, per_kind=3), 3)
    made = evaluation(chosen, Evaluate(speed_prompts=7, speed_tokens=16))
    assert [request.id.split("-")[0] for request in made.speed_requests()] == [*KINDS] * 3
    assert {request.max_tokens for request in made.speed_requests()} == {16}
    assert [len(group) for group in made.groups(1)] == [1] * 7
    assert [len(group) for group in made.groups(16)] == [16], "fewer prompts than the batch come again"


def test_what_is_above_the_trained_block_is_left_out_and_said() -> None:
    assert choose_draft_tokens(7, [15, 4, 2, 4]) == ([2, 4, 7], [15])
    assert choose_draft_tokens(7, []) == ([7], [])


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

    monkeypatch.setattr("stages.evaluate.measure.EngineProcess", start)
    with pytest.raises(StartedError) as started:
        run(stage_params(trust_remote_code=trusted), outputs / "evaluate")
    assert started.value.args == (trusted,)


@pytest.mark.integration
def test_acceptance_speed_and_outputs_are_measured_through_engine_and_loop(outputs: Path) -> None:
    # Its samples are 10 prompts: too few to fail on outputs, enough to count them.
    settings = {
        "prompts_per_kind": 2,
        "max_tokens": 40,
        "repeats": 2,
        "speed_prompts": 2,
        "speed_tokens": 12,
        "draft_tokens": [2, 9],
        "batch_sizes": [1, 4, 64],
    }
    settings |= {"temperatures": [0.0, 1.0]}
    run(stage_params(**settings), outputs / "evaluate")
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
    assert length["macro"] > report["prompt_lookup"]["guarded"]["acceptance_length"]["macro"] >= 1.0
    assert report["lead_over_prompt_lookup"]["macro"]["low"] > 0
    table = report["per_position"]["all"]
    assert [row["position"] for row in table] == [1, 2, 3, 4] == list(range(1, report["draft_tokens"] + 1))
    assert table[0]["reached"] >= table[0]["accepted"] >= table[1]["reached"] > 0
    assert report["prompts"] == len(samples)
    assert report["left_out"] == {"drafter": [9]}
    cells = {(cell["drafter"], cell["temperature"], cell["draft_tokens"], cell["by"]): cell for cell in report["cells"]}
    assert {key for key in cells if key[0] == "drafter"} == {("drafter", t, k, by) for t, by in ((0.0, "engine"), (1.0, "loop")) for k in (2, 4)}
    # fp32, so every greedy output is the verifier's own; sampled ones are other texts of the same kind.
    assert all(cell["outputs"]["identical"] == len(samples) for key, cell in cells.items() if key[1] == 0.0)
    assert cells["drafter", 1.0, 4, "loop"]["seconds"]["head"] > 0
    assert cells["drafter", 1.0, 4, "loop"]["acceptance_length"]["macro"] > cells["drafter", 1.0, 2, "loop"]["acceptance_length"]["macro"]
    assert report["failures"] == []
    assert [repeat["baseline"]["tokens"] for repeat in report["speed"]["repeats"]] == [24, 24]
    assert [(entry["draft_tokens"], entry["batch_size"]) for entry in report["speed"]["measured"]] == [(2, 1), (2, 4), (4, 1), (4, 4)]
    speculation = plan_speculation(report, this_machine("vllm"), "float32", 4, 8, "report.json")
    assert speculation.ranges is not None, "the serving plan reads the costs that were measured"
    assert parse_table(report["costs"]["table"], "report.json").requests == [1, 4]
    assert report["verdict"] in ("ship", "tune", "drop")
    assert (outputs / "evaluate" / "report.md").is_file()
    assert len(list((outputs / "evaluate" / "plots").glob("*.png"))) == 4
