"""Weights in and out: the trainer's own directory and the speculators checkpoint that vLLM reads.

Both hold the trained tensors under the same names. The speculators checkpoint of a reduced vocabulary adds
`lm_head.weight` `[D, H]` (rows of the verifier's), `d2t` `[D]` (offsets: target id = draft id + d2t[draft id])
and `t2d` `[V]` (bool).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.artifacts import atomic_path, read_json, write_json
from stages.drafters.config import ARCHITECTURES, DrafterConfig
from stages.drafters.eagle3 import Eagle3, Eagle3Config
from stages.drafters.model import Drafter
from stages.errors import ArtifactError
from stages.pairing.frozen import FrozenVerifier

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
Speculator = Drafter | Eagle3
"""A drafter that a speculators checkpoint holds."""

VOCABULARY = ("lm_head.weight", "d2t", "t2d", "embed_tokens.weight")


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, final or absent."""
    with atomic_path(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}, temporary, metadata={"format": "pt"})


def save_trained(directory: Path, drafter: Speculator, dtype: torch.dtype) -> None:
    """Write a finished drafter for the stages after `train`: `config.json` and weights in `dtype`, with `draft_ids`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(dtype) for name, tensor in drafter.state_dict().items()}
    if drafter.config.reduced_vocabulary:
        tensors["draft_ids"] = drafter.draft_ids
    save_tensors(directory / WEIGHTS, tensors)
    write_json(directory / CONFIG, drafter.config.model_dump())


def load_trained(directory: Path, frozen: FrozenVerifier, dtype: torch.dtype) -> Speculator:
    """Read what `save_trained` wrote; parameters are cast to `dtype`."""
    content = read_json(directory / CONFIG)
    config = (Eagle3Config if content.get("algorithm") == "eagle3" else DrafterConfig).model_validate(content)
    tensors = load_file(directory / WEIGHTS)
    return _build(config, frozen, tensors, tensors.pop("draft_ids", None), None, dtype)


def _build(
    config: DrafterConfig | Eagle3Config, frozen: FrozenVerifier, tensors: dict[str, Tensor], draft_ids: Tensor | None, head: Tensor | None, dtype: torch.dtype
) -> Speculator:
    drafter = Eagle3(config, frozen, draft_ids) if isinstance(config, Eagle3Config) else Drafter(config, frozen, draft_ids)
    drafter.load_state_dict(tensors)
    if head is not None:
        drafter.head = head
    # The frozen ends follow, so that every product of a forward has one dtype.
    return drafter.to(dtype).eval()


def as_narrow_as_exact(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows` in `dtype` where that loses nothing."""
    narrow = rows.to(dtype)
    return narrow if torch.equal(narrow.to(rows.dtype), rows) else rows


def save_checkpoint(directory: Path, drafter: Speculator, verifier_name: str, verifier_architectures: list[str], dtype: torch.dtype) -> dict[str, Any]:
    """Write a speculators checkpoint (contract: shared facts of format 0.9); returns its `config.json`.

    Args:
        drafter: with fp32 frozen ends, so that the head's rows are written without loss.
        dtype: of the trained weights; values must already be representable in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = drafter.config
    tensors = {name: tensor.to(dtype) for name, tensor in drafter.state_dict().items()}
    if config.reduced_vocabulary:
        ids = drafter.draft_ids
        tensors["lm_head.weight"] = as_narrow_as_exact(drafter.head, dtype)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_tensors(directory / WEIGHTS, tensors)
    exported = config.to_speculators(verifier_name, verifier_architectures)
    write_json(directory / CONFIG, exported)
    return exported


def read_drafter_config(directory: Path) -> DrafterConfig | Eagle3Config:
    """The configuration of a speculators checkpoint, from its `config.json`.

    Raises:
        ArtifactError: a key is missing, or the drafter is of a kind we do not build.
    """
    path = directory / CONFIG
    content = read_json(path)
    kind = content.get("speculators_model_type")
    if kind not in (*ARCHITECTURES, "eagle3"):
        raise ArtifactError(f"{path}: speculators_model_type = {kind!r}; supported: {', '.join(ARCHITECTURES)}, eagle3")
    return Eagle3Config.from_speculators(content, str(path)) if kind == "eagle3" else DrafterConfig.from_speculators(content, str(path))


def load_drafter(directory: Path, frozen: FrozenVerifier, dtype: torch.dtype) -> Speculator:
    """Build a drafter from a speculators directory and the verifier's frozen ends alone.

    Raises:
        ArtifactError: a tensor is missing, unexpected or of another shape than the configuration says.
    """
    config = read_drafter_config(directory)
    path = directory / WEIGHTS
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file")
    tensors = load_file(path)
    d2t, head = tensors.pop("d2t", None), tensors.pop("lm_head.weight", None)
    for name in VOCABULARY:
        tensors.pop(name, None)
    draft_ids = None
    if config.reduced_vocabulary:
        if d2t is None or head is None:
            raise ArtifactError(f"{path}: a vocabulary of {config.draft_vocab_size} of {config.vocab_size} needs lm_head.weight and d2t")
        draft_ids = d2t + torch.arange(len(d2t))
    try:
        return _build(config, frozen, tensors, draft_ids, head if config.reduced_vocabulary else None, dtype)
    except RuntimeError as error:
        raise ArtifactError(f"{path}: does not fit {directory / CONFIG}: {' '.join(str(error).split())}") from None


def tensor_names(directory: Path) -> list[str]:
    """Names of the tensors in a checkpoint, without reading them."""
    with safe_open(directory / WEIGHTS, "pt") as file:
        return sorted(file.keys())
