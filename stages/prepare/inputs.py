"""Which input files there are, and what is in them.    python -m stages.prepare.inputs

Input files may lie anywhere, by glob, so `dvc.yaml` cannot list them. This stage runs on every `dvc repro` and writes
their digests; `prepare` depends on what it writes, so that one edited byte makes it run again. Digests are
remembered by file signature: files that nobody wrote to are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.artifacts import write_json
from stages.pairing.signatures import DigestCache
from stages.params import Params
from stages.params import Prepare as Settings
from stages.prepare.lines import input_files
from stages.process import stage_main

NAME = "inputs"

Fingerprint = dict[str, list[dict[str, Any]]]
"""Per params field its files in order: path, size in bytes, sha256."""


def fingerprint(settings: Settings, cache: Path | None = None) -> Fingerprint:
    """Digest every input file.

    Raises:
        PrepareError: a pattern that matches no file, named with its field.
    """
    digests = DigestCache(cache)
    out: Fingerprint = {}
    for name, patterns in (("inputs", settings.inputs), ("evaluation_inputs", settings.evaluation_inputs)):
        files = input_files(patterns, f"prepare.{name}")
        found = digests.digests([(path, "raw") for path in files])
        out[name] = [{"path": path.as_posix(), "bytes": path.stat().st_size, "sha256": digest} for path, digest in zip(files, found, strict=True)]
    return out


def run(params: Params, output: Path) -> None:
    write_json(output / "files.json", fingerprint(params.prepare, output / "work" / "digests.json"))


if __name__ == "__main__":
    raise SystemExit(stage_main(NAME, run))
