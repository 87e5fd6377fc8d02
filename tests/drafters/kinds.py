"""Drafters of the other algorithms, fitting `tests.tiny.make_verifier`'s default, with locks as convert writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stages.artifacts import read_json, sha256_file, write_json, write_manifest
from stages.drafters.algorithms import ALGORITHMS, Target
from stages.pairing.frozen import load_frozen
from stages.pairing.identity import VerifierIdentity, compute_identity
from stages.pairing.lock import LOCK_FILE, build_lock
from stages.params import Drafter as DrafterParams

PARAMS: dict[str, dict[str, Any]] = {
    "eagle3": {"num_layers": 1, "draft_tokens": 4},
    "draft_model": {"num_layers": 2, "draft_tokens": 4},
    "ngram": {"draft_tokens": 4, "ngram_min": 1, "ngram_max": 3},
}


def drafter_params(algorithm: str, **changes: Any) -> DrafterParams:
    """A `drafter` section of params.yaml."""
    heads = {"markov_rank": 0, "confidence_head": False}
    return DrafterParams.model_validate({"algorithm": algorithm, "mask_token_id": 3, "dtype": "float32", **heads, **PARAMS[algorithm], **changes})


def target(verifier: Path, layer_ids: list[int], identity: VerifierIdentity | None = None) -> Target:
    return Target(identity or compute_identity(verifier), verifier, read_json(verifier / "config.json"), layer_ids)


@torch.no_grad()
def make_drafter(algorithm: str, verifier: Path, layer_ids: list[int] | None = None, draft_ids: torch.Tensor | None = None, **changes: Any) -> Any:
    """A drafter for `verifier`; EAGLE-3's with random weights that are all large enough to matter."""
    if draft_ids is not None:
        changes["draft_vocab_size"] = len(draft_ids)
    kind, to = ALGORITHMS[algorithm], target(verifier, layer_ids or [1, 3, 5])
    config = kind.configure(drafter_params(algorithm, **changes), to)
    if kind.create is None:
        return config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drafter = kind.create(config, load_frozen(verifier, torch.float32), draft_ids, to)
        if algorithm == "eagle3":
            for weight in drafter.parameters():
                if weight.dim() == 2:
                    weight.normal_(0.0, weight.shape[1] ** -0.5)
                else:
                    weight.uniform_(0.2, 2.0)
    return drafter.eval()


def write_checkpoint(checkpoint: Path, algorithm: str, verifier: Path, drafter: Any = None, **changes: Any) -> Path:
    """The checkpoint of `drafter` (or of `make_drafter`) with lock and manifest, as convert writes it."""
    drafter = drafter if drafter is not None else make_drafter(algorithm, verifier, **changes)
    exported = ALGORITHMS[algorithm].export(checkpoint, drafter, verifier, "tiny", ["LlamaForCausalLM"], torch.float32)
    weights = checkpoint / "model.safetensors"
    identity = compute_identity(verifier)
    lock = build_lock(identity, exported, sha256_file(weights) if weights.is_file() else None)
    write_json(checkpoint / LOCK_FILE, lock.model_dump(mode="json"))
    write_manifest(checkpoint, identity.digest)
    return checkpoint
