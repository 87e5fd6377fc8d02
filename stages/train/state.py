"""Checkpoints of an unfinished training: everything that the next step depends on, final or absent.

They hold whole tensors, however many ranks the training has: it goes on with another number of them, or divided in another way.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from stages.artifacts import atomic_path
from stages.train.shards import divided_like, whole

KEEP = 2
NAME = re.compile(r"step-(\d{8})\.pt")


def _checkpoints(directory: Path) -> list[tuple[int, Path]]:
    found = [(int(match[1]), path) for path in directory.glob("step-*.pt") if (match := NAME.fullmatch(path.name))]
    return sorted(found)


def _whole(value: Any, keep: bool) -> Any:
    """A state dict with all tensors whole, in memory of the CPU; without them unless `keep`, for a rank that writes nothing."""
    if isinstance(value, torch.Tensor):
        tensor = whole(value)
        return tensor.cpu() if keep else None
    if isinstance(value, dict):
        return type(value)((key, _whole(item, keep)) for key, item in value.items())
    return value


def save(directory: Path, step: int, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], write: bool = True) -> None:
    """Write the state after `step` finished steps; the newest `KEEP` remain. Collective: all ranks call it, one with `write`.

    Batches and anchors are functions of the step's number (stages/train/anchors.py), so no random state is kept.
    """
    state = {"step": step, "model": _whole(model.state_dict(), write), "optimizers": [_whole(optimizer.state_dict(), write) for optimizer in optimizers]}
    if not write:
        return
    # Given a path, torch.save writes itself and does not say why it could not (a full disk).
    with atomic_path(directory / f"step-{step:08d}.pt") as temporary, temporary.open("wb") as stream:
        torch.save(state, stream)
    for _, path in _checkpoints(directory)[:-KEEP]:
        path.unlink()


def restore(directory: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Load the newest state; returns the number of finished steps, 0 without one."""
    found = _checkpoints(directory)
    if not found:
        return 0
    state: dict[str, Any] = torch.load(found[-1][1], weights_only=True)
    present = model.state_dict()
    model.load_state_dict({name: divided_like(tensor, present[name]) for name, tensor in state["model"].items()})
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, moments in saved["state"].items():
            like = parameters[index]
            # The number of steps is a scalar, the same for all ranks.
            moments.update({name: divided_like(value, like) for name, value in moments.items() if value.shape == like.shape})
        optimizer.load_state_dict(saved)
    return int(state["step"])
