"""What is done to a batch of lines, in whichever process: index, check, tokenise, make evaluation prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stages.artifacts import sha256_bytes
from stages.prepare.build import Limits, Sample, answered_sample, evaluation_prompt, usable_tokens
from stages.prepare.chat import Chat
from stages.prepare.index import Indexed, index_rows, new_id
from stages.prepare.lines import Batch
from stages.prepare.rows import Asks, DroppedRowError, Row, Tally, read_batch
from stages.prepare.spool import packed

SIZES = np.dtype([("position", np.int64), ("tokens", np.int32), ("supervised", np.int32), ("rewritten", np.int32), ("cut", np.bool_), ("digest", "S16")])
"""What the report wants to know of a sample; `position` is its line's. `digest`: of an evaluation prompt's token ids."""


@dataclass
class JobContext:
    """What every job knows. The chat is loaded where and when it is first needed."""

    directory: Path
    eos_token_ids: list[int]
    trust_remote_code: bool
    limits: Limits
    seed: int
    on_error: Literal["fail", "skip"]

    @cached_property
    def chat(self) -> Chat:
        chat = Chat(self.directory, self.eos_token_ids, self.trust_remote_code)
        chat.check_template()
        return chat


@dataclass(frozen=True)
class Done:
    """What became of a batch.

    Attributes:
        tally: the rows that were dropped.
        sizes: `SIZES` of the others, in order.
        samples: those, packed; none where they were only checked.
        lines: how many lines the batch has.
    """

    tally: Tally
    sizes: NDArray[np.void]
    samples: bytes | None
    lines: int


def chosen_rows(batch: Batch, asks: Asks) -> Iterator[tuple[int, Row]]:
    """The rows of lines that `index_lines` has found to hold one, each with its line's position."""
    for place, row in read_batch(batch, Tally(), "skip", asks):
        position = batch.positions[place]
        yield position, replace(row, id=new_id(row)) if position in batch.renamed else row


def index_lines(context: JobContext, batch: Batch, asks: Asks) -> Indexed:
    tally = Tally()
    rows = read_batch(batch, tally, context.on_error, asks)
    return index_rows(((batch.positions[place], row) for place, row in rows), context.seed, tally)


def template_name(context: JobContext, _: None) -> str:
    return context.chat.template_name


def check_rows(context: JobContext, batch: Batch, asks: Asks, limits: Limits) -> Done:
    """Which rows the template takes."""
    tally, sizes = Tally(), []
    for position, row in chosen_rows(batch, asks):
        try:
            usable_tokens(row, context.chat, limits)
        except DroppedRowError as dropped:
            tally.drop(dropped.reason, row.source)
        else:
            sizes.append((position, 0, 0, 0, False, b""))
    return Done(tally, np.array(sizes, dtype=SIZES), None, len(batch.lines))


def training_samples(context: JobContext, batch: Batch) -> Done:
    """The rows that the template takes, with their own answers."""
    tally, samples, sizes = Tally(), [], []
    for position, row in chosen_rows(batch, "none"):
        try:
            tokens = usable_tokens(row, context.chat, context.limits)
        except DroppedRowError as dropped:
            tally.drop(dropped.reason, row.source)
            continue
        assert tokens is not None, "all answers are the row's own"
        sample = answered_sample(row, tokens, context.limits)
        samples.append(sample)
        was_cut = len(sample.tokens.ids) < len(tokens.ids)
        sizes.append((position, len(sample.tokens.ids), sample.tokens.supervised, sample.tokens.rewritten, was_cut, b""))
    return _done(tally, sizes, samples, batch)


def evaluation_prompts(context: JobContext, batch: Batch, asks: Asks) -> Done:
    """The rows as prompts whose last answer is left to the verifier."""
    tally, samples, sizes = Tally(), [], []
    for position, row in chosen_rows(batch, asks):
        try:
            sample = evaluation_prompt(row, context.chat, context.limits)
        except DroppedRowError as dropped:
            tally.drop(dropped.reason, row.source)
            continue
        samples.append(sample)
        sizes.append((position, len(sample.tokens.ids), 0, 0, False, bytes.fromhex(sha256_bytes(sample.tokens.ids.tobytes())[:32])))
    return _done(tally, sizes, samples, batch)


def _done(tally: Tally, sizes: list[tuple[int, int, int, int, bool, bytes]], samples: list[Sample], batch: Batch) -> Done:
    return Done(tally, np.array(sizes, dtype=SIZES), packed(samples) if samples else None, len(batch.lines))
