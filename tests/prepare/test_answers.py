"""Protects: a finished answer is never lost or asked twice; samples hold the very ids that the verifier emitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.decoding.engine import EngineConfig
from stages.params import Prepare, Regeneration
from stages.prepare.answers import Answer, Dialogue, Journal, Verifier
from stages.prepare.build import Limits, NumberedRow, from_verifier, further_id
from stages.prepare.chat import Chat
from stages.prepare.rows import TO_ANSWER, Message, Row, Tally
from tests.prepare.templates import THINKING, chat_with
from tests.tiny import CHATML

PLAN = {"verifier": "v", "regeneration": {"max_tokens": 8}}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return chat_with(tmp_path_factory.mktemp("chat"), CHATML)


def row(*messages: Message) -> Row:
    return Row("r", "k", list(messages), None, "file:1", 0)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def words(chat: Chat, text: str, end: bool = True) -> Answer:
    return Answer([*chat.encode(text), *([2] if end else [])], "stop" if end else "length")


def test_the_journal_survives_and_is_found_by_what_answers_depend_on(tmp_path: Path) -> None:
    with Journal(tmp_path, PLAN) as journal:
        journal.add("a", Answer([5, 2], "stop"))
        journal.add("b", Answer([5, 6, 7], "length"))
        # Another process sees them although this one has not ended.
        with Journal(tmp_path, dict(reversed(PLAN.items()))) as same:
            assert same.answers == {"a": Answer([5, 2], "stop"), "b": Answer([5, 6, 7], "length")}
    for changed in ({**PLAN, "verifier": "w"}, {**PLAN, "regeneration": {"max_tokens": 9}}):
        with Journal(tmp_path, changed) as other:
            assert other.answers == {}
    assert json.loads((journal.directory / "plan.json").read_text()) == {**PLAN, "format": 1}


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 200))
def test_a_torn_last_line_costs_that_answer_alone(tmp_path_factory: pytest.TempPathFactory, torn: int) -> None:
    work = tmp_path_factory.mktemp("work")
    with Journal(work, PLAN) as journal:
        for name in "abc":
            journal.add(name, Answer([1, 2, 3], "stop"))
    path = journal.directory / "answers.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: max(0, len(content) - torn)])
    whole = path.read_bytes().count(b"\n")
    with Journal(work, PLAN) as journal:
        assert list(journal.answers) == list("abc")[:whole]
        journal.add("d", Answer([4], "length"))
    with Journal(work, PLAN) as journal:
        assert list(journal.answers) == [*list("abc")[:whole], "d"]


def test_a_damaged_line_is_asked_again(tmp_path: Path) -> None:
    with Journal(tmp_path, PLAN) as journal:
        journal.add("a", Answer([1], "stop"))
    path = journal.directory / "answers.jsonl"
    path.write_bytes(b"\x00" * 30 + b"\n" + path.read_bytes())
    with Journal(tmp_path, PLAN) as journal:
        assert list(journal.answers) == ["a"]


def test_requests_depend_on_nothing_but_their_prompt_and_sample(tmp_path: Path) -> None:
    """Rows, order and limit are not in the key, so that any later run finds the answers."""
    config = EngineConfig("dir", "float32", 64, 4, 1 << 20)
    with Journal(tmp_path, PLAN) as journal:
        verifier = Verifier(journal, config, Regeneration(samples_per_prompt=3, temperature=0.0, extra_temperature=0.5))
        first, same, other = verifier.request([1, 2], 0), verifier.request([1, 2], 0), verifier.request([1, 2], 1)
        assert first == same
        assert (first.temperature, first.seed) == (0.0, None)
        assert (other.temperature, other.seed is None) == (0.5, False)
        assert len({first.id, other.id, verifier.request([1, 2], 2).id, verifier.request([12], 0).id}) == 4
        for request in (first, other):
            journal.add(request.id, Answer([2], "stop"))
        assert verifier.answer([other, first, other], "answers") == [Answer([2], "stop")] * 3
        assert verifier.asked == 0, "nothing was missing, so no engine was started"


def test_a_dialogue_is_asked_turn_by_turn_as_the_chat_server_renders_it(chat: Chat) -> None:
    dialogue = Dialogue(row({"role": "system", "content": "s"}, user("One?"), TO_ANSWER, user("Two?"), TO_ANSWER), longest_prompt=1000)
    system, one, two = dialogue.row.messages[0], user("One?"), user("Two?")
    prompt = dialogue.next_prompt(chat)
    assert prompt == chat.prompt_ids([system, one])
    dialogue.add(prompt, words(chat, "It is one."), chat)
    second = dialogue.next_prompt(chat)
    assert second == chat.prompt_ids([system, one, {"role": "assistant", "content": "It is one."}, two])
    dialogue.add(second, words(chat, "two", end=False), chat)
    assert dialogue.next_prompt(chat) is None
    tokens = dialogue.tokens()
    assert tokens.ids.tolist() == second + chat.encode("two"), "cut at max_tokens: no end of turn is made up"
    assert [chat.tokenizer.decode(tokens.ids[a:b].tolist()) for a, b in tokens.spans] == ["It is one.<|im_end|>", "two"]
    assert [message["content"] for message in dialogue.answered] == ["s", "One?", "It is one.", "Two?", "two"]


def test_the_verifiers_ids_are_kept_where_the_tokenizer_would_write_them_otherwise(chat: Chat) -> None:
    letters = [*(chat.encode(letter)[0] for letter in "answer"), 2]
    assert chat.encode("answer") != letters[:-1]
    dialogue = Dialogue(row(user("One?"), TO_ANSWER, user("Two?"), TO_ANSWER), longest_prompt=1000)
    first = dialogue.next_prompt(chat)
    assert first is not None
    dialogue.add(first, Answer(letters, "stop"), chat)
    assert dialogue.tokens().ids.tolist() == first + letters
    second = dialogue.next_prompt(chat)
    assert second is not None
    dialogue.add(second, words(chat, "two"), chat)
    tokens = dialogue.tokens()
    assert tokens.ids.tolist() == second + words(chat, "two").token_ids, "the last answer was given to the prompt as the server tokenises it"
    assert (len(tokens.spans), tokens.rewritten) == (1, 1), "so the first turn's ids stand there otherwise, and are context"


def test_an_earlier_turn_is_supervised_up_to_where_history_writes_it_otherwise(chat: Chat) -> None:
    """An answer cut at max_tokens may end inside a word that the tokenizer joins once it is history."""
    (whole,) = chat.encode(" the")
    pieces = [chat.encode(" ")[0], *(chat.encode(letter)[0] for letter in "the")]
    dialogue = Dialogue(row(user("One?"), TO_ANSWER, user("Two?"), TO_ANSWER), longest_prompt=1000)
    first = dialogue.next_prompt(chat)
    assert first is not None
    dialogue.add(first, Answer([*chat.encode("It is one of"), *pieces], "length"), chat)
    second = dialogue.next_prompt(chat)
    assert second is not None
    dialogue.add(second, words(chat, "two"), chat)
    tokens = dialogue.tokens()
    (start, end), _ = tokens.spans
    assert (start, tokens.ids[start:end].tolist()) == (len(first), chat.encode("It is one of"))
    assert tokens.ids[end] == whole
    assert tokens.rewritten == 1


def test_a_template_that_rewrites_history_makes_earlier_turns_context(tmp_path: Path) -> None:
    chat = chat_with(tmp_path, THINKING)
    dialogue = Dialogue(row(user("One?"), TO_ANSWER, user("Two?"), TO_ANSWER), longest_prompt=1000)
    for text in ("<think>hm</think>One.", "<think>so</think>Two."):
        prompt = dialogue.next_prompt(chat)
        assert prompt is not None
        dialogue.add(prompt, words(chat, text), chat)
    tokens = dialogue.tokens()
    assert tokens.rewritten == 1
    assert chat.tokenizer.decode(tokens.ids.tolist()).count("think") == 2


def test_evaluation_leaves_the_last_turn_open(chat: Chat) -> None:
    dialogue = Dialogue(row(user("One?"), TO_ANSWER, user("Two?"), TO_ANSWER), open_end=True, longest_prompt=1000)
    prompt = dialogue.next_prompt(chat)
    assert prompt is not None
    dialogue.add(prompt, words(chat, "one"), chat)
    assert dialogue.next_prompt(chat) is None
    assert dialogue.prompt == chat.prompt_ids([user("One?"), {"role": "assistant", "content": "one"}, user("Two?")])
    assert dialogue.answered[-1] == user("Two?")
    single = Dialogue(row(user("One?"), TO_ANSWER), open_end=True, longest_prompt=1000)
    assert single.next_prompt(chat) is None
    assert single.prompt == chat.prompt_ids([user("One?")])


def test_too_long_prompts_end_a_dialogue(chat: Chat) -> None:
    first = len(chat.prompt_ids([user("One?")]))
    rows = row(user("One?"), TO_ANSWER, user("Two? " * 30), TO_ANSWER)
    long = Dialogue(rows, longest_prompt=first - 1, too_long="why")
    assert long.next_prompt(chat) is None
    assert long.dropped == "why"
    for open_end, dropped in ((False, None), (True, "why")):
        dialogue = Dialogue(rows, open_end=open_end, longest_prompt=first, too_long="why")
        prompt = dialogue.next_prompt(chat)
        assert prompt is not None
        dialogue.add(prompt, words(chat, "one"), chat)
        assert dialogue.next_prompt(chat) is None
        assert dialogue.dropped == dropped
        if not open_end:
            assert dialogue.shortened
            assert dialogue.answered == [user("One?"), {"role": "assistant", "content": "one"}]


def test_an_answer_without_words_drops_the_row(chat: Chat) -> None:
    for ids in ([2], []):
        dialogue = Dialogue(row(user("One?"), TO_ANSWER), longest_prompt=1000)
        dialogue.add(dialogue.next_prompt(chat) or [], Answer(ids, "stop"), chat)
        assert dialogue.dropped == "empty assistant turn"
        assert dialogue.next_prompt(chat) is None


@pytest.mark.parametrize("backwards", [False, True])
def test_a_further_answer_is_never_called_as_a_row_is(chat: Chat, tmp_path: Path, backwards: bool) -> None:
    """A file may hold `x#1` beside `x`, in whichever split and order: hidden states are found by a sample's id."""
    plain = ["x", "x#1", "x#2", "x#1#2", "y"]
    clash = further_id(row_called("x"), 1, {"x#1"})
    names = [*plain, clash]
    rows = [NumberedRow(row_called(name), number, 0) for number, name in enumerate(names)]
    splits = {"train": [rows[0], rows[1], rows[3], rows[4]], "validation": [rows[2]], "evaluation": [rows[5]]}
    if backwards:
        splits = {split: found[::-1] for split, found in reversed(splits.items())}
    settings = Prepare(inputs=["a.jsonl"], max_seq_len=200, regeneration=Regeneration(samples_per_prompt=3))
    with Journal(tmp_path, PLAN) as journal:
        verifier = Verifier(journal, EngineConfig("dir", "float32", 64, 4, 1 << 20), settings.regeneration)
        for name in names:
            for number in range(3):
                journal.add(verifier.request(chat.prompt_ids([user(f"Who is {name}?")]), number).id, words(chat, f"answer {number}"))
        done, extra = from_verifier(splits, settings, chat, verifier, Limits(200, 200), Tally())
    found = {sample.id: sample.messages[0]["content"] for split in done.values() for sample in split.samples}
    assert len(found) == sum(len(split.samples) for split in done.values()) == 4 * 3 + 1 + 1
    assert extra["kept"] == 4 * 2
    assert found.keys() >= {*names, "y#1", "y#2", "x#1#1"}, "a row keeps its id, and so does an answer that meets no row"
    again = further_id(row_called("x"), 1, {"x#1", clash})
    assert again.startswith(f"{clash}~")
    assert found[again] == found["x"] == "Who is x?"


def row_called(name: str) -> Row:
    return Row(name, "k", [user(f"Who is {name}?"), TO_ANSWER], None, "file:1", 0)
