"""Tiny verifiers in this process, proposers of every kind for them, and the plainest decoding there is to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.decoding.blocks import BlockProposer
from stages.decoding.cached_model import load_model
from stages.decoding.draft_model import DraftModelProposer
from stages.decoding.loop import Decoder
from stages.decoding.ngram import LoopGuard, NgramProposer
from stages.decoding.proposer import Proposer, Sampling
from stages.decoding.stopping import Prompt
from stages.drafters.checkpoint import load_drafter
from stages.pairing.frozen import load_frozen
from tests.decoding.pairs import write_drafter
from tests.gate.pair import make_bigram_verifier

K = 4

SHAPES: dict[str, dict[str, Any]] = {
    "dspark": {"plant": "bigrams"},
    "dspark, reduced vocabulary": {"plant": "bigrams", "draft_ids": torch.arange(0, 512, 2)},
    "dspark, gated": {"markov_head_type": "gated"},
    "dspark, rnn from the anchor": {"markov_head_type": "rnn", "sample_from_anchor": True, "block_size": K},
    "dflash": {"algorithm": "dflash", "markov_rank": 0, "confidence_head": False, "confidence_head_with_markov": False},
}
"""Block drafters by name: what `tests.decoding.pairs.write_drafter` is given."""

OTHERS = ("draft model", "itself", "prompt lookup", "guarded lookup")
PROPOSERS = (*SHAPES, *OTHERS)


@dataclass
class Pair:
    """A tiny verifier in `directory` and everything that can draft for it; `draft_model` is the model in `draft_directory`."""

    directory: Path
    model: Any
    checkpoints: dict[str, Path]
    draft_directory: Path
    draft_model: Any

    def proposer(self, name: str, draft_tokens: int = K) -> Proposer:
        """A fresh proposer: a drafter of `SHAPES`, a draft model (another tiny model, or the verifier itself), prompt lookup."""
        if name in SHAPES:
            return BlockProposer(load_drafter(self.checkpoints[name], load_frozen(self.directory, torch.float32), torch.float32), draft_tokens)
        if name == "draft model":
            return DraftModelProposer(self.draft_model, draft_tokens)
        if name == "itself":
            return DraftModelProposer(self.model, draft_tokens)
        return NgramProposer(draft_tokens, 1, 3, LoopGuard() if name == "guarded lookup" else None)

    def decoder(self, name: str | None, sampling: Sampling | None = None, **options: Any) -> Decoder:
        return Decoder(self.model, None if name is None else self.proposer(name), sampling, **options)


def make_pair(root: Path) -> Pair:
    verifier = make_bigram_verifier(root / "verifier")
    # Weights close to the verifier's: it agrees often, not always.
    other = make_bigram_verifier(root / "draft", strength=0.03)
    checkpoints = {name: write_drafter(root / name.replace(" ", "-"), verifier, **options) for name, options in SHAPES.items()}
    return Pair(verifier, load_model(verifier, torch.float32), checkpoints, other, load_model(other, torch.float32))


@torch.inference_mode()
def plain_greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy decoding without any cache, and without any end: every token from a forward over all tokens before it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def random_prompts(count: int, max_tokens: int = 40, seed: int = 0, **options: Any) -> list[Prompt]:
    """Random prompts of different length."""
    generator = random.Random(seed)
    return [Prompt(f"prompt {index}", [generator.randrange(4, 500) for _ in range(3 + 4 * index)], max_tokens, **options) for index in range(count)]


def prefix_until(tokens: list[int], done: Callable[[list[int]], bool]) -> list[int]:
    """The shortest prefix of which `done` holds, or all."""
    return next((tokens[:count] for count in range(1, len(tokens) + 1) if done(tokens[:count])), tokens)
