"""Versions as the registry gives them, made up."""

from __future__ import annotations

from typing import Any

from flows.registry import DrafterVersion, VerifierVersion
from stages.pairing.identity import VerifierIdentity


def identity(**changed: Any) -> VerifierIdentity:
    fields: dict[str, Any] = {
        "architecture": {"hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 512},
        "quantization": {"method": "none"},
        "tokenizer": {"tokenizer.json": "t" * 64},
        "chat_template": "c" * 64,
        "generation": {"eos_token_ids": [2]},
        "weights": "w" * 64,
    }
    return VerifierIdentity(**(fields | changed))


def serving(**changed: Any) -> VerifierVersion:
    """A verifier whose digest is all a's."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "version": 1,
        "digest": "a" * 64,
        "source": "models/tiny",
        "quantization": "as-is",
        "identity": identity(),
    }
    return VerifierVersion(**(fields | changed))


def drafter(**changed: Any) -> DrafterVersion:
    """A drafter that fits it."""
    fields: dict[str, Any] = {
        "name": "drafter.tiny",
        "version": 1,
        "content": "d" * 64,
        "verifier": "a" * 64,
        "gate": "pass",
        "acceptance_length": 1.5,
        "aliases": (),
    }
    return DrafterVersion(**(fields | changed))
