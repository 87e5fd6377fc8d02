"""vLLM's speculative config of a drafter, for the engine that is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.installed import Device, installed_device
from stages.pairing.shapes import algorithm_of


def spec_config(checkpoint: Path, config: dict[str, Any], device: Device | None = None) -> dict[str, Any]:
    """How vLLM is told to use a drafter.

    Args:
        checkpoint: its directory. config: its `config.json`.
        device: of the engine; None: what the installed vLLM was built for.
    Returns:
        vLLM's speculative config; `num_speculative_tokens` is K of this engine. Never left to vLLM, which would take
        a block's size, one too many where the anchor predicts nothing.
    Raises:
        ArtifactError: not a drafter's config.json.
    """
    kind = algorithm_of(config, str(checkpoint / "config.json"))
    method, tokens, more = METHODS[kind](config, device)
    return {"method": method, "model": str(checkpoint), "num_speculative_tokens": tokens} | more


def _speculative_tokens(config: dict[str, Any]) -> int:
    return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])


def _block(config: dict[str, Any], device: Device | None) -> Told:
    """DSpark is drafted natively by the CUDA build, where the Markov head is `vanilla`; in every other case by our plug-in, under the method `dflash`."""
    tokens = _speculative_tokens(config)
    dspark = config["speculators_model_type"] == "dspark"
    if dspark and (device or installed_device()) == "cuda" and config["markov_head_type"] == "vanilla":
        return "dspark", tokens, {}
    # The plug-in knows the drafts without logits over the verifier's whole vocabulary: a tenth of a round at batch 8.
    more = {"use_local_argmax_reduction": True} if dspark else {}
    # Method dflash always feeds the anchor and K masks: block_size inputs, the block that the drafter was trained on, need K = block_size - 1.
    return "dflash", min(tokens, config["block_size"] - 1), more


def _ngram(config: dict[str, Any], device: Device | None) -> Told:
    own = config["draftline"]
    return "ngram", own["draft_tokens"], {"prompt_lookup_min": own["ngram_min"], "prompt_lookup_max": own["ngram_max"]}


Told = tuple[str, int, dict[str, Any]]
"""vLLM's method, K, and what else the method is told."""

METHODS: dict[str, Callable[[dict[str, Any], Device | None], Told]] = {
    "dspark": _block,
    "dflash": _block,
    "eagle3": lambda config, device: ("eagle3", _speculative_tokens(config), {}),
    "draft_model": lambda config, device: ("draft_model", config["draftline"]["draft_tokens"], {}),
    "ngram": _ngram,
}
"""By the kind of the checkpoint."""


def ngram_config(draft_tokens: int, shortest: int, longest: int) -> dict[str, Any]:
    """Prompt lookup with up to `draft_tokens` drafts after an n-gram of `shortest` to `longest` tokens seen before."""
    return {"method": "ngram", "num_speculative_tokens": draft_tokens, "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
