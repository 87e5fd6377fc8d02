"""JSONL files to lines: which files, which lines, some lines at a time.

Files are read from their beginning each time something is wanted of them, never held: their size costs no memory.
"""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stages.errors import DraftlineError

BOM = b"\xef\xbb\xbf"
BATCH_LINES = 256
BATCH_BYTES = 1 << 20


class PrepareError(DraftlineError):
    """The chats cannot become a data set; the message names the file and the line, or counts the reasons."""


@dataclass
class Batch:
    """Some lines of one file, blank ones left out.

    Attributes:
        path: the file.
        file: its position among the files that are read together.
        numbers: line numbers in the file, from 1.
        positions: positions among all lines, not blank, of the files that are read together, from 0.
        lines: without white space at the ends.
        renamed: positions of lines whose row gets another id (see `index`).
    """

    path: Path
    file: int
    numbers: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    renamed: frozenset[int] = frozenset()


def input_files(patterns: Iterable[str], field_name: str = "prepare.inputs") -> list[Path]:
    """Files that the patterns match, each once, in the order of the patterns and of their names.

    Raises:
        PrepareError: a pattern that matches no file, or a directory alone.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        named = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        matches = [path for path in named if path.is_file()]
        if not matches and any(path.is_dir() for path in named):
            files = f"{pattern.rstrip('/')}/*.jsonl"
            raise PrepareError(f"{field_name}: {pattern!r} is a directory; the files in it are {files!r}")
        if not matches:
            raise PrepareError(f"{field_name}: {pattern!r} matches no file (paths are relative to the repository)")
        for path in matches:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _lines(path: Path) -> Iterator[bytes]:
    # Binary files break at \n alone: U+2028, U+0085 and \r inside a JSON string do not split a row.
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            yield from stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PrepareError(f"{path}: not a complete gzip file: {error}") from None


def batches(files: list[Path], chosen: NDArray[np.bool_] | None = None, renamed: frozenset[int] = frozenset()) -> Iterator[Batch]:
    """All lines of all files in order; with `chosen` those alone at whose position it is true.

    Args:
        renamed: positions, see `Batch`.

    Raises:
        PrepareError: an empty file, a torn gzip file, a file with more lines than `chosen` knows of.
    """
    position = 0
    for file, path in enumerate(files):
        first, size = position, 0
        batch = Batch(path, file)
        for number, raw in enumerate(_lines(path), start=1):
            line = raw.removeprefix(BOM).strip()
            if not line:
                continue
            if chosen is not None and position >= len(chosen):
                raise PrepareError(f"{path}: changed while it was being read; run again when nothing writes to it")
            if chosen is None or chosen[position]:
                batch.numbers.append(number)
                batch.positions.append(position)
                batch.lines.append(line)
                size += len(line)
            position += 1
            if len(batch.lines) == BATCH_LINES or size >= BATCH_BYTES:
                yield _with_renamed(batch, renamed)
                batch, size = Batch(path, file), 0
        if position == first:
            raise PrepareError(f"{path}: empty file; remove it from prepare.inputs (or prepare.evaluation_inputs), or fill it")
        if batch.lines:
            yield _with_renamed(batch, renamed)


def _with_renamed(batch: Batch, renamed: frozenset[int]) -> Batch:
    batch.renamed = renamed.intersection(batch.positions) if renamed else renamed
    return batch
