"""Checkpoints of an unfinished training: everything that the next step depends on, final or absent.

They hold whole tensors, however many ranks the training has: it goes on with another number of them, or divided in another way.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stages.artifacts import atomic_path
from stages.train.ranks import ALONE, Ranks
from stages.train.shards import divided_like, whole

KEEP = 2
NAME = re.compile(r"step-(\d{8})\.pt")


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.pt"


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
    with atomic_path(_path(directory, step)) as temporary, temporary.open("wb") as stream:
        torch.save(state, stream)
    for _, path in _checkpoints(directory)[:-KEEP]:
        path.unlink()


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint. A zip file with a checksum of each tensor, at which torch does not look when it loads."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            return f"the checksum of {broken} is another"
        torch.load(path, weights_only=True, mmap=True)
    except Exception as error:  # damaged bytes make zipfile and torch raise nearly anything
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _newest_whole(directory: Path) -> int:
    """Finished steps of the newest checkpoint that is whole, 0 without one; newer ones are renamed."""
    damaged = 0
    for step, path in reversed(_checkpoints(directory)):
        if (damage := _damage(path)) is None:
            if damaged:
                tqdm.write(f"train: going on from step {step}")
            return step
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        damaged += 1
        tqdm.write(f"train: {path}: checkpoint is damaged ({damage}), renamed to {aside.name}")
    if damaged:
        tqdm.write("train: beginning anew, there is no other checkpoint")
    return 0


def restore(directory: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], ranks: Ranks = ALONE) -> int:
    """Load the newest state that is whole; returns the number of finished steps, 0 without one. Collective.

    The leader chooses, and puts those that are damaged out of the way: they would outlive the ones that are written next.
    """
    (step,) = map(int, ranks.sums(_newest_whole(directory) if ranks.leader else 0))
    if not step:
        return 0
    state: dict[str, Any] = torch.load(_path(directory, step), weights_only=True)
    present = model.state_dict()
    model.load_state_dict({name: divided_like(tensor, present[name]) for name, tensor in state["model"].items()})
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, moments in saved["state"].items():
            like = parameters[index]
            # The number of steps is a scalar, the same for all ranks.
            moments.update({name: divided_like(value, like) for name, value in moments.items() if value.shape == like.shape})
        optimizer.load_state_dict(saved)
    return step
