"""Rows to samples: with the answers that the rows hold, or with the verifier's own."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from stages.dataset import TokenSample
from stages.params import Engine as EngineParams
from stages.params import Prepare
from stages.prepare.answers import TOO_LONG, TRUNCATED_AWAY, Dialogue, Verifier, answer_all
from stages.prepare.chat import Chat, Tokens, cut
from stages.prepare.rows import TO_ANSWER, DroppedRowError, Message, Tally, asked_before
from stages.prepare.splits import KeyedRow

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
    prompt: str
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


@dataclass
class SplitReport:
    """What a split holds and what was done to get it there."""

    samples: list[Sample] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        kinds: dict[str, list[Sample]] = {}
        for sample in self.samples:
            kinds.setdefault(sample.kind, []).append(sample)
        return {
            **_sizes(self.samples),
            "truncated_answers": sum(sample.truncated for sample in self.samples),
            "rewritten_turns": sum(sample.tokens.rewritten for sample in self.samples),
            **{name: self.counts[name] for name in ("cut_samples", "shortened_dialogues")},
            "kinds": {kind: _sizes(group) for kind, group in sorted(kinds.items())},
        }


def _sizes(samples: list[Sample]) -> dict[str, int]:
    return {
        "prompts": len({sample.prompt for sample in samples}),
        "samples": len(samples),
        "tokens": sum(len(sample.tokens.ids) for sample in samples),
        "supervised_tokens": sum(sample.tokens.supervised for sample in samples),
    }


def answered_with(messages: list[Message], text: str) -> list[Message]:
    """The conversation with every open turn answered by `text`."""
    return [{"role": "assistant", "content": text} if message is TO_ANSWER else message for message in messages]


def first_prompt(messages: list[Message]) -> list[Message]:
    """The messages before the first answer."""
    return messages[: next(index for index, message in enumerate(messages) if message["role"] == "assistant" and asked_before(messages, index))]


def usable(rows: list[KeyedRow], chat: Chat, limits: Limits, tally: Tally) -> Iterator[tuple[KeyedRow, Tokens | None]]:
    """Rows that the template takes and whose first answer lies inside a sample, with their tokens if all answers are known."""
    for keyed in tqdm(rows, desc="chats to tokens", unit="row", disable=len(rows) < 1000):
        row = keyed.row
        try:
            whole = answered_with(row.messages, PLACEHOLDER)
            chat.check(whole, row.tools)
            tokens = None
            if any(message is TO_ANSWER for message in row.messages):
                chat.render(whole, row.tools)
                start = len(chat.prompt_ids(first_prompt(row.messages), row.tools))
                if start > limits.prompt:
                    raise DroppedRowError(TOO_LONG)
            else:
                tokens = chat.tokens(row.messages, row.tools)
                start = tokens.spans[0][0]
            if start >= limits.sample:
                raise DroppedRowError(TRUNCATED_AWAY)
        except DroppedRowError as dropped:
            tally.drop(dropped.reason, row.source)
            continue
        yield keyed, tokens


def _training_sample(sample: Sample, limits: Limits, report: SplitReport) -> Sample:
    """The sample, cut to its longest length; turns that are cut off whole leave `messages` and `turns` too."""
    if len(sample.tokens.ids) <= limits.sample:
        return sample
    report.counts["cut_samples"] += 1
    tokens = cut(sample.tokens, limits.sample)
    lost = len(sample.tokens.spans) - len(tokens.spans)
    if not lost:
        return replace(sample, tokens=tokens)
    turns = sample.turns - lost
    answers = [index for index, message in enumerate(sample.messages) if message["role"] == "assistant" and asked_before(sample.messages, index)]
    return replace(sample, tokens=tokens, turns=turns, messages=sample.messages[: answers[turns - 1] + 1])


def from_rows(splits: Mapping[str, list[KeyedRow]], tokens: Mapping[str, Tokens], chat: Chat, limits: Limits, tally: Tally) -> dict[str, SplitReport]:
    """Samples of all splits with the answers that the rows hold; `tokens`: row id → tokens of training and validation rows."""
    reports = {split: SplitReport() for split in splits}
    for split, rows in splits.items():
        asked: set[bytes] = set()
        for keyed in rows:
            if split != "evaluation":
                reports[split].samples.append(answered_sample(keyed, tokens[keyed.row.id], limits, reports[split]))
                continue
            try:
                sample = evaluation_prompt(keyed, chat, limits)
            except DroppedRowError as dropped:
                tally.drop(dropped.reason, keyed.row.source)
                continue
            if (prompt := sample.tokens.ids.tobytes()) in asked:
                # Rows that differ in the answer alone are one evaluation prompt.
                tally.duplicates += 1
                continue
            asked.add(prompt)
            reports[split].samples.append(sample)
    return reports


def answered_sample(keyed: KeyedRow, tokens: Tokens, limits: Limits, report: SplitReport) -> Sample:
    """A training or validation sample with the row's own answers."""
    row = keyed.row
    sample = Sample(row.id, row.kind, keyed.prompt, row.messages, tokens, len(tokens.spans) + tokens.rewritten)
    return _training_sample(sample, limits, report)


