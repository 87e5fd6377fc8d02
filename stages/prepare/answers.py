"""The verifier's own answers: asked turn by turn through vLLM, kept in a journal that survives a kill.

Every finished answer is appended at once to `outputs/prepare/work/<key>/answers.jsonl`, where the key is a digest of
everything an answer depends on except its prompt. An answer is found again by the digest of its prompt's token ids,
its sample number and its temperature: which rows a run takes, in which order and with which limit changes nothing.
A line torn by a kill is the last one; it is cut off when the journal is opened.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from stages.artifacts import digest_json, write_json
from stages.decoding.engine import Completion, Engine, EngineConfig, Request, engine_config
from stages.params import Engine as EngineSettings
from stages.params import Regeneration
from stages.prepare.chat import Chat, Tokens, common_length
from stages.prepare.rows import TO_ANSWER, DroppedRowError, Message, Row
from stages.processor import slow_dtype

JOURNAL_FORMAT = 1
ANSWERS_PER_SYNC = 16

TOO_LONG = "prompt too long for the engine"
TRUNCATED_AWAY = "answer truncated away"


@dataclass(frozen=True)
class Answer:
    """What the verifier said: token ids, a final EOS included; `finish_reason` is "stop" or "length" (cut at max_tokens)."""

    token_ids: list[int]
    finish_reason: str


class Journal:
    """Answers on disk by key. Appending is a write and a flush (a killed process loses nothing), fsync every few answers."""

    def __init__(self, work: Path, plan: dict[str, Any]) -> None:
        """Open the journal of `plan` below `work`; make it if there is none."""
        plan = {**plan, "format": JOURNAL_FORMAT}
        self.directory = work / digest_json(plan)[:16]
        self.answers: dict[str, Answer] = {}
        self.directory.mkdir(parents=True, exist_ok=True)
        if not (self.directory / "plan.json").is_file():
            write_json(self.directory / "plan.json", plan)
        path = self.directory / "answers.jsonl"
        self._file: BinaryIO = path.open("a+b")
        self._file.truncate(self._read())
        self._unsynced = 0

    def _read(self) -> int:
        """Load the answers; returns where the last whole line ends."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                entry = json.loads(line)
                self.answers[entry["key"]] = Answer(entry["token_ids"], entry["finish_reason"])
            except (ValueError, KeyError, TypeError):
                # A block that a crash of the whole machine left unwritten: that answer is asked again.
                continue
        return end

    def add(self, key: str, answer: Answer) -> None:
        line = json.dumps({"key": key, "finish_reason": answer.finish_reason, "token_ids": answer.token_ids}, separators=(",", ":")) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        self.answers[key] = answer
        self._unsynced += 1
        if self._unsynced >= ANSWERS_PER_SYNC:
            os.fsync(self._file.fileno())
            self._unsynced = 0

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def answering_engine(directory: Path, settings: EngineSettings, trust_remote_code: bool) -> EngineConfig:
    """The engine that answers: prompts are prefilled whole, several in one step where they fit.

    After a step with a part of a prompt vLLM 0.32 turns a seeded request's generator back, which a CPU generator cannot do:
    it would end with "CPU Generator does not use offset".
    """
    return replace(engine_config(directory, settings, trust_remote_code), extra={"enable_chunked_prefill": False})


class Verifier:
    """Answers prompts from the journal, and from the engine what is not there. The engine starts when it is first needed."""

    def __init__(self, journal: Journal, config: EngineConfig, settings: Regeneration) -> None:
        self._journal = journal
        self._config = config
        self._settings = settings
        self._engine: Engine | None = None
        self.asked = 0

    def request(self, prompt_ids: list[int], sample: int) -> Request:
        """The request for one answer. Its seed comes from its content, so that no other request changes it."""
        temperature = self._settings.temperature if sample == 0 else self._settings.extra_temperature
        key = digest_json([prompt_ids, sample, temperature])
        seed = int(digest_json([self._settings.seed, key])[:8], 16) if temperature > 0 else None
        return Request(id=key, prompt_ids=prompt_ids, max_tokens=self._settings.max_tokens, temperature=temperature, top_p=self._settings.top_p, seed=seed)

    def answer(self, requests: list[Request], desc: str) -> list[Answer]:
        """An answer to each request, in order; equal requests are asked once."""
        missing = {request.id: request for request in requests if request.id not in self._journal.answers}
        if missing:
            if self._engine is None:
                if (slow := slow_dtype(self._config.dtype)) is not None:
                    print(slow, file=sys.stderr)
                self._engine = Engine(self._config)
            self.asked += len(missing)
            self._engine.generate(list(missing.values()), on_finished=self._keep, desc=desc)
        return [self._journal.answers[request.id] for request in requests]

    def _keep(self, completion: Completion) -> None:
        self._journal.add(completion.id, Answer(completion.token_ids, completion.finish_reason))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


