"""Lines of JSONL files to rows: which conversation a line holds.

A line holds one of
    {"turns": ["...", "..."]} or {"prompt": "..."}             user messages, to be answered
    {"messages": [{"role": "user", "content": "..."}, ...]}     OpenAI; content may be a list of text parts
    {"conversations": [{"from": "human", "value": "..."}, ...]} ShareGPT
and, optionally, "id", "kind" and "tools".

What is wrong with a *line* (not JSON, not a row) is the file's fault: `on_error` decides. What is wrong with a
*conversation* (unknown role, empty answer) drops that row under a named reason, and the run goes on.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stages.artifacts import digest_json
from stages.prepare.lines import Batch, PrepareError

Message = dict[str, Any]
"""A message in OpenAI form."""

TO_ANSWER: Message = {"role": "assistant", "content": None}
"""The one message that stands for a turn which the verifier has to answer (known by identity: a file may hold an equal one)."""

Asks = Literal["none", "last", "all"]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "function",
}
"""Names of roles in OpenAI and ShareGPT files → the role that a chat template is given."""

ASKING = ("user", "tool", "function")
"""Roles that an assistant answers."""


UNUSUAL, HUGE = ("\\u", "NaN", "Infinity"), re.compile(r"[0-9](?:[eE]|[0-9]{299})")
"""Without these a text that is JSON holds neither half a surrogate pair nor a number that is none."""

DEEPEST = 200
"""Levels of lists and objects in one another. Far below what ends Python's stack: what was read once can be written, digested and read anywhere."""
TOO_DEEP = f"not JSON that can be read: nested deeper than {DEEPEST} levels"


class BrokenLineError(PrepareError):
    """A line of a file is not a row."""


