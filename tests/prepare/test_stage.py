"""Protects: what the prepare stage writes with the answers that its rows hold, and that bad input ends it in one line with nothing written."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.artifacts import read_manifest, sha256_file
from stages.dataset import SPLITS, read_split
from stages.pairing.identity import read_identity
from stages.pairing.signatures import DigestCache, Job
from stages.params import read_params
from stages.prepare import __main__ as stage
from stages.prepare.inputs import fingerprint
from stages.prepare.lines import PrepareError
from tests.paths import REPOSITORY, shared
from tests.prepare.project import chat, make_project, prepare
from tests.prepare.templates import CONSTANT, DEAF, DIVIDES, INST, OPENS_THINKING
from tests.tiny import make_verifier

OUTPUT = Path("outputs/prepare")


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def accounted(report: dict[str, Any]) -> bool:
    """Every row that was read is kept, dropped, a copy, or beyond the limit."""
    rows = report["rows"]
    kept = sum(split["samples"] for split in report["splits"].values())
    return bool(rows["read"] == kept + sum(rows["dropped"].values()) + rows["duplicates"] + rows["beyond_limit"])


def test_splits_manifest_and_report(tiny_verifier: Path) -> None:
    chats = [chat(number, kind="ab"[number % 2]) for number in range(40)] + [chat(3, kind="b")]
    make_project(tiny_verifier, {"data/a.jsonl": chats, "data/b.jsonl.gz": gzip.compress(json.dumps(chat(99)).encode())})
    report = prepare()
    (OUTPUT / "work").mkdir()
    (OUTPUT / ".lock").touch()
    manifest = read_manifest(OUTPUT, read_identity().digest, alone=False)
    assert set(manifest["files"]) == {f"{split}/samples.parquet" for split in SPLITS}
    assert [Path(entry["path"]).name for entry in manifest["inputs"]["inputs"]] == ["a.jsonl", "b.jsonl.gz"]
    assert accounted(report)
    assert report["rows"]["read"] == 42
    assert report["rows"]["duplicates"] == 1

    samples = {split: read_split(OUTPUT, split) for split in SPLITS}
    ids = [sample.id for split in SPLITS for sample in samples[split]]
    assert len(set(ids)) == len(ids) == 41
    assert {split: len(samples[split]) for split in SPLITS} == {"train": 35, "validation": 2, "evaluation": 4}
    assert {sample.kind for sample in samples["evaluation"]} == {"a", "b"}
    for split in ("train", "validation"):
        for sample in samples[split]:
            assert len(sample.loss_mask) == len(sample.input_ids)
            assert sample.loss_mask[sample.prompt_length - 1 : sample.prompt_length + 1] == [0, 1], "the slot after the prompt is supervised"
            assert sample.messages[-1] == {"role": "assistant", "content": "Fine, thank you."}
    for sample in samples["evaluation"]:
        assert sample.prompt_length == len(sample.input_ids)
        assert sample.prompt_ids == sample.input_ids
        assert not any(sample.loss_mask)
        assert sample.messages[-1]["role"] == "user"
        assert sample.turns == 1
    for split in SPLITS:
        assert report["splits"][split]["tokens"] == sum(len(sample.input_ids) for sample in samples[split])
        assert report["splits"][split]["supervised_tokens"] == sum(sum(sample.loss_mask) for sample in samples[split])
        assert sum(sizes["samples"] for sizes in report["splits"][split]["kinds"].values()) == len(samples[split])

    first = sha256_file(OUTPUT / "manifest.json")
    prepare()
    assert sha256_file(OUTPUT / "manifest.json") == first, "the same inputs give the same bytes"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(3, 40), st.sampled_from([0.0, 0.01, 0.3, 0.6]), st.sampled_from([0.0, 0.05, 0.39]), st.one_of(st.none(), st.integers(5, 50)))
def test_no_prompt_is_on_two_sides_for_every_size_and_ratio(tiny_verifier: Path, size: int, validation: float, evaluation: float, limit: int | None) -> None:
    """Whole stage: same question with several answers, copies, limits."""
    chats = [chat(number % (size // 2 + 2), answer=f"Answer {number % 7}.") for number in range(size)]
    make_project(tiny_verifier, {"a.jsonl": chats}, validation_fraction=validation, evaluation_fraction=evaluation, limit=limit)
    report = prepare()
    assert accounted(report)
    asked = {split: {sample.messages[0]["content"] for sample in read_split(OUTPUT, split)} for split in SPLITS}
    assert not asked["train"] & asked["validation"]
    assert not asked["train"] & asked["evaluation"]
    assert not asked["validation"] & asked["evaluation"]
    assert asked["train"]
    assert bool(asked["validation"]) == (validation > 0)
    assert bool(asked["evaluation"]) == (evaluation > 0)


def test_evaluation_files_fill_the_evaluation_split_alone_and_their_copies_do_not_train(tiny_verifier: Path) -> None:
    held_out = [{"id": "gsm8k-7", "turns": ["How are you, 5?"]}, {"id": "gsm8k-8", "prompt": "And you?"}, chat(50), {"turns": ["One?", "Two?"]}]
    make_project(
        tiny_verifier, {"a.jsonl": [chat(number) for number in range(10)], "eval/gsm8k.jsonl": held_out}, inputs=["a.jsonl"], evaluation_inputs=["eval/*"]
    )
    report = prepare()
    assert accounted(report)
    assert report["rows"]["duplicates"] == 1
    assert report["rows"]["dropped"] == {"no assistant turn": 1}, "nobody answered the first of the two turns"
    assert [(sample.id, sample.kind) for sample in read_split(OUTPUT, "evaluation")] == [("gsm8k-7", "gsm8k"), ("gsm8k-8", "gsm8k"), ("q-50", "q")]
    kept = {sample.id for split in ("train", "validation") for sample in read_split(OUTPUT, split)}
    assert kept == {f"q-{number}" for number in range(10)} - {"q-5"}


def test_samples_are_cut_and_answers_cut_away_are_counted(tiny_verifier: Path) -> None:
    three = {"id": "three", "messages": [{"role": role, "content": text} for text in ("One?", "Two?", "word " * 60) for role in ("user", "assistant")]}
    chats = [chat(number) for number in range(8)]
    chats += [chat(20, "word " * 200), {"messages": [{"role": "user", "content": "word " * 200}, chat(0)["messages"][1]]}, three]
    make_project(tiny_verifier, {"a.jsonl": chats}, max_seq_len=60, validation_fraction=0.0, evaluation_fraction=0.0)
    report = prepare()
    assert accounted(report)
    assert report["rows"]["dropped"] == {"answer truncated away": 1}
    assert report["splits"]["train"]["cut_samples"] == 2
    samples = {sample.id: sample for sample in read_split(OUTPUT, "train")}
    assert len(samples["q-20"].input_ids) == 60
    assert samples["q-20"].loss_mask[samples["q-20"].prompt_length :] == [1] * (60 - samples["q-20"].prompt_length)
    assert samples["three"].turns == 2, "the third turn lies beyond the cut"
    assert [message["content"] for message in samples["three"].messages] == ["One?", "One?", "Two?", "Two?"]
    assert samples["three"].loss_mask[samples["three"].prompt_length] == 1


def test_shared_roles_and_boundaries_survive_with_counts(tiny_verifier: Path) -> None:
    files = {f"{name}.jsonl": shared(f"cases/{name}.jsonl").read_bytes() for name in ("roles", "boundaries", "unicode", "duplicates")}
    make_project(tiny_verifier, files, max_seq_len=2047, engine={"max_model_len": 4096}, validation_fraction=0.0, evaluation_fraction=0.0)
    report = prepare()
    assert accounted(report)
    assert report["rows"]["dropped"] == {
        "unknown role": 1,
        "empty assistant turn": 1,
        "no assistant turn": 1,
        "message without text": 1,
        "the template leaves out tool calls": 1,
        "answer truncated away": 2,  # this tokenizer takes two tokens for each word, so the straddling one is beyond the limit as well
    }
    samples = {sample.id: sample for sample in read_split(OUTPUT, "train")}
    assert samples["three-turns"].turns == 3
    assert sum(samples["one-token-answer"].loss_mask) > 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ["a.jsonl: empty file"]),
        (json.dumps(chat(1)).encode() + b'\n{"id": "cut", "mess', ["a.jsonl:2: not JSON", "on_error"]),
        (json.dumps(chat(1, "")).encode(), ["no row is left; 1 rows read", "1 × empty assistant turn (first: a.jsonl:1)"]),
        (json.dumps({"turns": ["Hi"]}).encode(), ["no row is left; 1 rows read", "1 × no assistant turn"]),
        ((json.dumps(chat(1)) + "\n").encode() * 5, ["1 distinct prompts are left, 3 are needed", "4 × duplicate"]),
    ],
    ids=["empty", "broken", "empty-answer", "no-answer", "only-duplicates"],
)
def test_bad_input_is_one_line_and_nothing_is_written(tiny_verifier: Path, content: bytes, says: list[str]) -> None:
    make_project(tiny_verifier, {"a.jsonl": content})
    with pytest.raises(PrepareError) as error:
        prepare()
    assert all(part in str(error.value) for part in says), str(error.value)
    assert "\n" not in str(error.value)
    assert not OUTPUT.exists()


@pytest.mark.parametrize(
    ("limit", "says"),
    [(1, "1 distinct prompts are left, 3 are needed"), (2, "2 distinct prompts are left, 3 are needed")],
)
def test_a_limit_that_leaves_too_little_is_named(tiny_verifier: Path, limit: int, says: str) -> None:
    make_project(tiny_verifier, {"a.jsonl": [chat(number) for number in range(6)]}, limit=limit)
    with pytest.raises(PrepareError) as error:
        prepare()
    assert str(error.value).startswith(says)
    assert f"6 rows read: {6 - limit} × beyond prepare.limit = {limit}; " in str(error.value)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (DIVIDES, chat(1)["messages"], "refused by the template: integer division or modulo by zero"),
        (DEAF, chat(1)["messages"], "the template leaves the answer out"),
        (OPENS_THINKING, chat(1)["messages"], "the template does not continue its own generation prompt with the answer"),
        (INST, [{"role": "system", "content": "x"}, *chat(1)["messages"]], "refused by the template: System role not supported"),
    ],
)
def test_no_supervised_token_at_all_names_the_template(tmp_path: Path, template: str, messages: list[dict[str, Any]], reason: str) -> None:
    verifier = make_verifier(tmp_path / "model", template=template, layers=1)
    rows = [{"messages": [*messages[:-1], {"role": "assistant", "content": f"Answer {number}."}]} for number in range(5)]
    make_project(verifier, {"a.jsonl": rows})
    with pytest.raises(PrepareError) as error:
        prepare()
    assert f"no row is left; 5 rows read: 5 × {reason}" in str(error.value)
    assert "chat template " in str(error.value)
    assert template[:40].split("\n")[0] in str(error.value)
    assert not OUTPUT.exists()


@pytest.mark.parametrize("regenerate", [False, True])
def test_a_template_that_ignores_the_messages_is_refused_before_anything_is_asked(tmp_path: Path, regenerate: bool) -> None:
    verifier = make_verifier(tmp_path / "model", template=CONSTANT, layers=1)
    make_project(verifier, {"a.jsonl": [chat(number) for number in range(5)]}, regeneration={"enabled": regenerate})
    with pytest.raises(PrepareError, match=r"^chat template [0-9a-f]{12} \(<\|im_start\|>user…?.*\): ignores the messages") as error:
        prepare()
    assert "\n" not in str(error.value)
    assert not OUTPUT.exists()


def test_skip_leaves_broken_lines_out_and_counts_them(tiny_verifier: Path) -> None:
    lines = [json.dumps(chat(number)) for number in range(6)]
    make_project(tiny_verifier, {"a.jsonl": "\n".join([*lines[:3], "{", *lines[3:], "[]"]).encode()}, on_error="skip")
    report = prepare()
    assert report["rows"]["broken_lines"] == 2
    assert report["rows"]["examples"]["broken line"].startswith("a.jsonl:4: not JSON")
    assert accounted(report)


def test_a_failed_run_leaves_what_was_there(tiny_verifier: Path) -> None:
    make_project(tiny_verifier, {"a.jsonl": [chat(number) for number in range(6)]})
    prepare()
    before = {path: sha256_file(path) for path in OUTPUT.rglob("*") if path.is_file()}
    Path("a.jsonl").write_text("{")
    with pytest.raises(PrepareError):
        prepare()
    assert {path: sha256_file(path) for path in OUTPUT.rglob("*") if path.is_file()} == before


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_rows(path: Path) -> None:
    path.write_bytes(gzip.compress(b"[]\n" * 30))


def more_rows(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


@pytest.mark.parametrize("regenerate", [False, True])
@pytest.mark.parametrize("step", ["fingerprint", "read"])
@pytest.mark.parametrize("happens", [Path.unlink, emptied, cut_in_half, other_rows, more_rows])
def test_an_input_that_changes_meanwhile_is_the_one_that_is_blamed(
    tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Path], None], step: str, regenerate: bool
) -> None:
    """Before the first pass over the files and after it; no pass may take what it then trips over for the cause."""
    rows = "".join(json.dumps(chat(number)) + "\n" for number in range(30)).encode()
    path = Path("b.jsonl.gz")
    make_project(tiny_verifier, {"a.jsonl": [chat(99)], path.name: gzip.compress(rows)}, on_error="skip", regeneration={"enabled": regenerate})
    original = getattr(stage, step)
    monkeypatch.setattr(stage, "with_the_verifiers", lambda *arguments: pytest.fail("the verifier is asked before the rows are known to be sound"))

    def meanwhile(*arguments: Any) -> Any:
        result = original(*arguments)
        happens(path)
        return result

    monkeypatch.setattr(stage, step, meanwhile)
    with pytest.raises(PrepareError) as error:
        prepare()
    what = "was removed" if happens is Path.unlink else "changed"
    assert str(error.value).startswith(f"{path}: {what} while prepare was reading it; "), str(error.value)
    assert "\n" not in str(error.value)
    assert not list(OUTPUT.glob("*/samples.parquet"))


def test_an_input_that_vanishes_while_it_is_digested_is_named(tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project(tiny_verifier, {"a.jsonl": [chat(1)], "b.jsonl": [chat(2)]})
    settings = read_params().prepare

    def digests(cache: DigestCache, jobs: Sequence[Job]) -> list[str]:
        Path("b.jsonl").unlink(missing_ok=True)
        return [""] * len(jobs)

    monkeypatch.setattr(DigestCache, "digests", digests)
    with pytest.raises(PrepareError, match=r"^b\.jsonl: was removed while prepare was reading it; put it back and run again$"):
        fingerprint(settings)


def test_a_failure_beside_unchanged_inputs_stays_what_it_is(tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project(tiny_verifier, {"a.jsonl": [chat(number) for number in range(6)]})
    monkeypatch.setattr(stage, "read", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare()


def test_one_edited_byte_of_an_input_changes_what_prepare_depends_on(tiny_verifier: Path) -> None:
    """DVC cannot list files that a glob finds outside the repository: `inputs` digests them for it."""
    make_project(tiny_verifier, {"a.jsonl": [chat(number) for number in range(3)]})
    params = read_params()
    before = fingerprint(params.prepare, Path("digests.json"))
    assert fingerprint(params.prepare, Path("digests.json")) == before
    path = Path("a.jsonl")
    path.write_bytes(path.read_bytes().replace(b"1", b"7", 1))
    after = fingerprint(params.prepare, Path("digests.json"))
    assert [entry["path"] for entry in after["inputs"]] == [entry["path"] for entry in before["inputs"]]
    assert after != before


def test_the_command_reports_one_line_and_a_status(tiny_verifier: Path) -> None:
    make_project(tiny_verifier, {"a.jsonl": b"{"})
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-m", "stages.prepare"], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("draftline prepare: a.jsonl:1: not JSON")
    assert "Traceback" not in done.stderr
