"""Drafter checkpoints as far as a lock looks at them: real config.json, weights that nobody loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from stages.artifacts import sha256_file, write_json, write_manifest
from stages.drafters.config import DrafterConfig
from stages.pairing.identity import VerifierIdentity
from stages.pairing.lock import LOCK_FILE, build_lock


def drafter_config(**changes: Any) -> dict[str, Any]:
    """The speculators config.json of a drafter for the tiny verifier."""
    config = DrafterConfig(
        algorithm="dspark",
        block_size=8,
        num_layers=1,
        sample_from_anchor=False,
        vocab_size=512,
        draft_vocab_size=256,
        mask_token_id=3,
        markov_rank=8,
        markov_head_type="vanilla",
        confidence_head=True,
        confidence_head_with_markov=True,
        layer_ids=[1, 3, 5],
        hidden_size=64,
        intermediate_size=128,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return config.model_copy(update=changes).to_speculators("tiny", ["LlamaForCausalLM"])


def write_checkpoint(directory: Path, identity: VerifierIdentity) -> Path:
    """A checkpoint with its lock and manifest, as the convert stage leaves it."""
    directory.mkdir(parents=True)
    config = drafter_config()
    write_json(directory / "config.json", config)
    save_file({"fc.weight": np.zeros((64, 3 * 64), np.float32)}, directory / "model.safetensors")
    lock = build_lock(identity, config, sha256_file(directory / "model.safetensors"))
    write_json(directory / LOCK_FILE, lock.model_dump(mode="json"))
    write_manifest(directory, identity.digest)
    return directory
