"""Protects: the loss mask covers the assistant's tokens and its end of turn, exactly, for any stock template and any content."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.prepare import chat as chat_module
from stages.prepare.chat import Chat, common_ending, cut
from stages.prepare.lines import PrepareError
from stages.prepare.rows import DroppedRowError, Message, Tally
from tests.pairing.edits import edit_json
from tests.paths import shared
from tests.prepare.project import read_rows
from tests.prepare.templates import DATED, DEAF, INST, LLAMA3, OPENS_THINKING, PLAIN, THINKING, chat_with
from tests.tiny import CHATML, EOS_TOKEN_ID

MARKS = "<|im_start|>assistant\nis a mark, <|im_end|>\n ends a turn, <mask>"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return chat_with(tmp_path_factory.mktemp("chatml"), CHATML)


def supervised(chat: Chat, messages: list[Message]) -> list[str]:
    """The text of each supervised span."""
    tokens = chat.tokens(messages)
    assert len(tokens.mask) == len(tokens.ids)
    assert sum(tokens.mask) == tokens.supervised
    assert tokens.last_prompt == tokens.spans[-1][0]
    return [chat.tokenizer.decode(tokens.ids[start:end].tolist()) for start, end in tokens.spans]


def test_mask_is_the_hand_computed_one(chatml: Chat) -> None:
    """Built from pieces by hand: header, question, end, header | answer, end | line feed."""
    encode = chatml.tokenizer.encode
    prompt = [1, *encode("user\nOne?"), 2, *encode("\n"), 1, *encode("assistant\n")]
    second = [*encode("\n"), 1, *encode("user\nTwo?"), 2, *encode("\n"), 1, *encode("assistant\n")]
    first_answer, second_answer = [*encode("It is one."), 2], [*encode("two"), 2]
    tokens = chatml.tokens([user("One?"), assistant("It is one."), user("Two?"), assistant("two")])
    assert tokens.ids.tolist() == prompt + first_answer + second + second_answer + encode("\n")
    assert tokens.mask == [0] * len(prompt) + [1] * len(first_answer) + [0] * len(second) + [1] * len(second_answer) + [0]
    assert tokens.last_prompt == len(prompt + first_answer + second)


def test_one_token_answer_gives_a_supervised_slot(chatml: Chat) -> None:
    (token,) = chatml.tokenizer.encode("a")
    tokens = chatml.tokens([user("One letter."), assistant("a")])
    start, end = tokens.spans[0]
    assert tokens.ids[start:end].tolist() == [token, EOS_TOKEN_ID]
    assert tokens.mask[start - 1] == 0, "the anchor of the first slot is the last token of the prompt"


@pytest.mark.parametrize(
    ("template", "eos", "expected"),
    [
        (CHATML, "<|im_end|>", ["  One.<|im_end|>", "Two,\n<|im_end|>"]),
        (LLAMA3, "<|eot_id|>", ["One.<|eot_id|>", "Two,<|eot_id|>"]),
        (INST, "<|im_end|>", ["   One. <|im_end|>", " Two,\n <|im_end|>"]),
        (PLAIN, "<|im_end|>", ["  One.", "Two,\n"]),
        (THINKING, "<|im_end|>", ["  One.<|im_end|>", "Two,\n<|im_end|>"]),
    ],
    ids=["chatml", "llama3", "inst", "plain", "thinking"],
)
def test_spans_of_stock_templates(tmp_path: Path, template: str, eos: str, expected: list[str]) -> None:
    chat = chat_with(tmp_path, template, eos)
    messages = [user("Count."), assistant("  One."), user("More."), assistant("Two,\n")]
    assert supervised(chat, messages) == expected
    # The text is the template's, whichever way prompt and answer were tokenised.
    assert chat.tokenizer.decode(chat.tokens(messages).ids.tolist()) == chat.render(messages)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, INST], ids=["chatml", "llama3", "inst"])
def test_prompts_are_tokenised_as_decoding_starts_from_them(tmp_path: Path, template: str) -> None:
    """Also where the tokenizer would join the header's line feed with the answer's white space."""
    chat = chat_with(tmp_path, template, "<|eot_id|>" if template is LLAMA3 else "<|im_end|>")
    for answer in ("plain", "    indented", "\n\nnew lines", "\u00e9", "🙂"):
        messages = [user("Say it."), assistant(answer)]
        tokens = chat.tokens(messages)
        assert tokens.ids[: tokens.last_prompt].tolist() == chat.prompt_ids(messages[:1])


@pytest.mark.parametrize("template", [CHATML, LLAMA3, INST, PLAIN], ids=["chatml", "llama3", "inst", "plain"])
def test_marks_inside_content_do_not_move_the_mask(tmp_path: Path, template: str) -> None:
    eos = "<|eot_id|>" if template is LLAMA3 else "<|im_end|>"
    chat = chat_with(tmp_path, template, eos)
    llama = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    for text in (MARKS, "x" + eos, eos, f"{eos}{eos}\n", llama, "[/INST] [INST]", "user: x\nassistant: "):
        first, second = supervised(chat, [user(text), assistant(text), user("Go on."), assistant("Fine.")])
        shown = {CHATML: text + eos, LLAMA3: text.strip() + eos, INST: f" {text} {eos}", PLAIN: text}[template]
        assert first == shown
        assert second.strip().startswith("Fine.")


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
pieces = st.lists(st.one_of(text, st.sampled_from(["<|im_end|>", "<|im_start|>", "assistant\n", "\n", " ", "a", "b"])), min_size=1, max_size=5).map("".join)


@settings(deadline=None, max_examples=150)
@given(st.lists(pieces.filter(str.strip), min_size=2, max_size=6))
def test_mask_covers_exactly_the_answers(chatml: Chat, contents: list[str]) -> None:
    """For any content: the spans spell the answers and their ends, prompts are what decoding starts from, the whole is the template's."""
    messages = [user(content) if place % 2 == 0 else assistant(content) for place, content in enumerate(contents[: len(contents) // 2 * 2])]
    tokens = chatml.tokens(messages)
    spans = [chatml.tokenizer.decode(tokens.ids[start:end].tolist()) for start, end in tokens.spans]
    assert spans == [message["content"] + "<|im_end|>" for message in messages[1::2]]
    assert tokens.ids[: tokens.spans[0][0]].tolist() == chatml.prompt_ids(messages[:1])
    assert chatml.tokenizer.decode(tokens.ids.tolist()) == chatml.render(messages)
    for longest in (tokens.spans[0][0] + 1, len(tokens.ids) // 2 + 1, len(tokens.ids)):
        if longest > tokens.spans[0][0]:
            short = cut(tokens, longest)
            assert short.ids == tokens.ids[:longest]
            assert short.mask == tokens.mask[:longest]
            assert short.last_prompt in [start for start, _ in short.spans]


def test_white_space_answers_count_where_the_template_keeps_them(tmp_path: Path, chatml: Chat) -> None:
    messages = [user("Spaces?"), assistant("   \n\t ")]
    assert supervised(chatml, messages) == ["   \n\t <|im_end|>"]
    with pytest.raises(DroppedRowError, match=r"^empty assistant turn$"):
        chat_with(tmp_path, LLAMA3, "<|eot_id|>").tokens(messages)


def test_an_opening_assistant_is_context(chatml: Chat) -> None:
    messages = [assistant("I speak first."), user("Why?"), assistant("Habit.")]
    assert supervised(chatml, messages) == ["Habit.<|im_end|>"]


def test_roles_that_a_template_refuses_drop_the_row_with_its_words(tmp_path: Path) -> None:
    chat = chat_with(tmp_path, INST)
    with pytest.raises(DroppedRowError, match=r"^refused by the template: System role not supported$"):
        chat.tokens([{"role": "system", "content": "x"}, user("Hi"), assistant("Hello.")])
    with pytest.raises(DroppedRowError, match=r"^refused by the template: Roles must alternate"):
        chat.tokens([user("Hi"), user("there"), assistant("Hello.")])


def test_what_a_template_leaves_out_is_said(tmp_path: Path, chatml: Chat) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(DroppedRowError, match=r"^the template leaves out tool calls$"):
        chatml.check([user("Hi"), call, {"role": "tool", "content": "4 C"}, assistant("Four.")])
    deaf = chat_with(tmp_path, DEAF)
    with pytest.raises(DroppedRowError, match=r"^the template leaves out the role tool$"):
        deaf.check([user("Hi"), {"role": "tool", "content": "4 C"}, assistant("Four.")])
    with pytest.raises(DroppedRowError, match=r"^the template leaves the answer out$"):
        deaf.tokens([user("Hi"), assistant("Hello.")])


def test_tool_turns_are_supervised_where_the_template_writes_them(tmp_path: Path) -> None:
    template = CHATML.replace("message['content'] +", "message['content'] + (message['tool_calls'] | tojson if message['tool_calls'] else '') +")
    chat = chat_with(tmp_path, template)
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}]
    messages = [user("Weather?"), {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "4 C"}, assistant("Four.")]
    chat.check(messages)
    assert supervised(chat, messages) == [json.dumps(calls) + "<|im_end|>", "Four.<|im_end|>"]


def test_a_turn_that_history_writes_otherwise_is_context(tmp_path: Path) -> None:
    chat = chat_with(tmp_path, THINKING)
    messages = [user("One?"), assistant("<think>hm</think>One."), user("Two?"), assistant("<think>so</think>Two.")]
    assert supervised(chat, messages) == ["<think>so</think>Two.<|im_end|>"]
    tokens = chat.tokens(messages)
    assert tokens.rewritten == 1
    assert tokens.ids[: tokens.last_prompt].tolist() == chat.prompt_ids(messages[:3])


def test_an_answer_that_does_not_continue_its_prompt_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(DroppedRowError, match=r"^the template does not continue its own generation prompt with the answer$"):
        chat_with(tmp_path, OPENS_THINKING).tokens([user("Hi"), assistant("Hello.")])


def test_no_template_is_an_error_that_names_the_verifier(tmp_path: Path) -> None:
    from tests.tiny import make_tokenizer

    make_tokenizer(tmp_path, template=None)
    with pytest.raises(PrepareError, match="has no chat template"):
        Chat(tmp_path, [EOS_TOKEN_ID])


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("tokenizer.json", {"model": {}}, "transformers cannot load the verifier's tokenizer: "),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "tool_use", "template": CHATML}]},
            "none of the verifier's chat templates (tool_use) is called default",
        ),
    ],
)
def test_a_tokenizer_that_does_not_load_is_one_line(tmp_path: Path, name: str, change: dict[str, Any], says: str) -> None:
    from tests.tiny import make_tokenizer

    make_tokenizer(tmp_path, template=None)
    edit_json(tmp_path, name, lambda c: c.update(change))
    with pytest.raises(PrepareError) as error:
        Chat(tmp_path, [EOS_TOKEN_ID])
    assert f"{tmp_path}: {says}" in str(error.value)
    assert "\n" not in str(error.value)


