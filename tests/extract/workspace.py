"""A folder in which `python -m stages.extract` runs: a tiny verifier, prepared splits, params."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.artifacts import write_json
from stages.dataset import TokenSample, write_split
from stages.pairing.identity import VerifierIdentity, compute_identity
from stages.params import read_params
from tests.paths import REPOSITORY


def make_workspace(folder: Path, verifier: Path, train: int, validation: int = 4, **extraction: Any) -> VerifierIdentity:
    """Fill `folder`; `extraction` are params of that section (default: layers 2 and 4, fp32)."""
    identity = compute_identity(verifier)
    write_json(folder / "outputs" / "verifier" / "identity.json", identity.model_dump(mode="json"))
    models = folder / "outputs" / "verifier" / "models"
    models.mkdir(parents=True)
    (models / identity.digest[:16]).symlink_to(verifier)
    draw = random.Random(3)
    for split, count in (("train", train), ("validation", validation)):
        write_split(folder / "outputs" / "prepare", split, [token_sample(f"{split}-{index}", draw) for index in range(count)])
    write_params(folder, **extraction)
    return identity


def token_sample(name: str, draw: random.Random) -> TokenSample:
    tokens = [draw.randrange(4, 400) for _ in range(draw.randrange(1, 90))]
    return TokenSample(name, "story", tokens, [1] * len(tokens), 1, 1, [])


def write_params(folder: Path, **extraction: Any) -> None:
    params = read_params(REPOSITORY / "params.yaml").model_dump()
    params["engine"] |= {"max_model_len": 256, "kv_cache_bytes": 1 << 26}
    params["prepare"]["max_seq_len"] = 128
    params["extraction"] |= {"layer_ids": [2, 4], "dtype": "float32", "disk_reserve_bytes": 0} | extraction
    with (folder / "params.yaml").open("w", encoding="utf-8") as stream:
        YAML().dump(json.loads(json.dumps(params)), stream)


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stages.extract"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def extract(folder: Path, seconds: float = 240) -> tuple[int, str]:
    """Run the stage to its end: exit status, and what it printed."""
    process = start(folder)
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, output


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]
