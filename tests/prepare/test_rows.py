"""Protects: every row of a file is read as it is, or named, or counted; nothing is lost or bent without a word."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.dataset import messages_text
from stages.prepare.index import keys
from stages.prepare.lines import BATCH_LINES, PrepareError, batches, input_files
from stages.prepare.rows import TO_ANSWER, Asks, BrokenLineError, Row, Tally
from tests.paths import shared
from tests.prepare.project import read_rows

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
GOOD = json.dumps({"id": "ok-1", "messages": [USER, ANSWER]}).encode()


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows_of(path: Path, asks: Asks = "none", on_error: str = "fail") -> tuple[list[Row], Tally]:
    tally = Tally()
    return list(read_rows([path], tally, on_error, asks)), tally  # type: ignore[arg-type]


def test_every_format_gives_the_same_conversation(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWER]},
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
    )
    rows, _ = rows_of(path)
    assert [row.messages for row in rows] == [[{"role": "system", "content": "Be brief."}, USER, ANSWER]] * 4


def test_prompts_wait_for_an_answer_after_each_turn(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"turns": ["One?", "Two?"]}, {"prompt": "One?"})
    rows, _ = rows_of(path, "all")
    one, two = {"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}
    assert [row.messages for row in rows] == [[one, TO_ANSWER, two, TO_ANSWER], [one, TO_ANSWER]]
    _, tally = rows_of(path, "none")
    assert tally.dropped == {"no assistant turn": 2}
    held_out, tally = rows_of(path, "last")
    assert [row.messages for row in held_out] == [[one, TO_ANSWER]]
    assert tally.dropped == {"no assistant turn": 1}


def test_regeneration_keeps_what_the_verifier_cannot_say(tmp_path: Path) -> None:
    """Openings and calls of tools are context; every other answer is asked anew, a missing last one too."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]}
    tool = {"role": "tool", "tool_call_id": "c", "content": "4 C"}
    path = write(tmp_path / "a.jsonl", {"messages": [ANSWER, USER, call, tool, ANSWER, USER]}, {"messages": [USER, call]})
    (row,), tally = rows_of(path, "all")
    call_as_given = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
    assert row.messages == [ANSWER, USER, call_as_given, tool, TO_ANSWER, USER, TO_ANSWER]
    assert row.messages[4] is TO_ANSWER
    assert tally.dropped == {"no assistant turn": 1}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"id": "cut", "messages": [{"role": "us', "not JSON"),
        (b"[]", "must be a JSON object, this is a list"),
        (b"null", "NoneType"),
        (b'{"id": "x"}', "none of 'messages', 'conversations', 'turns' and 'prompt'"),
        (b'{"messages": []}', "'messages' must be a list of messages"),
        (b'{"messages": "Hi"}', "'messages' must be a list of messages"),
        (b'{"conversations": ["Hi"]}', "'conversations' must be a list of messages"),
        (b'{"turns": "Hi"}', "'turns' must be a list of texts"),
        (b'{"turns": [1]}', "'turns' must be a list of texts"),
        (b'{"prompt": null}', "'prompt' a text"),
        (b'{"prompt": "Hi", "id": [1]}', "'id' must be"),
        (b'{"prompt": "Hi", "id": true}', "'id' must be"),
        (b'{"prompt": "Hi", "kind": 3}', "'kind' must be"),
        (b'{"prompt": "Hi", "tools": "f"}', "'tools' must be"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "Hi", "score": NaN}', "NaN"),
        (b'{"prompt": "Hi", "score": -Infinity}', "NaN"),
        (b'{"prompt": "Hi", "score": 1e999}', "NaN"),
        (b'{"prompt": "Hi", "score": ' + b"9" * 400 + b".0}", "NaN"),
        (b'{"prompt": "Hi", "score": ' + b"9" * 5000 + b"}", "holds a whole number of more than 4300 digits"),
        (b'{"prompt": "Hi", "x": ' + b"[" * 100_000, "not JSON"),
        (b'{"prompt": "Hi", "x": ' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 200 levels"),
        (b'{"prompt": "Hi", "tools": [{"x": ' + b'{"x":' * 985 + b"1" + b"}" * 985 + b"}]}", "nested deeper than 200 levels"),
        (b'{"messages": [{"role": "user", "content": "Hi", "x": ' + b"[" * 988 + b"]" * 988 + b"}]}", "nested deeper than 200 levels"),
        ('{"prompt": "Hi"}'.encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_broken_line_is_named_or_counted(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\n" + GOOD)
    with pytest.raises(BrokenLineError) as error:
        rows_of(path)
    assert f"{path}:3: " in str(error.value)
    assert why in str(error.value)
    assert "\n" not in str(error.value)
    rows, tally = rows_of(path, on_error="skip")
    assert len(rows) == 2
    assert tally.broken_lines == 1
    assert tally.read == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"x": NaN}', "arguments of a tool call: holds NaN or Infinity, which is no JSON"),
        ('{"x": -1e999}', "arguments of a tool call: holds NaN or Infinity, which is no JSON"),
        ('{"x": "\\ud800"}', "arguments of a tool call: holds half of a surrogate pair, which is no character"),
        ('{"x": ' + "[" * 200 + "]" * 200 + "}", "arguments of a tool call: not JSON that can be read: nested deeper than 200 levels"),
        ("[" * 100_000 + "]" * 100_000, "arguments of a tool call: not JSON that can be read: nested deeper than 200 levels"),
        ("9" * 5000, "arguments of a tool call: holds a whole number of more than 4300 digits"),
    ],
)
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_arguments_that_cannot_be_handed_on_drop_their_row(tmp_path: Path, arguments: str, reason: str, on_error: str) -> None:
    """They are JSON in a JSON text: the line that holds them is sound, and what is in them is met later."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]}, {"messages": [USER, call, {"role": "tool", "content": "4 C"}, ANSWER]})
    asks: Asks
    for asks in ("none", "all"):
        rows, tally = rows_of(path, asks, on_error)
        assert len(rows) == 1
        assert tally.dropped == {reason: 1}
        assert tally.examples == {reason: f"{path}:2"}


def test_what_is_nested_as_deep_as_allowed_is_read_digested_and_written(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(196):
        deep = [deep]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps([[deep]])}}]}
    path = write(tmp_path / "a.jsonl", {"messages": [USER, call, {"role": "tool", "content": "x"}, ANSWER], "tools": [{"x": deep}]})
    (row,), _ = rows_of(path)
    assert len(keys(row)) == 2
    assert json.loads(messages_text(row.messages)) == row.messages


def test_shared_broken_file() -> None:
    path = shared("cases/broken.jsonl")
    with pytest.raises(BrokenLineError, match=r"broken\.jsonl:2: not JSON"):
        rows_of(path)
    rows, tally = rows_of(path, on_error="skip")
    assert [row.id for row in rows] == ["ok-1", "ok-2", "ok-3"]
    assert tally.broken_lines == 3


@pytest.mark.parametrize("content", [b"", b"\n\n \n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["empty.jsonl", "empty.jsonl.gz"])
def test_an_empty_file_is_named(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(PrepareError, match=r"empty\.jsonl.*: empty file"):
        rows_of(path, on_error="skip")


def test_a_torn_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD * 1000)[:-20])
    with pytest.raises(PrepareError, match=r"a\.jsonl\.gz: not a complete gzip file"):
        rows_of(path, on_error="skip")
    path.write_bytes(GOOD)
    with pytest.raises(PrepareError, match="not a complete gzip file"):
        rows_of(path)


def test_only_line_feeds_split_rows(tmp_path: Path) -> None:
    """U+2028, U+2029, U+0085, vertical tab and form feed end lines for `str.splitlines`, not in JSONL."""
    text = "a\u2028b\u2029c\u0085d\x1ce f"
    path = tmp_path / "a.jsonl"
    record = json.dumps({"messages": [{"role": "user", "content": text}, ANSWER]}, ensure_ascii=False).replace("\\u001c", "\\u001c")
    path.write_bytes(b"\xef\xbb\xbf" + record.encode() + b"\r\n" + b"\xef\xbb\xbf" + record.encode())
    rows, _ = rows_of(path)
    assert [row.messages[0]["content"] for row in rows] == [text, text]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=2, max_size=6), st.booleans())
def test_any_text_survives_reading(tmp_path_factory: pytest.TempPathFactory, texts: list[str], ascii_only: bool) -> None:
    path = tmp_path_factory.mktemp("any") / "a.jsonl.gz"
    messages = [{"role": "user" if number % 2 == 0 else "assistant", "content": text} for number, text in enumerate(texts[: len(texts) // 2 * 2])]
    path.write_bytes(gzip.compress(json.dumps({"id": texts[0], "messages": messages}, ensure_ascii=ascii_only).encode(), compresslevel=0))
    (row,), _ = rows_of(path)
    assert row.messages == messages
    assert row.id == texts[0]


def test_shared_unicode_file_round_trips() -> None:
    path = shared("cases/unicode.jsonl")
    rows, _ = rows_of(path)
    expected = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert [(row.id, row.messages) for row in rows] == [(record["id"], record["messages"]) for record in expected]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER, {"role": "my-model-7b", "content": "Hello."}], "unknown role"),
        ([USER, {"role": ["assistant"], "content": "Hello."}], "unknown role"),
        ([USER, {"content": "Hello."}], "unknown role"),
        ([USER, {"role": "assistant", "content": ""}], "empty assistant turn"),
        ([USER, {"role": "assistant", "content": None}], "empty assistant turn"),
        ([USER, {"role": "assistant", "content": []}], "empty assistant turn"),
        ([USER, ANSWER, USER, {"role": "assistant", "content": ""}], "empty assistant turn"),
        ([USER], "no assistant turn"),
        ([ANSWER], "no assistant turn"),
        ([{"role": "system", "content": "x"}, ANSWER, USER], "no assistant turn"),
        ([{"role": "user", "content": None}, ANSWER], "message without text"),
        ([{"role": "user", "content": 4}, ANSWER], "message without text"),
        ([{"role": "user", "content": " \n"}, ANSWER], "empty user turn"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER], "content part that is not text"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": ["f"]}], "tool call that is not a function's"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "tool call whose arguments are not JSON"),
    ],
)
def test_an_unusable_conversation_is_counted_under_its_reason(tmp_path: Path, messages: list[dict[str, Any]], reason: str) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]}, {"messages": messages})
    rows, tally = rows_of(path)
    assert len(rows) == 1
    assert tally.dropped == {reason: 1}
    assert tally.examples == {reason: f"{path}:2"}
    assert tally.read == 2


def test_shared_roles_file() -> None:
    rows, tally = rows_of(shared("cases/roles.jsonl"))
    assert [row.id for row in rows] == ["opens-with-assistant", "two-users", "tool-role", "sharegpt", "sharegpt-system", "content-parts", "three-turns", "ok-1"]
    assert tally.dropped == {"unknown role": 1, "empty assistant turn": 1, "no assistant turn": 1, "message without text": 1}


def test_chosen_lines_are_those_that_were_counted(tmp_path: Path) -> None:
    """Positions count lines that are not blank, over all files; line numbers are the files' own."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    first.write_bytes(b"\n".join(b"%d" % number if number % 3 else b" " for number in range(2 * BATCH_LINES)))
    second.write_bytes(gzip.compress(b"\n\nx\ny"))
    every = [(batch.path, *line) for batch in batches([first, second]) for line in zip(batch.positions, batch.numbers, batch.lines, strict=True)]
    assert [position for _, position, _, _ in every] == list(range(len(every)))
    assert all(path == second or line == b"%d" % (number - 1) for path, _, number, line in every)
    assert every[-2:] == [(second, len(every) - 2, 3, b"x"), (second, len(every) - 1, 4, b"y")]
    chosen = np.arange(len(every)) % 5 == 1
    some = [(batch.path, *line) for batch in batches([first, second], chosen) for line in zip(batch.positions, batch.numbers, batch.lines, strict=True)]
    assert some == [line for line, taken in zip(every, chosen, strict=True) if taken]
    with pytest.raises(PrepareError, match=r"b\.jsonl\.gz: changed while it was being read"):
        list(batches([first, second], chosen[:-1]))


def test_ids_and_kinds(tmp_path: Path) -> None:
    records = [
        {"id": "gsm8k-3", "prompt": "a"},
        {"id": "mt-bench-12", "prompt": "b"},
        {"id": "gsm8k-3", "kind": "math", "prompt": "c"},
        {"id": "two-users", "prompt": "d"},
        {"id": 7, "prompt": "e"},
        {"prompt": "f"},
        {"prompt": "f"},
        {"id": 0, "prompt": "g"},
    ]
    rows, _ = rows_of(write(tmp_path / "stem.jsonl", *records), "all")
    assert [row.kind for row in rows] == ["gsm8k", "mt-bench", "math", "stem", "stem", "stem", "stem", "stem"]
    assert [row.id for row in rows[:5]] == ["gsm8k-3", "mt-bench-12", "gsm8k-3", "two-users", "7"]
    assert rows[5].id == rows[6].id
    assert len(rows[5].id) == 16
    assert rows[7].id == "0"
    path = tmp_path / "other.name.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "f"}'))
    (row,), _ = rows_of(path, "all")
    assert (row.id, row.kind) == (rows[5].id, "other.name"), "an id from content does not depend on the file"


def test_files_are_matched_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = input_files([f"{tmp_path}/b.jsonl", f"{tmp_path}/*.jsonl", f"{tmp_path}/**/*.jsonl.gz"])
    assert [path.name for path in found] == ["b.jsonl", "a.jsonl", "c.jsonl.gz"]
    with pytest.raises(PrepareError, match=r"prepare\.inputs: '.*none\*\.jsonl' matches no file"):
        input_files([f"{tmp_path}/b.jsonl", f"{tmp_path}/none*.jsonl"])
    for pattern in ("sub", "sub/", "su*"):
        with pytest.raises(PrepareError) as refused:
            input_files([f"{tmp_path}/{pattern}"], "prepare.evaluation_inputs")
        files = f"{tmp_path}/{pattern.rstrip('/')}/*.jsonl"
        assert str(refused.value) == f"prepare.evaluation_inputs: '{tmp_path}/{pattern}' is a directory; the files in it are '{files}'"
