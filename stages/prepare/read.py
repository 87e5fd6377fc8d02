"""The first pass over the files: every line read once, an index of the rows, and which of them are taken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stages.params import Prepare as Settings
from stages.prepare.index import Index, Records, distinct, within
from stages.prepare.jobs import index_lines
from stages.prepare.lines import batches, input_files
from stages.prepare.rows import Asks, Tally
from stages.prepare.workers import Workers


@dataclass(frozen=True)
class Source:
    """Files that are read together.

    Attributes:
        files: in order.
        asks: which answers are left to the verifier, see `rows.conversation`.
        index: the rows that are taken.
    """

    files: list[Path]
    asks: Asks
    index: Index


@dataclass(frozen=True)
class Inputs:
    """`inputs`, `evaluation_inputs`, and the kinds' names by number."""

    rows: Source
    held_out: Source
    kinds: list[str]


@dataclass(frozen=True)
class Files:
    """The files that the params name."""

    inputs: list[Path]
    evaluation_inputs: list[Path]

    @staticmethod
    def of(settings: Settings) -> Files:
        return Files(input_files(settings.inputs), input_files(settings.evaluation_inputs, "prepare.evaluation_inputs"))

    @property
    def all(self) -> list[Path]:
        return [*self.inputs, *self.evaluation_inputs]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.all)


def read(files: Files, settings: Settings, workers: Workers, tally: Tally) -> Inputs:
    """Distinct rows of `inputs` (at most `limit`) and of `evaluation_inputs`, every id unique."""
    regenerate = settings.regeneration.enabled
    asks: Asks = "all" if regenerate else "none"
    held_out_asks: Asks = "all" if regenerate else "last"
    records = Records()
    held_out = records.collect(workers.in_order(partial(index_lines, asks=held_out_asks), batches(files.evaluation_inputs)), tally)
    rows = records.collect(workers.in_order(partial(index_lines, asks=asks), batches(files.inputs)), tally)
    kinds = list(records.kinds)
    held_out_index, index = distinct(held_out, rows, tally)
    taken = within(settings.limit, index, kinds)
    tally.beyond_limit += int((~taken).sum())
    return Inputs(Source(files.inputs, asks, index.at(taken)), Source(files.evaluation_inputs, held_out_asks, held_out_index), kinds)
