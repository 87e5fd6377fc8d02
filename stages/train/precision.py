"""In which dtype a training's matrix products run."""

from __future__ import annotations

from typing import Literal

import torch

from stages.processor import multiplies_bf16

Precision = Literal["auto", "bf16", "fp32"]


def product_dtype(precision: Precision) -> torch.dtype:
    """bfloat16 or float32."""
    if precision == "auto":
        return torch.bfloat16 if multiplies_bf16() else torch.float32
    return torch.bfloat16 if precision == "bf16" else torch.float32
