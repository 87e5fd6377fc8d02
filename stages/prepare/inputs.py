"""Which input files there are, and what is in them.    python -m stages.prepare.inputs

Input files may lie anywhere, by glob, so `dvc.yaml` cannot list them. This stage runs on every `dvc repro` and writes
their digests; `prepare` depends on what it writes, so that one edited byte makes it run again. Digests are
remembered by file signature: files that nobody wrote to are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.artifacts import write_json
from stages.pairing.signatures import DigestCache, signature
from stages.params import Params
from stages.params import Prepare as Settings
from stages.prepare.lines import PrepareError, input_files
from stages.process import stage_main

NAME = "inputs"

Fingerprint = dict[str, list[dict[str, Any]]]
"""Per params field its files in order: path, size in bytes, sha256."""


def _signature(path: Path) -> str | None:
    try:
        return signature(path)
    except FileNotFoundError:
        return None


def _refuse_changed(before: dict[Path, str | None]) -> None:
    for path, old in before.items():
        if (now := _signature(path)) is None:
            raise PrepareError(f"{path}: was removed while prepare was reading it; put it back and run again")
        if now != old:
            raise PrepareError(f"{path}: changed while prepare was reading it; run again when nothing writes to it")


@contextmanager
def unchanged(files: Sequence[Path]) -> Iterator[None]:
    """Around whatever reads input files: if one of them changes meanwhile, the error says so, and what was read is void.

    Files are read several times. Otherwise a pass would blame what it trips over: an empty file, a line, a count.

    Raises:
        PrepareError: a file changed or vanished; in place of the block's own error, if it has one.
    """
    before = {path: _signature(path) for path in files}
    try:
        yield
    except Exception:
        _refuse_changed(before)
        raise
    _refuse_changed(before)


def fingerprint(settings: Settings, cache: Path | None = None) -> Fingerprint:
    """Digest every input file.

    Raises:
        PrepareError: a pattern that matches no file, named with its field; a file that changed meanwhile.
    """
    digests = DigestCache(cache)
    out: Fingerprint = {}
    named = (("inputs", settings.inputs), ("evaluation_inputs", settings.evaluation_inputs))
    files = {name: input_files(patterns, f"prepare.{name}") for name, patterns in named}
    with unchanged([path for found in files.values() for path in found]):
        for name, found in files.items():
            sums = digests.digests([(path, "raw") for path in found])
            out[name] = [{"path": path.as_posix(), "bytes": path.stat().st_size, "sha256": digest} for path, digest in zip(found, sums, strict=True)]
    return out


def run(params: Params, output: Path) -> None:
    write_json(output / "files.json", fingerprint(params.prepare, output / "work" / "digests.json"))


if __name__ == "__main__":
    raise SystemExit(stage_main(NAME, run))
