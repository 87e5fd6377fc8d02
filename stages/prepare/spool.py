"""Samples on their way to a split: on disk, because which split they go to is known when the last of them is made."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from stages.dataset import SCHEMA, messages_text
from stages.prepare.build import Sample

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


def packed(samples: Sequence[Sample]) -> bytes:
    """Samples as bytes that a process can hand to another: an Arrow stream of `SCHEMA`, compressed."""
    ends = np.zeros(len(samples) + 1, dtype=np.int32)
    np.cumsum([len(sample.tokens.ids) for sample in samples], out=ends[1:])
    ids = np.concatenate([np.frombuffer(sample.tokens.ids, dtype=np.int32) for sample in samples])
    mask = np.zeros(len(ids), dtype=np.uint8)
    for first, sample in zip(ends.tolist(), samples, strict=False):
        for start, end in sample.tokens.spans:
            mask[first + start : first + end] = 1
    columns = [
        pa.array([sample.id for sample in samples], pa.string()),
        pa.array([sample.kind for sample in samples], pa.string()),
        pa.ListArray.from_arrays(ends, pa.array(ids)),
        pa.ListArray.from_arrays(ends, pa.array(mask)),
        pa.array([sample.tokens.last_prompt for sample in samples], pa.int32()),
        pa.array([sample.turns for sample in samples], pa.int32()),
        pa.array([messages_text(sample.messages) for sample in samples], pa.string()),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=_OPTIONS) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def unpacked(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()


class Spool:
    """Packed batches in a file that has no name and goes with the process."""

    def __init__(self, directory: Path) -> None:
        """Args: directory: on the file system that has room for the data set."""
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  closed by close()
        self._sizes: list[int] = []

    def add(self, data: bytes) -> None:
        self._file.write(data)
        self._sizes.append(len(data))

    def __iter__(self) -> Iterator[pa.Table]:
        """The batches, in the order in which they were added."""
        self._file.seek(0)
        for size in self._sizes:
            yield unpacked(self._file.read(size))

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
