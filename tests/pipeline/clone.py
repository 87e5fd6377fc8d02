"""A clone of this repository with a tiny verifier, small enough to run the whole graph in a minute or two."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.artifacts import sha256_file
from tests.paths import REPOSITORY
from tests.tiny import MASK_TOKEN_ID

KINDS = ("code", "dialogue", "fact", "math", "story")
TURNS = dict.fromkeys(KINDS, 1) | {"dialogue": 2}
PROMPTS_PER_KIND = 8
WORDS = ("river", "house", "children", "function", "numbers", "France", "water", "moon", "apples", "soup", "forest", "evening", "engine")

SMALL: dict[str, dict[str, Any]] = {
    "verifier": {"name": "tiny", "source": "models/tiny", "quantization": "as-is", "trust_remote_code": False},
    "engine": {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "kv_cache_bytes": 1 << 27},
    "prepare": {
        "inputs": ["data/prompts/*.jsonl"],
        "max_seq_len": 160,
        "validation_fraction": 0.15,
        "evaluation_fraction": 0.3,
        "regeneration": {"max_tokens": 32},
    },
    "extraction": {"mode": "offline", "layer_ids": [2, 4, 6], "dtype": "float32", "samples_per_shard": 4, "disk_reserve_bytes": 0},
    "drafter": {"algorithm": "dspark", "block_size": 5, "num_layers": 1, "draft_vocab_size": 256, "mask_token_id": MASK_TOKEN_ID, "markov_rank": 16},
    "train": {"steps": 40, "sequences_per_step": 2, "anchors_per_sequence": 8, "learning_rate": 1.0e-3, "checkpoint_every": 5, "threads": 1},
    "convert": {},
    "gate": {"prompts_per_kind": 1, "max_tokens": 16, "parity_rounds": 16},
    "evaluate": {"prompts_per_kind": 1, "max_tokens": 16, "repeats": 1, "speed_prompts": 1},
    "mlflow": {},
    "deploy": {"max_num_seqs": 8},
}


@dataclass(frozen=True)
class Reproduction:
    """One `dvc repro`: its exit status, what it printed, and its cost."""

    status: int
    output: str
    cpu_seconds: float

    @property
    def ran(self) -> list[str]:
        """Stages whose command was started, in order."""
        return re.findall(r"^Running stage '(\w+)'", self.output, re.MULTILINE)


class Clone:
    """A working copy with its own git, DVC cache and registry."""

    def __init__(self, root: Path, verifier: Path) -> None:
        self.root = root
        listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (REPOSITORY / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, root / name)
        shutil.rmtree(root / "data" / "prompts")
        for number, kind in enumerate(KINDS):
            lines = [
                json.dumps({"id": f"{kind}-{index}", "kind": kind, "turns": [f"Explain {WORDS[index]} and {WORDS[index + number + 1]}."] * TURNS[kind]})
                for index in range(PROMPTS_PER_KIND)
            ]
            (root / "data" / "prompts").mkdir(exist_ok=True)
            (root / "data" / "prompts" / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        shutil.copytree(verifier, root / "models" / "tiny")
        self.write_params(SMALL)
        for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "clone"]):
            subprocess.run(["git", *command], cwd=root, check=True, capture_output=True)

    def write_params(self, data: dict[str, Any]) -> None:
        with (self.root / "params.yaml").open("w", encoding="utf-8") as stream:
            YAML(typ="safe", pure=True).dump(data, stream)

    def set(self, section: str, **values: Any) -> None:
        """Change some values of params.yaml."""
        data = YAML(typ="safe", pure=True).load((self.root / "params.yaml").read_text(encoding="utf-8"))
        data[section] = data.get(section, {}) | values
        self.write_params(data)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "MLFLOW_"))},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": str(self.root),
            "DVC_NO_ANALYTICS": "1",
        }

    def repro(self, *targets: str) -> Reproduction:
        """Run `dvc repro` to its end."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = ["dvc", "--cd", str(self.root), "repro", *targets]
        done = subprocess.run(command, cwd=self.root, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return Reproduction(done.returncode, done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    def kill_repro(self, when: Callable[[str], bool], *targets: str, seconds: float = 600.0) -> str:
        """Start `dvc repro` and `kill -9` it (it alone) as soon as `when(what it has printed)` holds; returns what it printed."""
        log = self.root / "killed.log"
        command = ["dvc", "--cd", str(self.root), "repro", *targets]
        with log.open("wb") as stream:
            process = subprocess.Popen(command, cwd=self.root, env=self.environment, stdout=stream, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + seconds
        try:
            while not when(text := log.read_text(encoding="utf-8", errors="replace")):
                assert process.poll() is None, f"ended before it could be killed:\n{text}"
                assert time.monotonic() < deadline, f"not reached in {seconds:.0f} s:\n{text}"
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        return log.read_text(encoding="utf-8", errors="replace")

    def exists(self, pattern: str) -> bool:
        return any(self.root.glob(pattern))

    def git_status(self) -> list[str]:
        """What git sees as changed, without the params that `set` writes."""
        done = subprocess.run(["git", "status", "--porcelain", "-unormal"], cwd=self.root, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if not line.endswith((" params.yaml", " killed.log"))]

    def digests(self, *paths: str) -> dict[str, str]:
        """sha256 of every file below the named outputs."""
        files = [file for path in paths for file in ([self.root / path] if (self.root / path).is_file() else sorted((self.root / path).rglob("*")))]
        return {file.relative_to(self.root).as_posix(): sha256_file(file) for file in files if file.is_file()}
