"""The later passes over the files: which rows the template takes, and samples with the answers that the rows hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from stages.dataset import SPLITS, SplitWriter
from stages.prepare.build import Limits
from stages.prepare.index import Index, Numbers, first_of_each
from stages.prepare.jobs import SIZES, Done, JobContext, check_rows, evaluation_prompts, training_samples
from stages.prepare.lines import Batch, batches
from stages.prepare.read import Source
from stages.prepare.report import Columns
from stages.prepare.rows import Tally
from stages.prepare.spool import Spool
from stages.prepare.workers import Workers

NOWHERE = -1
"""For a sample that goes to no split."""


@dataclass(frozen=True)
class Samples:
    """Samples in a spool.

    Attributes:
        index: their rows, in the same order.
        sizes: `SIZES` of each.
    """

    spool: Spool
    index: Index
    sizes: NDArray[np.void]

    def columns(self, chosen: NDArray[np.bool_]) -> Columns:
        """What the report wants to know of some of them."""
        return Columns(self.index.kind[chosen], self.index.prompt[chosen], self.sizes["tokens"][chosen], self.sizes["supervised"][chosen])

    def write(self, splits: Numbers, writers: list[SplitWriter]) -> None:
        """Write each sample to its split, a place in `writers`, or `NOWHERE`."""
        start = 0
        for table in self.spool:
            part = splits[start : start + table.num_rows]
            start += table.num_rows
            for split, writer in enumerate(writers):
                if (chosen := part == split).any():
                    writer.add(table.filter(chosen))


def chosen_batches(source: Source, index: Index) -> Iterator[Batch]:
    """The lines of the rows of `index`, some of the source's."""
    return batches(source.files, index.chosen_lines(), index.renamed_lines()) if len(index) else iter(())


def _go_through(
    source: Source, index: Index, job: Callable[[JobContext, Batch], Done], workers: Workers, tally: Tally, spool: Spool | None
) -> NDArray[np.void]:
    """Do the job on the rows of `index`; returns `SIZES` of the rows that are left."""
    sizes = [np.empty(0, dtype=SIZES)]
    with tqdm(total=len(index), desc="chats to tokens", unit="row", disable=len(index) < 1000) as bar:
        for done in workers.in_order(job, chosen_batches(source, index)):
            tally.add(done.tally)
            sizes.append(done.sizes)
            if spool is not None and done.samples is not None:
                spool.add(done.samples)
            bar.update(done.lines)
    return np.concatenate(sizes)


def _rows_of(index: Index, sizes: NDArray[np.void]) -> Index:
    return index.at(np.isin(index.position, sizes["position"]))


def checked(source: Source, limits: Limits, workers: Workers, tally: Tally) -> Index:
    """The rows that the template takes."""
    job = partial(check_rows, asks=source.asks, limits=limits)
    return _rows_of(source.index, _go_through(source, source.index, job, workers, tally, None))


def answered(source: Source, workers: Workers, tally: Tally, spool: Spool) -> Samples:
    """Training samples of the rows that the template takes."""
    sizes = _go_through(source, source.index, training_samples, workers, tally, spool)
    return Samples(spool, _rows_of(source.index, sizes), sizes)


def asked(source: Source, index: Index, workers: Workers, tally: Tally, spool: Spool) -> tuple[Samples, Numbers]:
    """Evaluation samples of the rows of `index`; the split of each: rows that differ in the answer alone are one prompt."""
    job = partial(evaluation_prompts, asks=source.asks)
    sizes = _go_through(source, index, job, workers, tally, spool)
    first = first_of_each(sizes["digest"])
    tally.duplicates += int((~first).sum())
    return Samples(spool, _rows_of(index, sizes), sizes), np.where(first, SPLITS.index("evaluation"), NOWHERE)
