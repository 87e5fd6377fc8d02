"""Ways to compute a drafter's layers with less memory or time: activation checkpointing, torch.compile, flex attention."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stages.drafters.eagle3 import Eagle3
from stages.drafters.layers import Attention
from stages.drafters.model import Drafter
from stages.errors import DraftlineError
from stages.params import Train
from stages.train.flex import attend_flex
from stages.train.objectives import TrainedDrafter


def require_possible(params: Train, algorithm: str) -> None:
    """Raises DraftlineError: a value needs CUDA, or another algorithm."""
    needs_cuda = [("compile", params.compile, False), ("attention", params.attention == "flex", "sdpa")]
    for knob, wanted, instead in needs_cuda:
        if wanted and not torch.cuda.is_available():
            raise DraftlineError(f"params.yaml: train.{knob} = {getattr(params, knob)!r}: needs CUDA, and there is none here; set {instead!r}")
    if params.attention == "flex" and algorithm not in ("dspark", "dflash"):
        raise DraftlineError(f"params.yaml: train.attention = 'flex': only of dspark and dflash, and drafter.algorithm = {algorithm!r}; set 'auto'")


def accelerate(drafter: TrainedDrafter, params: Train) -> None:
    """Change how the layers are computed, in place."""
    if isinstance(drafter, Drafter) and params.attention != "sdpa" and torch.cuda.is_available():
        for module in drafter.modules():
            if isinstance(module, Attention):
                module.attend = attend_flex
    # EAGLE-3 uses its layer in pieces: the one with the MLP is the largest that keeps no state.
    name = "finish" if isinstance(drafter, Eagle3) else "forward"
    for layer in drafter.layers:
        assert isinstance(layer, nn.Module)
        if params.compile:
            setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True))
        if params.activation_checkpointing:
            setattr(layer, name, partial(checkpoint, getattr(layer, name), use_reentrant=False))
