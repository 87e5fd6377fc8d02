"""Protects: every sample has an id of its own, whatever the files call their rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.params import Prepare, Regeneration
from stages.prepare import build
from stages.prepare.answers import Answer, Dialogue
from stages.prepare.build import Limits, NumberedRow, from_verifier
from stages.prepare.chat import Chat
from stages.prepare.rows import TO_ANSWER, Row, Tally
from tests.prepare.templates import chat_with
from tests.tiny import CHATML

FURTHER = 3


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return chat_with(tmp_path_factory.mktemp("chat"), CHATML)


def ids(names: Iterable[str], chat: Chat, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the samples of rows with these ids, `FURTHER` different answers to each."""

    def answers(dialogues: list[Dialogue], verifier: Any, chat: Chat) -> None:
        for dialogue in dialogues:
            prompt = dialogue.next_prompt(chat)
            assert prompt is not None
            dialogue.add(prompt, Answer([*chat.encode("yes" * (1 + dialogue.sample)), 2], "stop"), chat)

    monkeypatch.setattr(build, "answer_all", answers)
    rows = [NumberedRow(Row(name, "k", [{"role": "user", "content": name}, TO_ANSWER], None, "file:1", 0), 0, 0) for name in names]
    prepare = Prepare(inputs=["x"], regeneration=Regeneration(samples_per_prompt=FURTHER))
    done, _ = from_verifier({"train": rows, "validation": []}, prepare, chat, None, Limits(200, 200), Tally())  # type: ignore[arg-type]
    return [sample.id for sample in done["train"].samples]


def test_a_further_answer_takes_no_id_of_another_row(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ids(["x", "x#1"], chat, monkeypatch)
    assert [found[0], *found[2:]] == ["x", "x#2", "x#1", "x#1#1", "x#1#2"]
    assert found[1].startswith("x#1~")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["x", "x#1", "x#2", "x#1#1", "x#1#2", "x#2#1", "y"]), unique=True, min_size=1))
def test_ids_are_unique_and_rows_keep_theirs(chat: Chat, names: list[str]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = ids(names, chat, monkeypatch)
    assert len(set(found)) == len(found) == FURTHER * len(names)
    assert [name for name in found if name in names] == names
