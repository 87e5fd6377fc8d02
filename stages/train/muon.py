"""Muon (Jordan et al., 2024): a matrix's momentum, replaced by its nearest semi-orthogonal matrix.

The same steps as `torch.optim.Muon` (in bf16 bit for bit), whose products always run in bf16: a processor without bf16
instructions takes a hundred times as long for those as for fp32.

Only whole matrices can be orthogonalised: of one that is divided among ranks each gathers the momentum, orthogonalises all of it
and keeps its own rows of the result, so that the update is that of one rank. Momentum itself stays divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stages.train.shards import divided_like, whole

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPSILON = 1e-7


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """`[M, N]` in `dtype`: nearly U·Vᵀ of the singular value decomposition, by five Newton-Schulz iterations of degree five.

    Their coefficients drive all singular values into about 0.7 … 1.2 and not further, which does as well and costs less.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=EPSILON))
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised in `dtype`; the update is scaled to the size of AdamW's (Liu et al., 2025), so that both take one learning rate."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                buffer = state["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - MOMENTUM)
                update = divided_like(orthogonalise(whole(parameter.grad.lerp(buffer, MOMENTUM)), self._dtype), parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))
