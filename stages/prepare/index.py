"""Every row as a few numbers: enough to say which rows are the same, which ids clash and which rows a limit takes.

The conversations themselves stay in their files: the index costs about 90 bytes a row while files are read and 20 after
that. A row's *prompt key* is the digest of what the verifier is asked (all messages but the assistant's), its *content
key* that of the whole conversation; both ignore white space at the ends of messages. Its *rank* is a digest of seed and
prompt key: it orders prompts by nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from json.encoder import encode_basestring

import numpy as np
from numpy.typing import NDArray

from stages.artifacts import canonical_json, sha256_bytes
from stages.prepare.rows import Message, Row, Tally

Flags = NDArray[np.bool_]
Numbers = NDArray[np.integer]

RECORD = np.dtype(
    [("content", "S16"), ("rank", "S16"), ("id", "S16"), ("new_id", "S16"), ("kind", np.int32), ("file", np.int32), ("position", np.int64)],
)
"""Digests are cut to 16 bytes: two of a billion rows are taken for one another with a chance of 1 to 10^20."""


def _spoken(message: Message) -> str:
    """The message's canonical JSON, white space at the ends of its content left out."""
    content = message["content"]
    if len(message) == 2 and isinstance(content, str):
        # Role and content, as nearly always: the same text, five times faster.
        return f'{{"content":{encode_basestring(content.strip())},"role":{encode_basestring(message["role"])}}}'
    return canonical_json({**message, "content": content.strip() if isinstance(content, str) else None})


def keys(row: Row) -> tuple[str, str]:
    """Prompt key and content key, in hex."""
    spoken = [_spoken(message) for message in row.messages]
    asked = [text for text, message in zip(spoken, row.messages, strict=True) if message["role"] != "assistant" or "tool_calls" in message]
    tools = canonical_json(row.tools) if row.tools else "null"
    prompt, content = (sha256_bytes(f"[[{','.join(texts)}],{tools}]".encode()) for texts in (asked, spoken))
    return prompt, content


def new_id(row: Row) -> str:
    """What a row is called whose id an earlier, different row has."""
    return f"{row.id}~{keys(row)[1][:12]}"


@dataclass(frozen=True)
class Indexed:
    """What one batch adds to the index: a record per row (`kind` is a place in `kinds`), and what became of the other lines."""

    tally: Tally
    records: NDArray[np.void]
    kinds: list[str]


def index_rows(rows: Iterable[tuple[int, Row]], seed: int, tally: Tally) -> Indexed:
    """Args: rows: position among all lines, row. `tally` is filled while `rows` is read."""
    kinds: dict[str, int] = {}
    records = []
    for position, row in rows:
        prompt, content = keys(row)
        digests = (f"{seed}:{prompt}", row.id, f"{row.id}~{content[:12]}")
        rank, own, other = (hashlib.sha256(text.encode()).digest()[:16] for text in digests)
        records.append((bytes.fromhex(content[:32]), rank, own, other, kinds.setdefault(row.kind, len(kinds)), row.file, position))
    return Indexed(tally, np.array(records, dtype=RECORD), list(kinds))


@dataclass(frozen=True)
class Index:
    """Rows by number, in the order of their files.

    Attributes:
        position: of the row's line among all lines of its files.
        file: position of its file.
        kind: number of its kind.
        prompt: number of its prompt, shared by all rows that ask the same; prompts are numbered by rank.
        renamed: its id is `new_id`.
        lines: how many lines the files have.
    """

    position: Numbers
    file: Numbers
    kind: Numbers
    prompt: Numbers
    renamed: Flags
    lines: int

    def __len__(self) -> int:
        return len(self.position)

    def at(self, chosen: Flags) -> Index:
        """Some of the rows."""
        return Index(self.position[chosen], self.file[chosen], self.kind[chosen], self.prompt[chosen], self.renamed[chosen], self.lines)

    def chosen_lines(self) -> Flags:
        """Per line of the files: is a row of this index in it?"""
        chosen = np.zeros(self.lines, dtype=bool)
        chosen[self.position] = True
        return chosen

    def renamed_lines(self) -> frozenset[int]:
        """Positions of the lines whose row is renamed."""
        return frozenset(self.position[self.renamed].tolist())


