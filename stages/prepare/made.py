"""The data set of a run, made but not yet final: with the answers that the rows hold, or with the verifier's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.dataset import SPLITS, split_writer, write_split
from stages.pairing.identity import VerifierIdentity
from stages.params import Params
from stages.params import Prepare as Settings
from stages.prepare.answers import Journal, Verifier, answering_engine
from stages.prepare.build import AnsweredSplit, Limits, NumberedRow, from_verifier
from stages.prepare.index import Index
from stages.prepare.jobs import JobContext, chosen_rows
from stages.prepare.lines import PrepareError
from stages.prepare.make import Samples, answered, asked, checked, chosen_batches
from stages.prepare.read import Inputs, Source
from stages.prepare.report import Columns, split_summary
from stages.prepare.rows import Tally
from stages.prepare.splits import assign
from stages.prepare.spool import Spool
from stages.prepare.workers import Workers

TRAIN, EVALUATION = SPLITS.index("train"), SPLITS.index("evaluation")

Fail = Callable[[str], PrepareError]


@dataclass(frozen=True)
class DataSet:
    """What is to be written.

    Attributes:
        report: about it, for the manifest.
        supervised: tokens to train on.
        write: writes the splits into a directory, each atomically.
    """

    report: dict[str, Any]
    supervised: int
    write: Callable[[Path], None]


def split_rows(rows: Index, settings: Settings, fail: Fail) -> NDArray[np.int8]:
    """The split of each row, as a place in `SPLITS`.

    Raises:
        PrepareError: fewer distinct prompts than splits that have to be filled.
    """
    evaluation_fraction = 0.0 if settings.evaluation_inputs else settings.evaluation_fraction
    wanted = 1 + (settings.validation_fraction > 0) + (evaluation_fraction > 0)
    if not len(rows):
        raise fail("no row is left")
    # A prompt is of the kind of the first row that asks it.
    prompts, first, of_row = np.unique(rows.prompt, return_index=True, return_inverse=True)
    if len(prompts) < wanted:
        raise fail(
            f"{len(prompts)} distinct prompts are left, {wanted} are needed to train on one and hold out others "
            "(prepare.validation_fraction and prepare.evaluation_fraction: 0 holds out none)"
        )
    return assign(rows.kind[first], settings.validation_fraction, evaluation_fraction)[of_row]


def _held_out(inputs: Inputs, limits: Limits, workers: Workers, tally: Tally) -> Index:
    return checked(inputs.held_out, Limits(sys.maxsize, limits.prompt), workers, tally)


def with_own_answers(inputs: Inputs, settings: Settings, limits: Limits, workers: Workers, tally: Tally, spools: tuple[Spool, Spool], fail: Fail) -> DataSet:
    """The data set with the answers that the rows hold."""
    training = answered(inputs.rows, workers, tally, spools[0])
    held_out = _held_out(inputs, limits, workers, tally)
    splits = split_rows(training.index, settings, fail)
    source, index = (inputs.held_out, held_out) if settings.evaluation_inputs else (inputs.rows, training.index.at(splits == EVALUATION))
    prompts, asked_once = asked(source, index, workers, tally, spools[1])

    def write(output: Path) -> None:
        with ExitStack() as stack:
            writers = [stack.enter_context(split_writer(output, split)) for split in SPLITS]
            training.write(splits, writers[:EVALUATION])
            prompts.write(asked_once, writers)

    def summary(samples: Samples, chosen: NDArray[np.bool_]) -> dict[str, Any]:
        counts = {"truncated_answers": 0, "shortened_dialogues": 0}
        counts |= {name: int(samples.sizes[column][chosen].sum()) for name, column in (("rewritten_turns", "rewritten"), ("cut_samples", "cut"))}
        return split_summary(samples.columns(chosen), inputs.kinds, counts)

    report = {split: summary(training, splits == place) for place, split in enumerate(SPLITS[:EVALUATION])}
    report["evaluation"] = summary(prompts, asked_once == EVALUATION)
    return DataSet({"splits": report}, report["train"]["supervised_tokens"], write)


def rows_to_answer(inputs: Inputs, settings: Settings, limits: Limits, workers: Workers, tally: Tally, fail: Fail) -> dict[str, list[NumberedRow]]:
    """The rows of each split, for the verifier. They are held in memory: asking takes far longer than they are large."""
    index = checked(inputs.rows, limits, workers, tally)
    held_out = _held_out(inputs, limits, workers, tally)
    splits = split_rows(index, settings, fail)
    rows = {split: _numbered(inputs.rows, index.at(splits == place)) for place, split in enumerate(SPLITS)}
    rows["evaluation"] += _numbered(inputs.held_out, held_out)
    return rows


def with_the_verifiers(
    rows: Mapping[str, list[NumberedRow]], kinds: list[str], params: Params, identity: VerifierIdentity, context: JobContext, tally: Tally, work: Path
) -> DataSet:
    """The data set with the verifier's answers. No input file is read any more: it takes hours, and they may change meanwhile.

    Args:
        kinds: names, by number.
    """
    settings, engine = params.prepare, params.engine
    regeneration = settings.regeneration.model_dump(exclude={"enabled", "samples_per_prompt"})
    plan = {"verifier": identity.digest, "template": identity.chat_template, "engine_dtype": engine.dtype, "regeneration": regeneration}
    config = answering_engine(context.directory, engine, params.verifier.trust_remote_code)
    with Journal(work, plan) as journal:
        verifier = Verifier(journal, config, settings.regeneration)
        try:
            done, extra = from_verifier(rows, settings, context.chat, verifier, context.limits, tally)
        finally:
            verifier.close()
        print(f"{verifier.asked} answers asked, the others from {journal.directory}")

    def write(output: Path) -> None:
        for split in SPLITS:
            write_split(output, split, (sample.token_sample() for sample in done[split].samples))

    report = {split: _summary(done[split], kinds) for split in SPLITS}
    further = {name: count for name, count in sorted(extra.items()) if count}
    return DataSet({"splits": report, "further_answers": further}, report["train"]["supervised_tokens"], write)


def _numbered(source: Source, index: Index) -> list[NumberedRow]:
    rows = (row for batch in chosen_batches(source, index) for _, row in chosen_rows(batch, source.asks))
    return [NumberedRow(row, prompt, kind) for row, prompt, kind in zip(rows, index.prompt.tolist(), index.kind.tolist(), strict=True)]


def _summary(split: AnsweredSplit, kinds: list[str]) -> dict[str, Any]:
    tokens = [sample.tokens for sample in split.samples]
    columns = Columns(
        kind=np.array([row.kind for row in split.rows], dtype=np.int64),
        prompt=np.array([row.prompt for row in split.rows], dtype=np.int64),
        tokens=np.array([len(each.ids) for each in tokens], dtype=np.int64),
        supervised=np.array([each.supervised for each in tokens], dtype=np.int64),
    )
    counts = {
        "truncated_answers": sum(sample.truncated for sample in split.samples),
        "rewritten_turns": sum(each.rewritten for each in tokens),
        "cut_samples": split.cut,
        "shortened_dialogues": split.shortened,
    }
    return split_summary(columns, kinds, counts)