class DroppedRowError(Exception):
    """One row cannot be used; `reason` is what it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Row:
    """One conversation as a file holds it.

    Attributes:
        id: the row's own, else a digest of its content.
        kind: the row's own, else the id's prefix (`gsm8k-3`), else the file's name.
        messages: the conversation; see `Message`.
        tools: function definitions that the template is given, if the row has some.
        source: `file:line`, for messages to people.
        file: position of its file among the inputs.
    """

    id: str
    kind: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    source: str
    file: int


@dataclass
class Tally:
    """What became of the rows: `read` = kept + dropped + duplicates + beyond the limit."""

    read: int = 0
    broken_lines: int = 0
    duplicates: int = 0
    beyond_limit: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, source: str) -> None:
        """Count a dropped row; the first one of each reason is kept as an example."""
        self.dropped[reason] += 1
        self.examples.setdefault(reason, source)

    def add(self, later: Tally) -> None:
        """Count what became of later rows, too."""
        self.read += later.read
        self.broken_lines += later.broken_lines
        self.duplicates += later.duplicates
        self.beyond_limit += later.beyond_limit
        self.dropped.update(later.dropped)
        self.examples = {**later.examples, **self.examples}


def _strict(text: str) -> Any:
    """JSON that any later step, and any other parser, can be given; ValueError says why not (JSONDecodeError: no JSON at all)."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise ValueError(f"holds a whole number of more than {sys.get_int_max_str_digits()} digits") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if text.count("[") + text.count("{") > DEEPEST and _too_deep(value):
        raise ValueError(TOO_DEEP)
    if not any(word in text for word in UNUSUAL) and HUGE.search(text) is None:
        return value
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    except ValueError:
        raise ValueError("holds NaN or Infinity, which is no JSON") from None
    return value


def _too_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [child for each in level if isinstance(each, (list, dict)) for child in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, (list, dict)) for each in level)


def _parse(line: bytes) -> dict[str, Any]:
    """One line as a JSON object; ValueError says why not."""
    try:
        record = _strict(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    if not isinstance(record, dict):
        raise ValueError(f"a row must be a JSON object, this is a {type(record).__name__}")
    return record


def _raw_messages(record: dict[str, Any]) -> list[Message]:
    """The row's messages as they stand there; ValueError says what is missing."""
    if "messages" in record or "conversations" in record:
        name = "messages" if "messages" in record else "conversations"
        messages = record[name]
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise ValueError(f"{name!r} must be a list of messages")
        if isinstance(record.get("system"), str) and name == "conversations":
            messages = [{"role": "system", "content": record["system"]}, *messages]
        return messages
    turns = record.get("turns", [record["prompt"]] if "prompt" in record else None)
    if turns is None:
        raise ValueError("has none of 'messages', 'conversations', 'turns' and 'prompt'")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError("'turns' must be a list of texts, 'prompt' a text")
    return [message for turn in turns for message in ({"role": "user", "content": turn}, TO_ANSWER)]


def _text(content: object) -> str:
    """A message's content as one text; parts are joined as vLLM's chat server joins them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DroppedRowError("message without text")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise DroppedRowError("content part that is not text")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(calls: object) -> list[dict[str, Any]]:
    """Tool calls as templates expect them: OpenAI's JSON text of arguments becomes an object."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls):
        raise DroppedRowError("tool call that is not a function's")
    out = []
    for call in calls:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = _strict(function["arguments"] or "{}")
            except json.JSONDecodeError:
                raise DroppedRowError("tool call whose arguments are not JSON") from None
            except ValueError as error:
                raise DroppedRowError(f"arguments of a tool call: {error}") from None
        out.append({**call, "function": function})
    return out


def normalise(message: Message) -> Message:
    """One message of any of the formats as OpenAI's.

    Raises:
        DroppedRowError: a role or a content that no template could be given.
    """
    if message is TO_ANSWER:
        return message
    name = message.get("role", message.get("from"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise DroppedRowError("unknown role")
    content = message.get("content", message.get("value"))
    out: Message = {"role": role}
    if role == "assistant" and message.get("tool_calls"):
        out["tool_calls"] = _tool_calls(message["tool_calls"])
    if role == "assistant" and content is None:
        content = ""
    out["content"] = _text(content)
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            out[key] = message[key]
    if role == "user" and not out["content"].strip():
        raise DroppedRowError("empty user turn")
    if role == "assistant" and not out["content"] and "tool_calls" not in out:
        raise DroppedRowError("empty assistant turn")
    return out


def _file_kind(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl") or path.name


def _row(record: dict[str, Any], path: Path, number: int, file: int) -> Row:
    """A row whose messages are still as they stand in the file; ValueError says what is wrong with the line."""
    messages = _raw_messages(record)
    tools = record.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("'tools' must be a list of function definitions")
    identifier = record.get("id")
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int, type(None))):
        raise ValueError("'id' must be a text or a whole number")
    kind = record.get("kind")
    if not isinstance(kind, (str, type(None))):
        raise ValueError("'kind' must be a text")
    prefix = re.fullmatch(r"(.+)-\d+", str(identifier or ""))
    return Row(
        id=digest_json(messages)[:16] if identifier in (None, "") else str(identifier),
        kind=kind or (prefix.group(1) if prefix else _file_kind(path)),
        messages=messages,
        tools=tools,
        source=f"{path}:{number}",
        file=file,
    )


def read_batch(batch: Batch, tally: Tally, on_error: Literal["fail", "skip"] = "fail", asks: Asks = "all") -> Iterator[tuple[int, Row]]:
    """The batch's rows, messages in OpenAI form, each with its place in the batch; rows that cannot be used are counted in `tally`.

    Args:
        asks: which answers are left to the verifier, see `conversation`.
    Raises:
        BrokenLineError: a line that is not a row (`on_error` "fail").
    """
    for place, (number, line) in enumerate(zip(batch.numbers, batch.lines, strict=True)):
        try:
            row = _row(_parse(line), batch.path, number, batch.file)
        except ValueError as error:
            if on_error == "fail":
                raise BrokenLineError(f"{batch.path}:{number}: {error} (prepare.on_error: skip leaves such lines out)") from None
            tally.broken_lines += 1
            tally.examples.setdefault("broken line", f"{batch.path}:{number}: {error}")
            continue
        tally.read += 1
        try:
            yield place, replace(row, messages=conversation(row.messages, asks))
        except DroppedRowError as dropped:
            tally.drop(dropped.reason, row.source)


def asked_before(messages: list[Message], index: int) -> bool:
    """Does a user or a tool speak before message `index`? Otherwise an assistant's message there is no answer."""
    return any(message["role"] in ASKING for message in messages[:index])


def conversation(messages: list[Message], asks: Asks) -> list[Message]:
    """Normalised messages, ending with an assistant turn; the turns that the verifier has to answer are `TO_ANSWER`.

    Args:
        asks: "none": every answer is the row's own. "last": the last one is left to the verifier, whatever the row has.
            "all": every answer that follows a user's or a tool's message is the verifier's. A call of a tool stays (the
            tool's result belongs to it), and so does an assistant that opens the conversation: nobody asked.
    Raises:
        DroppedRowError: a message that no template could be given, or no assistant turn.
    """
    out: list[Message] = []
    for message in messages:
        name = message.get("role", message.get("from"))
        answer = asks == "all" and isinstance(name, str) and ROLES.get(name) == "assistant" and not message.get("tool_calls") and asked_before(out, len(out))
        out.append(TO_ANSWER if answer else normalise(message))
    if asks != "none" and out[-1]["role"] in ASKING:
        out.append(TO_ANSWER)
    while out and (out[-1]["role"] != "assistant" or (asks == "all" and out[-1] is not TO_ANSWER)):
        out.pop()
    own = out if asks == "none" else out[:-1] if asks == "last" else []
    if not out or not asked_before(out, len(out) - 1) or any(message is TO_ANSWER for message in own):
        raise DroppedRowError("no assistant turn")
    return out if asks == "none" else [*out[:-1], TO_ANSWER]
