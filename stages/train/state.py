"""Checkpoints of an unfinished training: everything that the next step depends on, final or absent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from stages.artifacts import atomic_path

KEEP = 2
NAME = re.compile(r"step-(\d{8})\.pt")


def _checkpoints(directory: Path) -> list[tuple[int, Path]]:
    found = [(int(match[1]), path) for path in directory.glob("step-*.pt") if (match := NAME.fullmatch(path.name))]
    return sorted(found)


def save(directory: Path, step: int, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Write the state after `step` finished steps; the newest `KEEP` remain.

    Batches and anchors are functions of the step's number (stages/train/anchors.py), so no random state is kept.
    """
    # Given a path, torch.save writes itself and does not say why it could not (a full disk).
    with atomic_path(directory / f"step-{step:08d}.pt") as temporary, temporary.open("wb") as stream:
        torch.save({"step": step, "model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, stream)
    for _, path in _checkpoints(directory)[:-KEEP]:
        path.unlink()


def restore(directory: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Load the newest state; returns the number of finished steps, 0 without one."""
    found = _checkpoints(directory)
    if not found:
        return 0
    state: dict[str, Any] = torch.load(found[-1][1], weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])