class Records:
    """The records of all batches, and the numbers of the kinds."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}

    def collect(self, batches: Iterable[Indexed], tally: Tally) -> tuple[NDArray[np.void], int]:
        """One array of the batches' records, and the number of lines that they were read from."""
        data = bytearray()
        lines = tally.read + tally.broken_lines
        for batch in batches:
            tally.add(batch.tally)
            numbers = np.array([self.kinds.setdefault(kind, len(self.kinds)) for kind in batch.kinds], dtype=np.int32)
            if len(batch.records):
                batch.records["kind"] = numbers[batch.records["kind"]]
                data += batch.records.tobytes()
        return np.frombuffer(data, dtype=RECORD), tally.read + tally.broken_lines - lines


def first_of_each(keys: NDArray[np.generic]) -> Flags:
    """True at the first of those that are equal."""
    first = np.zeros(len(keys), dtype=bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first


def renamed(ids: NDArray[np.generic], new_ids: NDArray[np.generic]) -> Flags:
    """Rows whose id an earlier row has, and those, wherever they stand, whose id another row was renamed to."""
    found = ~first_of_each(ids)
    ahead = found
    while ahead.any():
        # Only a file that spells another row's new id makes this go round twice.
        ahead = np.isin(ids, new_ids[ahead]) & ~found
        found |= ahead
    return found


def distinct(held_out: tuple[NDArray[np.void], int], rows: tuple[NDArray[np.void], int], tally: Tally) -> tuple[Index, Index]:
    """The first row of each content, of the evaluation files and of the others; the others ask nothing that those ask.

    Every id is unique: see `renamed`.
    """
    held, others = held_out[0], rows[0]
    first_held = first_of_each(held["content"])
    first = first_of_each(others["content"]) & ~np.isin(others["rank"], held["rank"][first_held])
    tally.duplicates += int((~first_held).sum() + (~first).sum())

    def both(field: str) -> NDArray[np.generic]:
        return np.concatenate([held[field][first_held], others[field][first]])

    prompts = np.unique(both("rank"), return_inverse=True)[1].astype(np.int32)
    new = renamed(both("id"), both("new_id"))
    border = int(first_held.sum())

    def index(records: NDArray[np.void], chosen: Flags, part: slice, lines: int) -> Index:
        return Index(records["position"][chosen], records["file"][chosen], records["kind"][chosen], prompts[part], new[part], lines)

    return index(held, first_held, slice(border), held_out[1]), index(others, first, slice(border, None), rows[1])


def _numbered(groups: tuple[Numbers, ...], order: tuple[Numbers, ...]) -> Numbers:
    """The number of each row, from 0, among those of its group, in this order."""
    rows = np.lexsort((*reversed(order), *reversed(groups)))
    starts = np.ones(len(rows), dtype=bool)
    starts[1:] = np.any([group[rows[1:]] != group[rows[:-1]] for group in groups], axis=0)
    numbers = np.empty(len(rows), dtype=np.int64)
    places = np.arange(len(rows))
    numbers[rows] = places - np.maximum.accumulate(np.where(starts, places, 0))
    return numbers


def within(limit: int | None, index: Index, kinds: list[str]) -> Flags:
    """At most `limit` rows, evenly over files and, within a file, over kinds; a larger limit takes the same and more.

    Args:
        kinds: names, by number.
    """
    if limit is None or limit >= len(index):
        return np.ones(len(index), dtype=bool)
    alphabetical = np.empty(len(kinds), dtype=np.int64)
    alphabetical[sorted(range(len(kinds)), key=kinds.__getitem__)] = np.arange(len(kinds))
    kind = alphabetical[index.kind]
    turn = _numbered((index.file, kind), (index.prompt,))
    place = _numbered((index.file,), (turn, kind))
    taken = np.zeros(len(index), dtype=bool)
    taken[np.lexsort((index.file, place))[:limit]] = True
    return taken
