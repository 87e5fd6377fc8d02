"""A tiny verifier and a drafter that really predicts part of its output, without any training.

The verifier's layers are turned down, so that its next token mostly follows from its last one; the drafter's Markov head is
planted with exactly that map, its backbone is random and speaks softly. Many drafts are accepted, many are not.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stages.artifacts import read_json, sha256_file, write_json, write_manifest
from stages.dataset import TokenSample, write_split
from stages.drafters.checkpoint import save_checkpoint
from stages.drafters.config import DrafterConfig
from stages.drafters.model import Drafter
from stages.pairing.frozen import load_frozen
from stages.pairing.identity import VerifierIdentity, compute_identity
from stages.pairing.lock import LOCK_FILE, build_lock
from stages.pairing.store import publish_link
from tests.tiny import EOS_TOKEN_ID, HEAD_SIZE, MASK_TOKEN_ID, make_verifier

KINDS = ("code", "dialogue", "fact", "math", "story")


def make_bigram_verifier(directory: Path, strength: float = 0.015) -> Path:
    """A verifier of `tests.tiny` whose layers add only `strength` of what they would."""
    make_verifier(directory, tied=False)
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= strength
    # An end of turn now and then, but not before a block or two.
    weights["lm_head.weight"][EOS_TOKEN_ID] *= 0.8
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def make_chatting_verifier(directory: Path) -> Path:
    """A bigram verifier that never answers with the mask token, so that its own words can be trained on: its head's row for it is zero."""
    path = make_bigram_verifier(directory) / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][MASK_TOKEN_ID] = 0.0
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def write_drafter(checkpoint: Path, verifier: Path, identity: VerifierIdentity, block_size: int = 5) -> DrafterConfig:
    """A speculators checkpoint with lock and manifest, as convert writes it, whose Markov head holds the verifier's bigrams."""
    frozen = load_frozen(verifier, torch.float32)
    config = read_json(verifier / "config.json")
    hidden: int = config["hidden_size"]
    shape = DrafterConfig(
        algorithm="dspark",
        block_size=block_size,
        num_layers=1,
        sample_from_anchor=False,
        vocab_size=len(frozen.embedding),
        draft_vocab_size=len(frozen.embedding),
        mask_token_id=MASK_TOKEN_ID,
        markov_rank=hidden,
        markov_head_type="vanilla",
        confidence_head=True,
        confidence_head_with_markov=True,
        layer_ids=[2, 4],
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_heads=2,
        num_kv_heads=1,
        head_dim=HEAD_SIZE,
        rms_norm_eps=frozen.norm_eps,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        drafter = Drafter(shape, frozen)
        assert drafter.markov_head is not None
        norm = torch.nn.functional.rms_norm(frozen.embedding, (hidden,), frozen.norm_weight, frozen.norm_eps)
        drafter.markov_head.markov_w1.weight.copy_(norm)
        drafter.markov_head.markov_w2.weight.copy_(frozen.lm_head)
        drafter.norm.weight.fill_(0.3)
    exported = save_checkpoint(checkpoint, drafter, "tiny", config["architectures"], torch.float32)
    lock = build_lock(identity, exported, sha256_file(checkpoint / "model.safetensors"))
    write_json(checkpoint / LOCK_FILE, lock.model_dump(mode="json"))
    write_manifest(checkpoint, identity.digest)
    return shape


def write_samples(prepared: Path, per_kind: int = 2, seed: int = 0) -> list[TokenSample]:
    """Random conversations of all five kinds as the evaluation split; the dialogues have two turns."""
    generator = random.Random(seed)
    samples = []
    for kind in KINDS:
        for index in range(per_kind):
            ids = [generator.randrange(4, 500) for _ in range(generator.randrange(20, 40))]
            prompt = len(ids) - 8
            samples.append(TokenSample(f"{kind}-{index}", kind, ids, [0] * prompt + [1] * 8, prompt, 2 if kind == "dialogue" else 1, []))
    write_split(prepared, "evaluation", samples)
    return samples


def write_outputs(root: Path, verifier: Path) -> VerifierIdentity:
    """All that gate and evaluate read, below `root/outputs`; the current directory must be `root`."""
    outputs = root / "outputs"
    identity = compute_identity(verifier)
    write_json(outputs / "verifier" / "identity.json", json.loads(identity.model_dump_json()))
    publish_link(verifier, identity)
    write_drafter(outputs / "convert" / "checkpoint", verifier, identity)
    write_samples(outputs / "prepare")
    write_json(outputs / "lock" / "report.json", {"verdict": "match", "checked": [], "verifier": identity.digest})
    return identity