@dataclass
class Dialogue:
    """A row while the verifier answers it, turn by turn.

    Attributes:
        row: its messages hold `TO_ANSWER` where the verifier answers.
        sample: 0, or the number of a further answer to the same prompts.
        open_end: the last turn stays unanswered (evaluation).
        longest_prompt: tokens; a turn with a longer prompt is not asked.
        too_long: why not, for the report.
        answered: the conversation so far.
        turns: per answered turn its prompt ids and the answer.
        prompt: the unanswered last turn's prompt ids (`open_end`).
        dropped: why the row cannot be used, if so.
        shortened: later turns were left out because their prompt is too long.
        finished: there is nothing more to ask.
    """

    row: Row
    sample: int = 0
    open_end: bool = False
    longest_prompt: int = 0
    too_long: str = TOO_LONG
    answered: list[Message] = field(default_factory=list)
    turns: list[tuple[list[int], Answer]] = field(default_factory=list)
    prompt: list[int] | None = None
    dropped: str | None = None
    shortened: bool = False
    finished: bool = False

    def next_prompt(self, chat: Chat) -> list[int] | None:
        """Prompt ids of the next turn to ask; None when there is none (any more)."""
        if self.finished:
            return None
        rest = self.row.messages[len(self.answered) :]
        ahead = next((index for index, message in enumerate(rest) if message is TO_ANSWER), None)
        if ahead is None:
            self.finished = True
            return None
        context = self.answered + rest[:ahead]
        try:
            prompt = chat.prompt_ids(context, self.row.tools)
        except DroppedRowError as dropped:
            self._drop(dropped.reason)
            return None
        if len(prompt) > self.longest_prompt:
            if not self.turns or self.open_end:
                self._drop(self.too_long)
            self.shortened = self.finished = True
            return None
        self.answered = context
        if self.open_end and not any(message is TO_ANSWER for message in rest[ahead + 1 :]):
            self.prompt, self.finished = prompt, True
            return None
        return prompt

    def add(self, prompt: list[int], answer: Answer, chat: Chat) -> None:
        """Book the answer to the prompt that `next_prompt` gave."""
        if all(token in chat.eos for token in answer.token_ids):
            self._drop("empty assistant turn")
            return
        self.turns.append((prompt, answer))
        self.answered = [*self.answered, {"role": "assistant", "content": chat.text(answer.token_ids)}]

    def _drop(self, reason: str) -> None:
        self.finished, self.dropped = True, reason

    def tokens(self) -> Tokens:
        """The conversation as the verifier met it: the last turn's prompt ids and the very ids of its answer.

        An earlier turn is supervised as far as the last prompt holds exactly the ids that the verifier wrote, after
        exactly the ids that it wrote them after. From where a template or the tokenizer writes them otherwise (an
        answer cut at max_tokens, reasoning taken out of history) they are context, and the turn counts as `rewritten`.
        """
        prompt, answer = self.turns[-1]
        ids = prompt + answer.token_ids
        spans, rewritten = [], 0
        for earlier, words in self.turns[:-1]:
            written = earlier + words.token_ids
            same = common_length(ids, written)
            if same > len(earlier):
                spans.append((len(earlier), same))
            rewritten += same < len(written)
        spans.append((len(prompt), len(ids)))
        return Tokens(array("i", ids), tuple(spans), len(prompt), rewritten)


def answer_all(dialogues: list[Dialogue], verifier: Verifier, chat: Chat) -> None:
    """Answer every dialogue to its end: first all first turns, then all second turns, …"""
    turn = 1
    active = dialogues
    while active:
        asked = [(dialogue, prompt) for dialogue in active if (prompt := dialogue.next_prompt(chat)) is not None]
        requests = [verifier.request(prompt, dialogue.sample) for dialogue, prompt in asked]
        for (dialogue, prompt), answer in zip(asked, verifier.answer(requests, f"answers, turn {turn}"), strict=True):
            dialogue.add(prompt, answer, chat)
        active = [dialogue for dialogue, _ in asked]
        turn += 1
