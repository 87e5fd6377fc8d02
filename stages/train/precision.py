"""In which dtype a training's matrix products run."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["auto", "bf16", "fp32"]


def multiplies_bf16() -> bool:
    """Whether there is a GPU, or a processor with instructions for it.

    One that has none takes several times as long as for fp32, and for small matrices a hundred times.
    """
    return bool(torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def product_dtype(precision: Precision) -> torch.dtype:
    """bfloat16 or float32."""
    if precision == "auto":
        return torch.bfloat16 if multiplies_bf16() else torch.float32
    return torch.bfloat16 if precision == "bf16" else torch.float32
