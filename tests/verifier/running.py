"""Run the verifier and lock stages in a throw-away working folder."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import cast

from ruamel.yaml import YAML

from stages.pairing.identity import VerifierIdentity, read_identity
from stages.params import Params, StageParams, read_params
from stages.process import OUTPUTS
from stages.verifier.__main__ import run
from tests.paths import REPOSITORY


def write_params(folder: Path, **verifier: object) -> None:
    """The repository's params.yaml with other values in its verifier section."""
    params = YAML(typ="safe").load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
    params["verifier"] = {"name": "tiny", **verifier}
    with (folder / "params.yaml").open("w", encoding="utf-8") as stream:
        YAML().dump(params, stream)


def command(stage: str) -> list[str]:
    return [sys.executable, "-m", f"stages.{stage}"]


def run_stage(folder: Path, stage: str = "verifier", **environment: str) -> subprocess.CompletedProcess[str]:
    """One stage as a process, the way DVC starts it."""
    return subprocess.run(command(stage), cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False)


def identity_after(folder: Path, **verifier: object) -> VerifierIdentity:
    """Write params, run the verifier stage (in this process: its imports are the slow part), read what it wrote."""
    write_params(folder, **verifier)
    with chdir(folder):
        run(cast(Params, StageParams(read_params(), "verifier")), OUTPUTS / "verifier")
        return read_identity()
