"""Muon as torch has it, in a dtype of our choice."""

from __future__ import annotations

import torch

from stages.train.muon import Muon, orthogonalise


def matrices() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape)) for shape in ((24, 16), (16, 24), (16, 16))]


def test_in_bf16_it_is_torchs_bit_for_bit() -> None:
    ours, theirs = matrices(), matrices()
    optimizers = (
        Muon(ours, lr=0.01, weight_decay=0.1, dtype=torch.bfloat16),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(4):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_in_fp32_singular_values_are_near_one() -> None:
    for matrix in matrices()[:2]:
        values = torch.linalg.svdvals(orthogonalise(matrix.detach(), torch.float32))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_the_gradient_itself_is_left_alone() -> None:
    matrix = torch.randn(4, 8)
    before = matrix.clone()
    orthogonalise(matrix, torch.float32)
    assert torch.equal(matrix, before)
