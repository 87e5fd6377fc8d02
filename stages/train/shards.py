"""Tensors that FSDP2 has divided among ranks, and whole ones; without FSDP2 all are whole."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank. Collective: all ranks must ask, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divided_like(tensor: Tensor, model: Tensor) -> Tensor:
    """A whole tensor, the same on all ranks, divided as `model` is; nothing is sent."""
    if not isinstance(model, DTensor):
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None)
