"""Rows to samples: with the answers that the rows hold, or with the verifier's own."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from stages.artifacts import sha256_bytes
from stages.dataset import TokenSample
from stages.params import Engine as EngineParams
from stages.params import Prepare
from stages.prepare.answers import TOO_LONG, TRUNCATED_AWAY, Dialogue, Verifier, answer_all
from stages.prepare.chat import Chat, Tokens, cut
from stages.prepare.rows import TO_ANSWER, DroppedRowError, Message, Row, Tally, asked_before

PLACEHOLDER = "a"
"""Stands for an answer that is not known yet, when a template is asked whether it takes a conversation."""


@dataclass(frozen=True)
class Limits:
    """Longest sequences, tokens: `sample` of a training sample, `prompt` of a prompt that leaves the engine room to answer."""

    sample: int
    prompt: int

    @staticmethod
    def of(settings: Prepare, engine: EngineParams) -> Limits:
        return Limits(settings.max_seq_len, engine.max_model_len - settings.regeneration.max_tokens)


@dataclass(frozen=True)
class Sample:
    """One sample in little memory; `turns` as in `TokenSample`, `truncated`: answers in it that were cut at max_tokens."""

    id: str
    kind: str
    messages: list[Message]
    tokens: Tokens
    turns: int
    truncated: int = 0

    def token_sample(self) -> TokenSample:
        return TokenSample(
            id=self.id,
            kind=self.kind,
            input_ids=self.tokens.ids.tolist(),
            loss_mask=self.tokens.mask,
            prompt_length=self.tokens.last_prompt,
            turns=self.turns,
            messages=self.messages,
        )


@dataclass(frozen=True)
class NumberedRow:
    """A row, and the numbers of its prompt and of its kind in the index."""

    row: Row
    prompt: int
    kind: int


@dataclass
class AnsweredSplit:
    """What the verifier's answers made of a split: samples, the row of each, and how many dialogues were shortened."""

    samples: list[Sample] = field(default_factory=list)
    rows: list[NumberedRow] = field(default_factory=list)
    shortened: int = 0
    cut: int = 0


def answered_with(messages: list[Message], text: str) -> list[Message]:
    """The conversation with every open turn answered by `text`."""
    return [{"role": "assistant", "content": text} if message is TO_ANSWER else message for message in messages]


def first_prompt(messages: list[Message]) -> list[Message]:
    """The messages before the first answer."""
    return messages[: next(index for index, message in enumerate(messages) if message["role"] == "assistant" and asked_before(messages, index))]


def usable_tokens(row: Row, chat: Chat, limits: Limits) -> Tokens | None:
    """The row's tokens if all its answers are known.

    Raises:
        DroppedRowError: the template does not take the row, or its first answer does not lie inside a sample.
    """
    known = not any(message is TO_ANSWER for message in row.messages)
    whole = row.messages if known else answered_with(row.messages, PLACEHOLDER)
    text = chat.check(whole, row.tools)
    tokens = None
    if known:
        tokens = chat.tokens(row.messages, row.tools, text)
        start = tokens.spans[0][0]
    else:
        start = len(chat.prompt_ids(first_prompt(row.messages), row.tools))
        if start > limits.prompt:
            raise DroppedRowError(TOO_LONG)
    if start >= limits.sample:
        raise DroppedRowError(TRUNCATED_AWAY)
    return tokens


def shortened(sample: Sample, limits: Limits) -> Sample:
    """The sample, cut to its longest length; turns that are cut off whole leave `messages` and `turns` too."""
    if len(sample.tokens.ids) <= limits.sample:
        return sample
    tokens = cut(sample.tokens, limits.sample)
    lost = len(sample.tokens.spans) - len(tokens.spans)
    if not lost:
        return replace(sample, tokens=tokens)
    turns = sample.turns - lost
    answers = [index for index, message in enumerate(sample.messages) if message["role"] == "assistant" and asked_before(sample.messages, index)]
    return replace(sample, tokens=tokens, turns=turns, messages=sample.messages[: answers[turns - 1] + 1])


