"""Muon for the backbone's matrices, AdamW for the rest; or AdamW for all.

Muon makes no sense for vectors and for tables of token embeddings: norms and the vocabulary-sized heads stay with AdamW.
"""

from __future__ import annotations

import torch

from stages.params import Train
from stages.train.muon import Muon
from stages.train.precision import product_dtype

BETAS = (0.9, 0.95)


def is_backbone_matrix(name: str, parameter: torch.Tensor) -> bool:
    """True for the projections of the layers and for `fc`."""
    return parameter.ndim == 2 and name.startswith(("layers.", "fc."))


def make_optimizers(drafter: torch.nn.Module, params: Train) -> list[torch.optim.Optimizer]:
    """The optimizers that together update every parameter once per step."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in drafter.named_parameters():
        (matrices if params.optimizer == "muon" and is_backbone_matrix(name, parameter) else others).append(parameter)
    decay = params.weight_decay
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=params.learning_rate, weight_decay=decay, betas=BETAS, fused=True)]
    if matrices:
        optimizers.append(Muon(matrices, params.learning_rate, decay, product_dtype(params.precision)))
    return optimizers
