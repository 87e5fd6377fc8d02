"""Muon for the backbone's matrices, AdamW for the rest; or AdamW for all.

Muon (Jordan et al., 2024; in torch as `torch.optim.Muon`) replaces a matrix's momentum by its nearest semi-orthogonal
matrix. It sees no sense in vectors and in tables of token embeddings: norms and the vocabulary-sized heads stay with AdamW.
"""

from __future__ import annotations

import torch

from stages.params import Train

BETAS = (0.9, 0.95)


def is_backbone_matrix(name: str, parameter: torch.Tensor) -> bool:
    """True for the projections of the layers and for `fc`."""
    return parameter.ndim == 2 and name.startswith(("layers.", "fc."))


def make_optimizers(drafter: torch.nn.Module, params: Train) -> list[torch.optim.Optimizer]:
    """The optimizers that together update every parameter once per step.

    `match_rms_adamw` (Liu et al., 2025) scales Muon's update to the size of AdamW's, so that both take one learning rate.
    """
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in drafter.named_parameters():
        (matrices if params.optimizer == "muon" and is_backbone_matrix(name, parameter) else others).append(parameter)
    decay = params.weight_decay
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=params.learning_rate, weight_decay=decay, betas=BETAS, fused=True)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=params.learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return optimizers
