"""The token samples that `prepare` writes and later stages read: one Parquet file per split.

`outputs/prepare/<split>/samples.parquet`, written in row groups, read in order or by position.

A training or validation sample is a whole conversation. Where the verifier answered it itself, `input_ids` is the last
turn's prompt as the chat server tokenises it, followed by the very ids that the verifier emitted: they end with its EOS,
or without one if the answer was cut at max_tokens. Earlier turns are supervised too.

An evaluation sample is a prompt that waits for an answer: earlier turns are answered, the last one is not. So
`input_ids == prompt_ids`, `prompt_length == len(input_ids)`, the loss mask is all 0, and `messages` ends with the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.artifacts import atomic_path, sha256_bytes
from stages.errors import ArtifactError

SPLITS = ("train", "validation", "evaluation")
ROWS_PER_GROUP = 512
REDO = "run `dvc repro --force --single-item prepare`, then `dvc repro`"
"""What mends a split that is not as it was written."""

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("kind", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("prompt_length", pa.int32()),
        ("turns", pa.int32()),
        ("messages", pa.string()),
    ]
)


@dataclass(frozen=True)
class TokenSample:
    """One conversation as tokens.

    Attributes:
        id: stable over runs, unique in the data set; `<id>#<n>` is the n-th further answer to the same prompt.
        kind: prompt kind, for tables per kind.
        input_ids: `[T]` token ids of the whole conversation.
        loss_mask: `[T]`, 1 where the token is the assistant's (its end-of-turn token included); never all 0 in training.
        prompt_length: `input_ids[:prompt_length]` is the prompt of the last assistant turn, generation header included.
        turns: assistant turns, the one that an evaluation sample waits for included.
        messages: the conversation, OpenAI form.
    """

    id: str
    kind: str
    input_ids: list[int]
    loss_mask: list[int]
    prompt_length: int
    turns: int
    messages: list[dict[str, Any]]

    @property
    def prompt_ids(self) -> list[int]:
        return self.input_ids[: self.prompt_length]


def split_file(prepared: Path, split: str) -> Path:
    return prepared / split / "samples.parquet"


class SplitWriter:
    """Takes samples as tables (`SCHEMA`) of any length; writes them `ROWS_PER_GROUP` at a time."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._waiting: list[pa.Table] = []
        self._rows = 0
        self.count = 0

    def add(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._rows += table.num_rows
        self.count += table.num_rows
        while self._rows >= ROWS_PER_GROUP:
            self._write(ROWS_PER_GROUP)

    def finish(self) -> None:
        if self._rows:
            self._write(self._rows)

    def _write(self, rows: int) -> None:
        together = pa.concat_tables(self._waiting)
        # In one piece: the bytes of a row group then depend on its rows alone.
        self._writer.write_table(together.slice(0, rows).combine_chunks())
        self._rows -= rows
        self._waiting = [together.slice(rows)] if self._rows else []


@contextmanager
def split_writer(prepared: Path, split: str) -> Iterator[SplitWriter]:
    """Writes one split; the file is final when the block ends well."""
    with atomic_path(split_file(prepared, split)) as temporary, pq.ParquetWriter(temporary, SCHEMA) as parquet:
        writer = SplitWriter(parquet)
        yield writer
        writer.finish()


def write_split(prepared: Path, split: str, samples: Iterable[TokenSample]) -> int:
    """Write one split atomically, `ROWS_PER_GROUP` samples in memory at a time; returns the number written."""
    rest = iter(samples)
    with split_writer(prepared, split) as writer:
        while group := list(islice(rest, ROWS_PER_GROUP)):
            writer.add(_table(group))
    return writer.count


def messages_text(messages: list[dict[str, Any]]) -> str:
    """How `messages` stand in a file."""
    return json.dumps(messages, ensure_ascii=False)


def _table(samples: list[TokenSample]) -> pa.Table:
    return pa.table(
        {
            "id": [s.id for s in samples],
            "kind": [s.kind for s in samples],
            "input_ids": [s.input_ids for s in samples],
            "loss_mask": [s.loss_mask for s in samples],
            "prompt_length": [s.prompt_length for s in samples],
            "turns": [s.turns for s in samples],
            "messages": [messages_text(s.messages) for s in samples],
        },
        schema=SCHEMA,
    )


def iter_split(prepared: Path, split: str) -> Iterator[TokenSample]:
    """Read one split in order, a row group in memory at a time."""
    path = split_file(prepared, split)
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; run the prepare stage (dvc repro prepare)")
    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(SCHEMA):
                raise ArtifactError(f"{path}: other columns than prepare writes; {REDO}")
            for group in range(file.num_row_groups):
                table = file.read_row_group(group).combine_chunks()
                lists = [_lists(table[name].chunk(0)) for name in ("input_ids", "loss_mask")]
                rest = (table[name].to_pylist() for name in ("id", "kind", "prompt_length", "turns", "messages"))
                for ids, mask, name, kind, prompt_length, turns, messages in zip(*lists, *rest, strict=True):
                    yield TokenSample(name, kind, ids, mask, prompt_length, turns, json.loads(messages))
    except (pa.ArrowException, OSError) as error:
        raise ArtifactError(f"{path}: damaged: {' '.join(str(error).split())}; {REDO}") from None


_INTEGERS: list[int] = []
"""One object per token id, however many samples hold it: a list of Python's own costs five times the memory."""


def _lists(column: pa.ListArray) -> Iterator[list[int]]:
    """The lists of a column of lists of non-negative integers."""
    values, ends = column.flatten().to_numpy(), column.offsets.to_numpy()
    highest = int(values.max(initial=0))
    _INTEGERS.extend(range(len(_INTEGERS), highest + 1))
    for start, end in pairwise((ends - ends[0]).tolist()):
        yield list(map(_INTEGERS.__getitem__, values[start:end].tolist()))


def read_split(prepared: Path, split: str) -> list[TokenSample]:
    return list(iter_split(prepared, split))


def choose_per_kind(samples: Iterable[TokenSample], count: int) -> dict[str, list[TokenSample]]:
    """`count` samples of each kind (fewer where a kind has fewer), kinds in alphabetical order.

    By digest of the id: the choice does not depend on the order of the samples, and a sample more or less moves it little.
    """
    kinds: dict[str, list[TokenSample]] = {}
    for sample in samples:
        kinds.setdefault(sample.kind, []).append(sample)
    return {kind: sorted(group, key=lambda sample: sha256_bytes(sample.id.encode("utf-8")))[:count] for kind, group in sorted(kinds.items())}
