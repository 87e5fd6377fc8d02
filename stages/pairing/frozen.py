"""The verifier's weights that a drafter shares and never trains: embedding, output head, final norm.

Read straight from the safetensors files: building the whole verifier to take three tensors out of it would need its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stages.errors import ArtifactError
from stages.pairing.weights import json_object, safetensors_header, weight_files

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
OFFSET_NORMS = ("gemma", "gemma2", "gemma3", "gemma3_text")
"""Models that multiply by 1 + weight."""
SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True)
class FrozenVerifier:
    """Ends of the verifier.

    Attributes:
        embedding: `[V, H]`.
        lm_head: `[V, H]`; the same tensor as `embedding` where the model ties them.
        norm_weight: `[H]` scale of the final RMSNorm, as a plain factor (Gemma's stored offset is added).
        norm_eps: its epsilon.
    """

    embedding: Tensor
    lm_head: Tensor
    norm_weight: Tensor
    norm_eps: float


def load_frozen(directory: Path, dtype: torch.dtype) -> FrozenVerifier:
    """Read the ends of the verifier in `directory`.

    Raises:
        ArtifactError: a tensor is missing or quantised, or the model's output is not RMSNorm and a linear head.
    """
    config = json_object(directory / "config.json")
    where = {name: file for file in weight_files(directory) for name in safetensors_header(file)}
    embedding_name = _find(where, EMBEDDING, directory)
    prefix = embedding_name.removesuffix(EMBEDDING)
    norm_name = prefix + "norm.weight"
    if norm_name not in where or prefix + "norm.bias" in where:
        raise ArtifactError(f"{directory}: {norm_name}: not there as a final RMSNorm; models that end otherwise are not supported")
    scaled = [name for name in SCALED_LOGITS if _value(config, name) not in (None, 1, 1.0)]
    if scaled:
        raise ArtifactError(f"{directory / 'config.json'}: {scaled[0]} = {_value(config, scaled[0])}: models that rescale their logits are not supported")
    embedding = _read(where, embedding_name, dtype)
    # A tied model may store a head nevertheless; engines do not read it.
    tied = _value(config, "tie_word_embeddings")
    untied = not tied and any(name.endswith(HEAD) for name in where)
    if tied is False and not untied:
        raise ArtifactError(f"{directory}: {HEAD} is missing and config.json says tie_word_embeddings = false")
    head = _read(where, _find(where, HEAD, directory), dtype) if untied else embedding
    norm = _read(where, norm_name, torch.float32)
    if config.get("model_type") in OFFSET_NORMS:
        norm = norm + 1.0
    return FrozenVerifier(embedding, head, norm.to(dtype), float(_value(config, "rms_norm_eps") or _value(config, "norm_eps") or 1e-6))


def _value(config: dict[str, Any], name: str) -> Any:
    text = config.get("text_config") or {}
    return config[name] if config.get(name) is not None else text.get(name)


def _find(where: dict[str, Path], suffix: str, directory: Path) -> str:
    found = [name for name in where if name == suffix or name.endswith("." + suffix)]
    if len(found) != 1:
        raise ArtifactError(f"{directory}: {len(found)} tensors are called {suffix}: {', '.join(found) or 'expected one'}")
    return found[0]


def _read(where: dict[str, Path], name: str, dtype: torch.dtype) -> Tensor:
    with safe_open(where[name], "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    if not tensor.is_floating_point():
        raise ArtifactError(f"{where[name]}: {name} is quantised ({tensor.dtype}); embedding, head and final norm must be floating point")
    return tensor.to(dtype)
