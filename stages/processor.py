"""What this machine multiplies fast."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

from stages.installed import installed_device

CPUINFO = Path("/proc/cpuinfo")


def bf16_instructions() -> bool | None:
    """Whether the processor has instructions for products in bf16; None where that cannot be told (no x86, no Linux).

    One that has none takes several times as long as for fp32, and for small matrices a hundred times.
    """
    if platform.machine() != "x86_64" or not CPUINFO.exists():
        return None
    flags = next((line.split() for line in CPUINFO.read_text(encoding="utf-8").splitlines() if line.startswith("flags")), [])
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)


def multiplies_bf16() -> bool:
    """Whether torch does: there is a GPU, or a processor known to have the instructions."""
    import torch

    return bool(torch.cuda.is_available() or bf16_instructions())


def engine_dtype() -> Literal["bfloat16", "float32"]:
    """What `auto` means for an engine: bf16, but for vLLM's CPU build on a processor known to have no instructions for it.

    Raises:
        DraftlineError: no vLLM is installed.
    """
    return "float32" if installed_device() == "cpu" and bf16_instructions() is False else "bfloat16"


def slow_dtype(dtype: str) -> str | None:
    """A warning where vLLM would take several times as long for `engine.dtype` as for float32."""
    if dtype == "float32" or engine_dtype() != "float32":
        return None
    return (
        f"params.yaml: engine.dtype = {dtype!r}: this processor has no instructions for it, so vLLM takes several times as long as in float32; "
        "engine.dtype and extraction.dtype: auto take what it is fast in"
    )