def evaluation_prompt(keyed: KeyedRow, chat: Chat, limits: Limits) -> Sample:
    """An evaluation sample whose earlier answers are the row's own.

    Raises:
        DroppedRowError: the template refuses it, or it is too long for the engine.
    """
    messages = keyed.row.messages[:-1]
    ids = chat.prompt_ids(messages, keyed.row.tools)
    if len(ids) > limits.prompt:
        raise DroppedRowError(TOO_LONG)
    turns = sum(1 for index, message in enumerate(keyed.row.messages) if message["role"] == "assistant" and asked_before(keyed.row.messages, index))
    return Sample(keyed.row.id, keyed.row.kind, keyed.prompt, messages, Tokens(array("i", ids), (), len(ids)), turns)


def from_verifier(
    splits: Mapping[str, list[KeyedRow]], settings: Prepare, chat: Chat, verifier: Verifier, limits: Limits, tally: Tally
) -> tuple[dict[str, SplitReport], Counter[str]]:
    """Samples of all splits, answered by the verifier; and what became of the further answers to training prompts.

    A row is dropped, under the reason of its first answer, if none of its answers can be used.
    """
    reports = {split: SplitReport() for split in splits}
    dialogues: list[tuple[str, KeyedRow, list[Dialogue]]] = []
    for split, rows in splits.items():
        further = settings.regeneration.samples_per_prompt if split == "train" else 1
        longest, why = (limits.prompt, TOO_LONG) if split == "evaluation" or limits.prompt < limits.sample else (limits.sample - 1, TRUNCATED_AWAY)
        for keyed in rows:
            dialogues.append((split, keyed, [Dialogue(keyed.row, number, split == "evaluation", longest, why) for number in range(further)]))
    answer_all([dialogue for _, _, group in dialogues for dialogue in group], verifier, chat)
    extra: Counter[str] = Counter()
    for split, keyed, group in dialogues:
        kept = _usable_samples(keyed, group, limits, reports[split], extra)
        if kept:
            reports[split].samples.extend(kept)
        else:
            tally.drop(group[0].dropped or "empty assistant turn", keyed.row.source)
    return reports, extra


def _usable_samples(keyed: KeyedRow, group: list[Dialogue], limits: Limits, report: SplitReport, extra: Counter[str]) -> list[Sample]:
    kept: list[Sample] = []
    seen: set[bytes] = set()
    for dialogue in group:
        if dialogue.dropped:
            extra[dialogue.dropped] += dialogue.sample > 0
            continue
        row = keyed.row
        tokens = Tokens(array("i", dialogue.prompt), (), len(dialogue.prompt)) if dialogue.prompt is not None else dialogue.tokens()
        if tokens.ids.tobytes() in seen:
            extra["same as another answer"] += 1
            continue
        seen.add(tokens.ids.tobytes())
        truncated = sum(answer.finish_reason == "length" for _, answer in dialogue.turns)
        name = row.id if dialogue.sample == 0 else f"{row.id}#{dialogue.sample}"
        sample = Sample(name, row.kind, keyed.prompt, dialogue.answered, tokens, len(dialogue.turns) + (dialogue.prompt is not None), truncated)
        report.counts["shortened_dialogues"] += dialogue.shortened
        extra["kept"] += dialogue.sample > 0
        kept.append(sample if dialogue.open_end else _training_sample(sample, limits, report))
    return kept
