"""What this machine multiplies fast."""

from __future__ import annotations

import platform


def multiplies_bf16() -> bool:
    """Whether there is a GPU, or a processor with instructions for it.

    One that has none takes several times as long as for fp32, and for small matrices a hundred times.
    """
    import torch

    return bool(torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def slow_dtype(dtype: str) -> str | None:
    """A warning where vLLM's CPU build would take several times as long for `engine.dtype` as for float32."""
    # Of other processors torch does not say what they multiply.
    if dtype == "float32" or platform.machine() != "x86_64" or multiplies_bf16():
        return None
    return (
        f"params.yaml: engine.dtype = {dtype!r}: this processor has no instructions for it, so vLLM takes several times as long as in float32; "
        "to change that: python -m stages.params --use profiles/fp32.yaml"
    )