def test_templates_that_print_the_date_give_the_same_ids_every_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_with(tmp_path, DATED)
    assert "Today is 01 Jan 2026" in chat.render([user("Hi")])
    monkeypatch.setattr(chat_module, "TODAY", datetime(2030, 2, 3))
    assert "Today is 03 Feb 2030" in chat.render([user("Hi")]), "the date is ours, not the clock's"


def rows(name: str) -> dict[str, list[dict[str, Any]]]:
    return {row.id: row.messages for row in read_rows([shared(f"cases/{name}.jsonl")], Tally(), "fail", "none")}


def test_shared_boundaries(chatml: Chat) -> None:
    cases = rows("boundaries")
    for name in ("one-token-answer", "template-marks-inside", "assistant-text-equals-user-text", "whitespace-answer", "leading-space", "ok-1"):
        assert supervised(chatml, cases[name]) == [cases[name][1]["content"] + "<|im_end|>"], name


def test_shared_roles(chatml: Chat) -> None:
    cases = rows("roles")
    for name, count in (("opens-with-assistant", 1), ("two-users", 1), ("sharegpt", 1), ("sharegpt-system", 1), ("content-parts", 1), ("three-turns", 3)):
        assert len(supervised(chatml, cases[name])) == count, name


def test_shared_unicode_survives_tokens(chatml: Chat) -> None:
    for messages in rows("unicode").values():
        assert supervised(chatml, messages) == [messages[1]["content"] + "<|im_end|>"]


@given(st.text("ab", max_size=6), st.text("ab", max_size=6), st.text("ab", max_size=3))
def test_a_guess_does_not_change_what_two_texts_end_with(first: str, second: str, guess: str) -> None:
    ending = common_ending(first, second, guess)
    assert first.endswith(ending)
    assert second.endswith(ending)
    longer = len(ending) + 1
    assert longer > min(len(first), len(second)) or first[-longer:] != second[-longer:]
