"""Prompt lookup: what followed the longest n-gram seen before is drafted. Nothing is trained; the checkpoint is its settings.

The longest match of `ngram_min` to `ngram_max` last tokens counts, of equally long ones the earliest: vLLM's rule (`ngram_proposer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class NgramConfig(BaseModel):
    """Settings of prompt lookup. `draft_tokens`: most tokens per round (K)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: Literal["ngram"] = "ngram"
    draft_tokens: int
    ngram_min: int
    ngram_max: int
    vocab_size: int

    @property
    def layer_ids(self) -> list[int]:
        """No layer is tapped."""
        return []

    def export(self) -> dict[str, Any]:
        """The checkpoint's `config.json`."""
        return {"draftline": self.model_dump()}


def look_up(tokens: Sequence[int], config: NgramConfig) -> list[int]:
    """Up to `K` drafts after `tokens`; empty without a match."""
    sequence = list(tokens)
    for length in range(min(config.ngram_max, len(sequence) - 1), config.ngram_min - 1, -1):
        tail = sequence[-length:]
        for start in range(len(sequence) - length):
            if sequence[start : start + length] == tail:
                return sequence[start + length : start + length + config.draft_tokens]
    return []
