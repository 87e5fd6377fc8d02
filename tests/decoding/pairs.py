"""Tiny verifiers and drafters for the tests of the engine: random, or with a Markov head whose chain is known beforehand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import torch

from stages.artifacts import read_json
from stages.decoding.engine import EngineConfig, Request
from stages.decoding.speculative import ngram_config, spec_config
from stages.drafters.checkpoint import save_checkpoint
from stages.drafters.model import Drafter
from stages.pairing.frozen import load_frozen
from tests.drafters.shapes import config

MAX_MODEL_LEN = 128
CHAIN = (6, 1)
"""The planted chain: after token t comes 6·t + 1, modulo the vocabulary: after the first step always an odd token."""

Plant = Literal["nothing", "bigrams", "chain"]


def after(token: int, vocab: int) -> int:
    """The token that the planted chain puts after `token`."""
    return (token * CHAIN[0] + CHAIN[1]) % vocab


@torch.no_grad()
def write_drafter(checkpoint: Path, verifier: Path, plant: Plant = "nothing", draft_ids: torch.Tensor | None = None, **changes: Any) -> Path:
    """A speculators checkpoint for `verifier`, all weights large enough that each of them matters.

    Args:
        plant: what the Markov head (`vanilla`) knows: nothing, the verifier's own bigrams (for a verifier of
            `tests.gate.pair.make_bigram_verifier`: many drafts are accepted), or `CHAIN` so loudly that nothing else counts.
        draft_ids: reduced draft vocabulary; None: the whole.
    """
    frozen = load_frozen(verifier, torch.float32)
    vocab, hidden = frozen.embedding.shape
    fitting = {"draft_vocab_size": vocab if draft_ids is None else len(draft_ids), "rms_norm_eps": frozen.norm_eps, "markov_rank": hidden}
    shape = config(vocab, hidden, **fitting | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drafter = Drafter(shape, frozen, draft_ids)
        for weight in drafter.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
            else:
                # Norms that differ from layer to layer, as trained ones do: an engine that mixes them up must show.
                weight.uniform_(0.2, 2.0)
        head = drafter.markov_head
        if plant != "nothing":
            assert head is not None
            normed = torch.nn.functional.rms_norm(frozen.embedding, (hidden,), frozen.norm_weight, frozen.norm_eps)
            head.markov_w1.weight.copy_(normed)
            if plant == "bigrams":
                head.markov_w2.weight.copy_(frozen.lm_head[drafter.draft_ids])
                drafter.norm.weight.fill_(0.3)
            else:
                comes_from = torch.zeros(vocab, vocab)
                comes_from[(torch.arange(vocab) * CHAIN[0] + CHAIN[1]) % vocab, torch.arange(vocab)] = 1000.0
                head.markov_w2.weight.copy_(comes_from[drafter.draft_ids] @ torch.nn.functional.normalize(normed))
    save_checkpoint(checkpoint, drafter, "tiny", ["LlamaForCausalLM"], torch.float32)
    return checkpoint


def engine_config(verifier: Path, speculative: dict[str, Any] | Path | None = None) -> EngineConfig:
    """A small fp32 engine, alone or with a drafter: a checkpoint or a ready speculative config."""
    if isinstance(speculative, Path):
        speculative = spec_config(speculative, read_json(speculative / "config.json"))
    return EngineConfig(str(verifier), "float32", MAX_MODEL_LEN, 8, 1 << 26, speculative)


def lookup_config(verifier: Path) -> EngineConfig:
    """The same with prompt lookup, four drafts."""
    return engine_config(verifier, ngram_config(4, 1, 3))


def requests(count: int = 6, max_tokens: int = 40, seed: int = 0) -> list[Request]:
    """Random prompts of different length."""
    generator = random.Random(seed)
    return [Request(f"prompt {index}", [generator.randrange(4, 500) for _ in range(5 + 4 * index)], max_tokens) for index in range(count)]
