"""Small drafter shapes for tests, fitting `tests.tiny.make_verifier`'s default."""

from __future__ import annotations

from typing import Any

import torch

from stages.drafters.config import DrafterConfig
from stages.drafters.model import Drafter
from stages.pairing.frozen import FrozenVerifier


def frozen(vocab: int = 96, hidden: int = 64, seed: int = 0) -> FrozenVerifier:
    g = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocab, hidden, generator=g).bfloat16().float()
    return FrozenVerifier(embedding, embedding, torch.ones(hidden), 1e-5)


def config(vocab: int = 96, hidden: int = 64, **changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "algorithm": "dspark",
        "block_size": 5,
        "num_layers": 2,
        "sample_from_anchor": False,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "mask_token_id": 3,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "confidence_head": True,
        "confidence_head_with_markov": True,
        "layer_ids": [1, 3, 5],
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return DrafterConfig.model_validate(values | changes)


def drafter(shape: DrafterConfig, seed: int = 0, ends: FrozenVerifier | None = None) -> Drafter:
    """A random drafter whose weights are representable in bf16; a reduced vocabulary takes every other id or so."""
    torch.manual_seed(seed)
    ids = None
    if shape.reduced_vocabulary:
        ids = torch.sort(torch.randperm(shape.vocab_size)[: shape.draft_vocab_size]).values
    model = Drafter(shape, ends or frozen(shape.vocab_size, shape.hidden_size), ids).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the initial values, so that a tensor left out or swapped changes the logits.
            parameter.add_(torch.randn_like(parameter) * 0.1).copy_(parameter.bfloat16())
    return model


KINDS: list[dict[str, Any]] = [
    {},
    {"sample_from_anchor": True},
    {"markov_head_type": "gated"},
    {"markov_head_type": "rnn"},
    {"confidence_head_with_markov": False},
    {"confidence_head": False},
    {"draft_vocab_size": 40},
    {"layer_ids": [2]},
    {"layer_ids": [1, 2, 3, 4, 5]},
    {"algorithm": "dflash", "markov_rank": 0, "confidence_head": False, "confidence_head_with_markov": False},
    {"algorithm": "dspark", "markov_rank": 0, "confidence_head": False, "confidence_head_with_markov": False},
]
"""Every switch of a drafter at least once."""


def name_of(changes: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in changes.items()) or "default"
