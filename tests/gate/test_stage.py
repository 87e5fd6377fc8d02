"""The gate through the real engine: an honest one passes, a broken acceptance rule and a wrong drafter do not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file, save_file

from stages.artifacts import read_json, write_json, write_manifest
from stages.dataset import read_split, write_split
from stages.decoding.engine import EngineConfig
from stages.decoding.isolated import EngineProcess, engine_life
from stages.errors import ArtifactError, DraftlineError, PairError
from stages.gate.__main__ import drafts_report, prove, run
from stages.gate.cases import LIMITS
from stages.gate.proof import Run
from stages.pairing.identity import compute_identity
from stages.params import Gate, Params, StageParams, parse_params, read_params
from tests.gate.broken_engine import broken_life
from tests.gate.pair import KINDS, make_bigram_verifier, write_outputs
from tests.paths import REPOSITORY

SETTINGS = Gate(prompts_per_kind=2, max_tokens=24, parity_rounds=40)
ENGINE = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_bytes": 1 << 26}


def stage_params(dtype: str = "float32", trust_remote_code: bool = False) -> Params:
    data = read_params(REPOSITORY / "params.yaml").model_dump()
    data["verifier"]["trust_remote_code"] = trust_remote_code
    data["engine"] |= ENGINE | {"dtype": dtype}
    data["prepare"]["max_seq_len"] = 128
    data["gate"] = SETTINGS.model_dump()
    return cast(Params, StageParams(parse_params(data), "gate"))


def no_engine(config: EngineConfig, desc: str) -> EngineProcess:
    raise AssertionError("an engine was started")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_outputs(tmp_path, make_bigram_verifier(tmp_path / "verifier"))
    return tmp_path


def test_a_pair_that_does_not_belong_together_is_refused_before_any_forward(root: Path) -> None:
    path = root / "outputs" / "convert" / "checkpoint" / "verifier_lock.json"
    lock = read_json(path)
    lock["identity"]["chat_template"] = "0" * 64
    write_json(path, lock)
    write_manifest(path.parent, read_json(path.parent / "manifest.json")["verifier"])
    with pytest.raises(PairError, match="chat_template"):
        run(stage_params(), root / "outputs" / "gate", no_engine)


def test_an_altered_checkpoint_is_refused_before_any_forward(root: Path) -> None:
    with (root / "outputs" / "convert" / "checkpoint" / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x55")
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        run(stage_params(), root / "outputs" / "gate", no_engine)


def test_what_the_lock_refused_is_not_decoded(root: Path) -> None:
    write_json(root / "outputs" / "lock" / "report.json", {"verdict": "mismatch"})
    with pytest.raises(DraftlineError, match="does not match"):
        run(stage_params(), root / "outputs" / "gate", no_engine)


def test_without_held_out_prompts_there_is_no_proof(root: Path) -> None:
    write_split(root / "outputs" / "prepare", "evaluation", [])
    with pytest.raises(ArtifactError, match="no held-out prompts"):
        run(stage_params(), root / "outputs" / "gate", no_engine)


class StartedError(Exception):
    """Stands for an engine or a forward of ours: it is started, and that is all."""


@pytest.mark.parametrize("trusted", [False, True])
def test_engines_and_our_own_forward_may_run_the_model_s_code_where_the_user_lets_them(root: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool) -> None:
    def start(config: EngineConfig, desc: str) -> EngineProcess:
        raise StartedError(config)

    def forward(*arguments: object, trust_remote_code: bool = False, **named: object) -> None:
        raise StartedError(trust_remote_code)

    with pytest.raises(StartedError) as started:
        run(stage_params(trust_remote_code=trusted), root / "outputs" / "gate", start)
    (config,) = started.value.args
    assert config.trust_remote_code is trusted
    monkeypatch.setattr("stages.decoding.parity.draft_parity", forward)
    with pytest.raises(StartedError) as started:
        drafts_report(root, config, Run("float32", [], []), 1, 1.0)
    assert started.value.args == (trusted,)


Proof = tuple[dict[str, Any], list[str], list[Run], Path]


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    """One honest proof, in bf16 and fp32, that several tests read."""
    root = tmp_path_factory.mktemp("gate")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        verifier = make_bigram_verifier(root / "verifier")
        write_outputs(root, verifier)
        engine = EngineConfig(str(verifier), "bfloat16", **ENGINE)
        checkpoint = root / "outputs" / "convert" / "checkpoint"
        samples = read_split(root / "outputs" / "prepare", "evaluation")
        yield *prove(SETTINGS, engine, compute_identity(verifier).quantization, checkpoint, samples, EngineProcess), root


@pytest.mark.integration
def test_an_honest_engine_is_identical_in_fp32_and_differs_in_the_served_dtype_by_near_ties_alone(proof: Proof) -> None:
    report, wrong, runs, _ = proof
    assert wrong == []
    assert [run.dtype for run in runs] == ["bfloat16", "float32"]
    exact = report["dtypes"]["float32"]
    assert exact["identical"] + exact["near_tie"] == exact["prompts"] >= 2 * len(KINDS) + 1 + len(LIMITS)
    served = report["dtypes"]["bfloat16"]
    assert served["wrong"] == 0
    for finding in report["divergences"]:
        assert finding["margin"] < report["near_tie"][finding["dtype"]]
        assert finding["baseline"] != finding["drafted"]


@pytest.mark.integration
def test_the_proof_covers_what_it_must(proof: Proof) -> None:
    report, _, runs, _ = proof
    for run_ in runs:
        seen = report["coverage"][run_.dtype]
        assert set(seen["kinds"]) == set(KINDS)
        assert seen["multi_turn"] >= 1
        # All that this engine takes, less two blocks behind the answer; the real one gets more than 1,000.
        assert seen["longest_prompt"] == 256 - SETTINGS.max_tokens - 2 * report["draft_tokens"]
        assert seen["ends"]["stop_token"]["on_accepted_draft"] >= 1
        assert seen["ends"]["max_tokens"]["on_accepted_draft"] >= 1
        for case, completion in zip(run_.cases, run_.baseline, strict=True):
            if case.why == "block-stop":
                assert completion.finish_reason == "stop"
                assert completion.token_ids[-1] in case.request.stop_token_ids


@pytest.mark.integration
def test_the_engine_drafts_what_our_own_forward_drafts(proof: Proof) -> None:
    report, *_ = proof
    assert report["parity"]["rounds"] == SETTINGS.parity_rounds
    assert report["parity"]["tokens"] == SETTINGS.parity_rounds * report["draft_tokens"]
    assert report["parity"]["wrong"] == 0


@pytest.mark.integration
def test_a_wrong_drafter_is_caught_although_it_is_lossless(proof: Proof, tmp_path: Path) -> None:
    """The same run, held against a checkpoint whose Markov head is one token off: what a slip between the two would look like."""
    *_, runs, root = proof
    other = tmp_path / "checkpoint"
    shutil.copytree(root / "outputs" / "convert" / "checkpoint", other)
    weights = load_file(other / "model.safetensors")
    weights["markov_head.markov_w1.weight"] = weights["markov_head.markov_w1.weight"].roll(1, dims=0)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    engine = EngineConfig(str(root / "verifier"), "float32", **ENGINE)
    report, wrong = drafts_report(other, engine, runs[-1], SETTINGS.parity_rounds, SETTINGS.fp32_near_tie)
    assert report["wrong"] > report["rounds"] // 2
    assert len(wrong) == report["wrong"]
    assert wrong[0].startswith("draft of ")


@pytest.mark.integration
def test_an_engine_that_accepts_every_draft_fails_the_stage_with_its_evidence(root: Path) -> None:
    def start(config: EngineConfig, desc: str) -> EngineProcess:
        return EngineProcess(config, desc, broken_life if config.speculative else engine_life)

    with pytest.raises(DraftlineError, match=r"report\.json: verdict fail"):
        run(stage_params(), root / "outputs" / "gate", start)
    report = read_json(root / "outputs" / "gate" / "report.json")
    assert report["verdict"] == "fail"
    assert report["dtypes"]["float32"]["wrong"] > report["dtypes"]["float32"]["prompts"] // 2
    worst = [finding for finding in report["divergences"] if finding["verdict"] == "wrong"]
    for finding in worst:
        assert finding["margin"] is None or finding["margin"] >= report["near_tie"]["float32"]
        assert finding["prompt"]
        assert finding["position"] >= 1
    # It is the acceptance that is broken: the drafts themselves are still the drafter's.
    assert report["parity"]["wrong"] == 0