def answered_sample(row: Row, tokens: Tokens, limits: Limits) -> Sample:
    """A training or validation sample with the row's own answers."""
    return shortened(Sample(row.id, row.kind, row.messages, tokens, len(tokens.spans) + tokens.rewritten), limits)


def evaluation_prompt(row: Row, chat: Chat, limits: Limits) -> Sample:
    """An evaluation sample whose earlier answers are the row's own.

    Raises:
        DroppedRowError: the template refuses it, or it is too long for the engine.
    """
    messages = row.messages[:-1]
    ids = chat.prompt_ids(messages, row.tools)
    if len(ids) > limits.prompt:
        raise DroppedRowError(TOO_LONG)
    turns = sum(1 for index, message in enumerate(row.messages) if message["role"] == "assistant" and asked_before(row.messages, index))
    return Sample(row.id, row.kind, messages, Tokens(array("i", ids), (), len(ids)), turns)


def from_verifier(
    splits: Mapping[str, list[NumberedRow]], settings: Prepare, chat: Chat, verifier: Verifier, limits: Limits, tally: Tally
) -> tuple[dict[str, AnsweredSplit], Counter[str]]:
    """Samples of all splits, answered by the verifier; and what became of the further answers to training prompts.

    A row is dropped, under the reason of its first answer, if none of its answers can be used.
    """
    answered = {split: AnsweredSplit() for split in splits}
    # Rows that turn out to be dropped count too: what a sample is called does not depend on other rows' answers.
    taken = {numbered.row.id for rows in splits.values() for numbered in rows if "#" in numbered.row.id}
    dialogues: list[tuple[str, NumberedRow, list[Dialogue]]] = []
    for split, rows in splits.items():
        further = settings.regeneration.samples_per_prompt if split == "train" else 1
        longest, why = (limits.prompt, TOO_LONG) if split == "evaluation" or limits.prompt < limits.sample else (limits.sample - 1, TRUNCATED_AWAY)
        for numbered in rows:
            dialogues.append((split, numbered, [Dialogue(numbered.row, number, split == "evaluation", longest, why) for number in range(further)]))
    answer_all([dialogue for _, _, group in dialogues for dialogue in group], verifier, chat)
    extra: Counter[str] = Counter()
    for split, numbered, group in dialogues:
        kept = _usable_samples(numbered.row, group, limits, taken, answered[split], extra)
        answered[split].samples.extend(kept)
        answered[split].rows.extend([numbered] * len(kept))
        if not kept:
            tally.drop(group[0].dropped or "empty assistant turn", numbered.row.source)
    return answered, extra


def further_id(row: Row, number: int, taken: Set[str]) -> str:
    """What the `number`-th further answer to a row is called.

    Args:
        taken: the ids of all rows, those without `#` may be left out. No other row's further answers get the same: what
            stands before the last `#`, and the number behind it, are kept.
    """
    name = f"{row.id}#{number}"
    while name in taken:
        name = f"{name}~{sha256_bytes(name.encode())[:12]}"
    return name


def _usable_samples(row: Row, group: list[Dialogue], limits: Limits, taken: Set[str], split: AnsweredSplit, extra: Counter[str]) -> list[Sample]:
    kept: list[Sample] = []
    seen: set[bytes] = set()
    for dialogue in group:
        if dialogue.dropped:
            extra[dialogue.dropped] += dialogue.sample > 0
            continue
        tokens = Tokens(array("i", dialogue.prompt), (), len(dialogue.prompt)) if dialogue.prompt is not None else dialogue.tokens()
        if tokens.ids.tobytes() in seen:
            extra["same as another answer"] += 1
            continue
        seen.add(tokens.ids.tobytes())
        truncated = sum(answer.finish_reason == "length" for _, answer in dialogue.turns)
        name = row.id if dialogue.sample == 0 else further_id(row, dialogue.sample, taken)
        sample = Sample(name, row.kind, dialogue.answered, tokens, len(dialogue.turns) + (dialogue.prompt is not None), truncated)
        split.shortened += dialogue.shortened
        split.cut += not dialogue.open_end and len(tokens.ids) > limits.sample
        extra["kept"] += dialogue.sample > 0
        kept.append(sample if dialogue.open_end else shortened(sample, limits))
    return kept
