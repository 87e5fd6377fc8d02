"""An isolated engine with a deliberately broken acceptance rule: it accepts every draft.

    EngineProcess(config, desc, live=broken_life)

It is broken in its own process, so nothing of that reaches an engine that is meant to be right.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch

from stages.decoding.engine import EngineConfig
from stages.decoding.isolated import engine_life


def break_acceptance() -> None:
    """Hand vLLM's greedy rejection sampler the drafts themselves as the verifier's choice."""
    from vllm.v1.sample import rejection_sampler

    honest = rejection_sampler.rejection_sample

    def accept_everything(*arguments: Any, **named: Any) -> Any:
        # Positions as in vLLM's signature: 0 draft token ids [tokens], 5 the verifier's logits [tokens, V].
        drafts, logits = arguments[0], arguments[5]
        forced = torch.zeros_like(logits).scatter_(1, drafts.long()[:, None], 1.0)
        return honest(*arguments[:5], forced, *arguments[6:], **named)

    rejection_sampler.rejection_sample = accept_everything


def broken_life(config: EngineConfig, connection: Connection) -> int:
    break_acceptance()
    return engine_life(config, connection)
