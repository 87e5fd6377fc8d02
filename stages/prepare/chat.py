"""The verifier's tokenizer and chat template: conversations to token ids and supervised spans.

The loss mask is known by construction, not found by looking for marks. For each assistant turn the template renders
the conversation up to it with the generation prompt (what the server would decode from) and the conversation through
it; the second text must continue the first, and what it adds is the turn. So text that looks like a template's mark
confuses nothing, and stock templates without `{% generation %}` are enough.

What is tokenised, and why:
- Text goes through the tokenizer as the chat server does it (`add_special_tokens=False`, no BOS beyond the template's).
  A content that spells a special token therefore becomes that token, in prompts, answers and history alike: this is
  what the verifier is given when such a chat is served.
- A prompt is tokenised by itself, because decoding starts from exactly those ids. Where the tokenizer would merge the
  prompt's last characters with the answer's first ones, answer and prompt are tokenised apart at that border.
- A turn is supervised up to its end-of-turn token, which the verifier must emit; what a template writes after that
  (a line feed, usually) is not.
- An assistant's message that opens a conversation answers nothing: it is context.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from stages.artifacts import sha256_bytes
from stages.prepare.lines import PrepareError
from stages.prepare.pieces import direct_encoder
from stages.prepare.rows import DroppedRowError, Message, asked_before

TODAY = datetime(2026, 1, 1)
"""What templates that print the date are told: the same inputs must give the same data set on any day."""

SPLIT_BY_TEMPLATE = "the template does not continue its own generation prompt with the answer"
LEFT_OUT_BY_TEMPLATE = "the template leaves the answer out"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


@dataclass(frozen=True)
class Tokens:
    """A conversation as tokens.

    Attributes:
        ids: `[T]` token ids.
        spans: per supervised assistant turn `(start, end)`; `ids[:start]` is its prompt, `ids[start:end]` its own words.
        last_prompt: length of the last assistant turn's prompt.
        rewritten: earlier assistant turns that the last prompt holds in other tokens; they are not supervised, or not to their end.
    """

    ids: array[int]
    spans: tuple[tuple[int, int], ...]
    last_prompt: int
    rewritten: int = 0

    @property
    def mask(self) -> list[int]:
        """`[T]`, 1 inside the spans."""
        out = [0] * len(self.ids)
        for start, end in self.spans:
            out[start:end] = [1] * (end - start)
        return out

    @property
    def supervised(self) -> int:
        return sum(end - start for start, end in self.spans)


def cut(tokens: Tokens, longest: int) -> Tokens:
    """The first `longest` tokens. A last turn that is cut off whole goes, so that the last prompt lies inside."""
    spans = tuple((start, min(end, longest)) for start, end in tokens.spans if start < longest)
    last = tokens.last_prompt if tokens.last_prompt < longest else spans[-1][0] if spans else 0
    return Tokens(tokens.ids[:longest], spans, last, tokens.rewritten)


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """How many leading items are equal."""
    return next((place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), min(len(first), len(second)))


def common_ending(first: str, second: str, guess: str = "") -> str:
    """The characters that both texts end with; `guess` is tried first."""
    size = len(guess)
    if size < min(len(first), len(second)) and first.endswith(guess) and second.endswith(guess) and first[-size - 1] != second[-size - 1]:
        return guess
    same = common_length(first[::-1], second[::-1])
    return first[len(first) - same :]


class Chat:
    """Renders and tokenises as the verifier's chat server does."""

    def __init__(self, directory: Path, eos_token_ids: list[int], trust_remote_code: bool = False) -> None:
        """Load tokenizer and template from a verifier's directory.

        Raises:
            PrepareError: the tokenizer cannot be loaded, or the verifier has no chat template.
        """
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
        except Exception as error:  # of the files' content: whatever the libraries trip over
            raise PrepareError(f"{directory}: transformers cannot load the verifier's tokenizer: {_one_line(error)}") from error
        if not self.tokenizer.chat_template:
            raise PrepareError(f"{directory}: the verifier's tokenizer has no chat template, so chats cannot be rendered as it serves them")
        try:
            self.template: str = self.tokenizer.get_chat_template()
        except ValueError:
            names = ", ".join(sorted(self.tokenizer.chat_template))
            raise PrepareError(f"{directory}: none of the verifier's chat templates ({names}) is called default, which is the one that it serves") from None
        self.eos = frozenset(eos_token_ids)
        self.special = frozenset(self.tokenizer.all_special_ids)
        self.encode = lru_cache(maxsize=256)(direct_encoder(self.tokenizer) or self._encode)
        """Token ids of a rendered text. The list is cached: do not change it."""
        self._renderer = self._direct_renderer()
        self._closing = ""

    @property
    def template_name(self) -> str:
        """How errors and reports call the template: the start of its digest and its first line."""
        first = self.template.strip().split("\n", 1)[0]
        return f"chat template {sha256_bytes(self.template.encode('utf-8'))[:12]} ({first[:80]}{'…' if len(first) > 80 else ''})"

    def _direct_renderer(self) -> Callable[[list[Message], bool], str] | None:
        """What `apply_chat_template(messages, add_generation_prompt=prompt)` comes down to, or None where a tokenizer has its own.

        It takes the compiled template from the same place, and gives it the same names, put together once.
        """
        from transformers import PreTrainedTokenizerBase
        from transformers.utils.chat_template_utils import _compile_jinja_template

        if type(self.tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            return None
        try:
            compiled = _compile_jinja_template(self.template)
        except Exception:  # an error of the template's: rendering reports it
            return None
        environment = compiled.environment
        names = {**compiled.globals, **self.tokenizer.special_tokens_map, "strftime_now": lambda form: TODAY.strftime(form), "tools": None, "documents": None}

        def render(messages: list[Message], prompt: bool) -> str:
            given = {**names, "messages": messages, "add_generation_prompt": prompt}
            return "".join(compiled.root_render_func(environment.context_class(environment, given, compiled.name, compiled.blocks)))

        return render

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def text(self, answer_ids: list[int]) -> str:
        """An answer as the chat server returns it: no special tokens."""
        text: str = self.tokenizer.decode(answer_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, prompt: bool = False) -> str:
        """The template's text; `prompt` adds the header that the verifier answers after.

        Raises:
            DroppedRowError: the template refuses these messages.
        """
        try:
            if self._renderer is not None and tools is None and messages:
                return self._renderer(messages, prompt)
            text: str = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt, strftime_now=TODAY.strftime)
        except Exception as error:
            # Templates are the user's programs: raise_exception() is the polite refusal, a TypeError the usual one.
            raise DroppedRowError(f"refused by the template: {_one_line(error)}") from None
        return text

    def check_template(self) -> None:
        """Refuse a template that does not look at the messages; one that refuses this question is judged by the rows.

        Raises:
            PrepareError: two different questions give the same prompt.
        """
        try:
            first, second = (self.render([{"role": "user", "content": question}], prompt=True) for question in ("one", "two"))
        except DroppedRowError:
            return
        if first == second:
            raise PrepareError(f"{self.template_name}: ignores the messages: two different questions give the same prompt {first[:60]!r}; mend the template")

    def prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """What the verifier decodes the next assistant turn from."""
        return self.encode(self.render(messages, tools, prompt=True))

    def check(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """The template's text, where it leaves nothing out without a word: messages of rare roles, calls of tools.

        Raises:
            DroppedRowError: it refuses these messages, or leaves something out.
        """
        whole = self.render(messages, tools)
        for role in {message["role"] for message in messages} - {"user", "assistant", "system"}:
            other = [{**message, "content": message["content"] + " x"} if message["role"] == role else message for message in messages]
            if self.render(other, tools) == whole:
                raise DroppedRowError(f"the template leaves out the role {role}")
        if any("tool_calls" in message for message in messages):
            bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
            try:
                ignored = self.render(bare, tools) == whole
            except DroppedRowError:
                ignored = False
            if ignored:
                raise DroppedRowError("the template leaves out tool calls")
        return whole

    def tokens(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, whole: str | None = None) -> Tokens:
        """A conversation whose answers are all known, ending with an assistant turn.

        Args:
            whole: `render(messages, tools)`, where it is known.
        Raises:
            DroppedRowError: the template refuses it, loses an answer, or an assistant turn is empty.
        """
        ids: list[int] = []
        text = ""
        spans: list[tuple[int, int]] = []
        turns = 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or not asked_before(messages, index):
                continue
            turns += 1
            prompt = self.render(messages[:index], tools, prompt=True)
            answered = whole if whole is not None and index + 1 == len(messages) else self.render(messages[: index + 1], tools)
            if not answered.startswith(prompt):
                raise DroppedRowError(SPLIT_BY_TEMPLATE)
            if not prompt.startswith(text):
                # The template writes an earlier answer otherwise once it is history (reasoning taken out, say).
                spans, ids, text = [], [], ""
            ids = self._extend(ids, text, prompt)
            start = len(ids)
            ids, text = self._extend(ids, prompt, answered), answered
            spans.append((start, self._end(messages[: index + 1], tools, prompt, answered, ids, start)))
        return Tokens(array("i", ids), tuple(spans), spans[-1][0], turns - len(spans))

    def _extend(self, ids: list[int], before: str, after: str) -> list[int]:
        """Ids of `after`, which starts with `before` (tokenised as `ids`), with those ids at its start."""
        whole = self.encode(after)
        if whole[: len(ids)] == ids:
            return whole
        apart = ids + self.encode(after[len(before) :])
        if self.tokenizer.decode(apart) != self.tokenizer.decode(whole):
            raise DroppedRowError("the tokenizer joins prompt and answer")
        return apart

    def _end(self, messages: list[Message], tools: list[dict[str, Any]] | None, prompt: str, answered: str, ids: list[int], start: int) -> int:
        """Where the supervised part of the last turn, `ids[start:]`, ends: after the last token that the verifier has to emit.

        How the template closes a turn is seen by rendering another answer that ends differently: what both texts end
        with is the template's. Of the closing, the tokens up to the first end-of-turn token count.
        """
        content: str = messages[-1]["content"]
        other: Message = {"role": "assistant", "content": "b" if content.rstrip().endswith("a") else "a"}
        rest = answered[len(prompt) :]
        self._closing = common_ending(rest, self.render([*messages[:-1], other], tools), self._closing)
        body, closing = rest[: len(rest) - len(self._closing)], self._closing
        if not body:
            raise DroppedRowError(LEFT_OUT_BY_TEMPLATE if content.strip() else "empty assistant turn")
        closing_ids = self.encode(closing)
        ends = [token for token in closing_ids if token in self.eos] or [token for token in closing_ids if token in self.special]
        if ends:
            # The closing stands last, so its first end of turn is the len(ends)-th one from the end.
            return list(islice((place for place in range(len(ids) - 1, start - 1, -1) if ids[place] in ends), len(ends)))[len(ends) - 1] + 1
        # A template without an end of turn: the answer's own tokens.
        return common_length(self._extend(ids[:start], prompt, prompt + body), ids)
