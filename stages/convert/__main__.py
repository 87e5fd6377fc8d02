"""Write the checkpoint that vLLM reads, with the verifier lock inside.    python -m stages.convert"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stages.artifacts import read_json, read_manifest, sha256_file, staged_directory, write_json, write_manifest
from stages.drafters.algorithms import checkpoint_algorithm, trained_algorithm
from stages.drafters.calibration import CALIBRATION_FILE, read_calibration
from stages.drafters.checkpoint import WEIGHTS
from stages.errors import ArtifactError
from stages.pairing.frozen import load_frozen
from stages.pairing.identity import read_identity
from stages.pairing.lock import LOCK_FILE, build_lock
from stages.pairing.store import verifier_directory
from stages.params import Params
from stages.process import OUTPUTS, stage_main


def portable_name(params: Params) -> str:
    """What a server on another machine can load: a hub id where there is one, else the verifier's short name.

    `vllm serve <checkpoint>` takes this value as model and tokenizer without comparing it with anything.
    """
    if params.convert.verifier_name_or_path:
        return params.convert.verifier_name_or_path
    hub = re.fullmatch(r"hf:([^@]+)@.+", params.verifier.source)
    return hub[1] if hub else params.verifier.name


def everything(drafter: Any) -> dict[str, Any]:
    """All that a drafter is, by name: parameters and frozen tensors, or settings."""
    if not isinstance(drafter, torch.nn.Module):
        return dict(drafter)
    return {**drafter.state_dict(), "draft_ids": drafter.draft_ids, "lm_head": drafter.head, "embedding": drafter.embedding}


def different(a: Any, b: Any) -> list[str]:
    """Names of what is not equal bit for bit between two drafters."""
    left, right = everything(a), everything(b)

    def equal(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, torch.Tensor) else bool(x == y)

    return sorted(left.keys() ^ right.keys()) + sorted(name for name in left.keys() & right.keys() if not equal(left[name], right[name]))


def run(params: Params, output: Path) -> None:
    identity = read_identity()
    trained = OUTPUTS / "train" / "drafter"
    read_manifest(trained, identity.digest)
    directory = verifier_directory(identity)
    architectures: Any = read_json(directory / "config.json").get("architectures") or []
    steps = tqdm(total=3, desc="convert", unit="part")
    frozen = load_frozen(directory, torch.float32)
    algorithm = trained_algorithm(trained)
    drafter = algorithm.load_trained(trained, frozen, torch.float32)
    steps.update()
    dtype = drafter_dtype(trained)
    with staged_directory(output / "checkpoint") as staged:
        config = algorithm.export(staged, drafter, directory, portable_name(params), architectures, dtype)
        steps.update()
        # Read back from the directory alone before anything after this stage can.
        wrong = different(drafter, checkpoint_algorithm(staged).load(staged, frozen, torch.float32))
        if wrong:
            raise ArtifactError(f"{output / 'checkpoint'}: read back differently: {', '.join(wrong)}")
        lock = build_lock(identity, config, sha256_file(staged / WEIGHTS) if (staged / WEIGHTS).is_file() else None)
        if (trained / CALIBRATION_FILE).is_file():
            # Written anew, not copied: what lies in a checkpoint has been read as a calibration.
            write_json(staged / CALIBRATION_FILE, read_calibration(trained).model_dump(mode="json"))
        write_json(staged / LOCK_FILE, lock.model_dump(mode="json"))
        write_manifest(staged, identity.digest)
        steps.update()
    steps.close()


def drafter_dtype(trained: Path) -> torch.dtype:
    """Dtype of the finished weights on disk; that of the read ones where there are none."""
    from safetensors import safe_open

    if not (trained / WEIGHTS).is_file():
        return torch.float32
    with safe_open(trained / WEIGHTS, "pt") as file:
        dtype: torch.dtype = file.get_tensor("norm.weight").dtype
    return dtype


if __name__ == "__main__":
    raise SystemExit(stage_main("convert", run))
