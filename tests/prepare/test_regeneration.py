"""Protects: the verifier's own answers through the real engine; after `kill -9` exactly the missing ones are asked."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import read_manifest, sha256_file
from stages.dataset import SPLITS, TokenSample, read_split
from stages.decoding.engine import Request
from stages.decoding.isolated import run_isolated
from stages.params import Engine as EngineSettings
from stages.prepare.answers import answering_engine
from stages.processor import slow_dtype
from tests.paths import REPOSITORY
from tests.prepare.project import make_project, prepare
from tests.tiny import make_verifier

pytestmark = pytest.mark.integration

OUTPUT = Path("outputs/prepare")
MAX_TOKENS = 20
KILL_AFTER = 8
# A random verifier hardly ever says <|im_end|>. With these ids as further ends, answers stop at many lengths.
EOS = [2, *range(300, 340)]

PROMPTS = [{"id": f"{kind}-{number}", "turns": [f"{kind} question {number}?"]} for kind in ("story", "code") for number in range(9)]
PROMPTS += [{"id": f"dialogue-{number}", "turns": [f"How are you, {number}?", "And how is the other one?"]} for number in range(6)]
# Rows with answers keep the questions and get the verifier's words.
PROMPTS += [{"id": "chat-1", "messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "Nobody."}]}]


def journal_lines() -> list[bytes]:
    files = list(OUTPUT.glob("work/*/answers.jsonl"))
    return [line for file in files for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def start() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, "-m", "stages.prepare"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def project(verifier: Path, limit: int | None) -> None:
    regeneration = {"enabled": True, "max_tokens": MAX_TOKENS, "samples_per_prompt": 2, "seed": 1}
    make_project(
        verifier, {"a.jsonl": PROMPTS}, engine={"max_num_seqs": 2}, limit=limit, validation_fraction=0.1, evaluation_fraction=0.3, regeneration=regeneration
    )


@dataclass
class Resumed:
    """A run killed after some answers and resumed with another limit."""

    folder: Path
    verifier: Path
    before: list[bytes]
    after: list[bytes]
    printed: str
    report: dict[str, Any]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    folder = tmp_path_factory.mktemp("resumed")
    verifier = make_verifier(folder / "model")
    config = verifier / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": EOS}))
    back = Path.cwd()
    os.chdir(folder)
    try:
        project(verifier, limit=20)
        process = start()
        deadline = time.monotonic() + 300
        while len(journal_lines()) < KILL_AFTER and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "killed while it was answering"
        before = journal_lines()
        (journal,) = OUTPUT.glob("work/*/answers.jsonl")
        with journal.open("ab") as stream:
            stream.write(b'{"key":"torn by the kill","tok')
        assert not list(OUTPUT.glob("*/samples.parquet")), "nothing final yet"
        project(verifier, limit=None)
        process = start()
        printed, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
        report = read_manifest(OUTPUT, alone=False)["report"]
        return Resumed(folder, verifier, before, journal_lines(), printed, report)
    finally:
        os.chdir(back)


@pytest.fixture
def samples(resumed: Resumed, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[TokenSample]]:
    monkeypatch.chdir(resumed.folder)
    return {split: read_split(OUTPUT, split) for split in SPLITS}


def test_exactly_the_missing_answers_are_asked(resumed: Resumed) -> None:
    assert KILL_AFTER <= len(resumed.before) < len(resumed.after)
    assert resumed.after[: len(resumed.before)] == resumed.before, "what was answered stays"
    keys = [json.loads(line)["key"] for line in resumed.after]
    assert len(set(keys)) == len(keys), "nothing is asked twice"
    asked = re.search(r"(\d+) answers asked", resumed.printed)
    assert asked
    assert int(asked[1]) == len(resumed.after) - len(resumed.before)


def test_another_run_asks_nothing_and_writes_the_same_bytes(resumed: Resumed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(resumed.folder)
    first = sha256_file(OUTPUT / "manifest.json")
    project(resumed.verifier, limit=None)
    prepare()
    assert "0 answers asked" in capsys.readouterr().out
    assert sha256_file(OUTPUT / "manifest.json") == first


def test_every_row_is_accounted_for_and_splits_are_whole(resumed: Resumed, samples: dict[str, list[TokenSample]]) -> None:
    """All answers to a prompt stay on one side; further answers are for training alone."""
    rows = resumed.report["rows"]
    prompts = {split: {sample.id.split("#")[0] for sample in samples[split]} for split in SPLITS}
    assert rows["read"] == len(PROMPTS) == sum(map(len, prompts.values())) + sum(rows["dropped"].values())
    assert len(set().union(*prompts.values())) == sum(map(len, prompts.values()))
    further = [sample for sample in samples["train"] if "#" in sample.id]
    assert further
    assert not [sample.id for split in ("validation", "evaluation") for sample in samples[split] if "#" in sample.id]
    assert resumed.report["further_answers"]["kept"] == len(further)


def test_samples_hold_what_the_verifier_says(resumed: Resumed, samples: dict[str, list[TokenSample]]) -> None:
    """Every supervised token of a greedy answer is the verifier's most likely one, as transformers computes it in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resumed.verifier, dtype=torch.float32)
    greedy = [sample for split in ("train", "validation") for sample in samples[split] if "#" not in sample.id]
    truncated = 0
    for sample in greedy:
        answer = sample.input_ids[sample.prompt_length :]
        assert sample.loss_mask[sample.prompt_length :] == [1] * len(answer)
        assert not any(token in EOS for token in answer[:-1]), "one end, and it stands last"
        assert answer[-1] in EOS or len(answer) == MAX_TOKENS
        truncated += answer[-1] not in EOS
        with torch.no_grad():
            logits = model(torch.tensor([sample.input_ids])).logits[0, :-1]
        chosen = logits.gather(1, torch.tensor(sample.input_ids[1:])[:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask[1:], dtype=torch.bool)
        assert float((logits.max(1).values - chosen)[mask].max()) < 1e-3
    assert 0 < truncated < len(greedy)
    assert sum(resumed.report["splits"][split]["truncated_answers"] for split in ("train", "validation")) >= truncated
    assert all(sample.messages[-1]["content"] != "Nobody." for sample in greedy), "the row's own answer is replaced"


def test_evaluation_prompts_wait_for_an_answer(samples: dict[str, list[TokenSample]]) -> None:
    assert {sample.kind for sample in samples["evaluation"]} >= {"story", "code"}
    for sample in samples["evaluation"]:
        assert sample.prompt_length == len(sample.input_ids)
        assert not any(sample.loss_mask)
        assert sample.messages[-1]["role"] == "user"
        assert sample.turns == sum(message["role"] == "user" for message in sample.messages)


def test_sampled_answers_to_more_prompt_than_a_step_holds(resumed: Resumed) -> None:
    """vLLM must not cut a seeded request's prompt in two on a CPU (see `answering_engine`)."""
    config = answering_engine(resumed.verifier, EngineSettings(dtype="float32", max_model_len=512, max_num_seqs=24), trust_remote_code=False)
    requests = [Request(str(n), [300 + n] * 410, max_tokens=2, temperature=0.7, seed=n) for n in range(24)]
    (completions,) = run_isolated(config, [requests]).completions
    assert len(completions) == len(requests)


@pytest.mark.skipif(slow_dtype("bfloat16") is None, reason="bf16 is not known to be slow here: there is nothing to warn of")
def test_a_slow_dtype_is_named_when_the_verifier_is_asked_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    verifier = make_verifier(tmp_path / "tiny")
    make_project(verifier, {"a.jsonl": PROMPTS[:4]}, engine={"dtype": "bfloat16"}, validation_fraction=0.0, regeneration={"enabled": True, "max_tokens": 2})
    for asked in (True, False):
        with start() as process:
            _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert ("engine.dtype = 'bfloat16'" in said) == asked
