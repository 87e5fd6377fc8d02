"""Training material from the tiny verifier, made with transformers: a dump in files, without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from stages.dataset import TokenSample
from stages.pairing.frozen import FrozenVerifier, load_frozen

LAYER_IDS = [1, 3, 5]


@dataclass
class Sample:
    hidden_states: torch.Tensor


@dataclass
class MemoryDump:
    """What the trainer asks of a dump, held in memory."""

    states: dict[str, torch.Tensor]

    @property
    def ids(self) -> list[str]:
        return list(self.states)

    def read(self, sample: str, expected: list[int] | None = None) -> Sample:
        assert expected is None or len(expected) == len(self.states[sample])
        return Sample(self.states[sample])


@torch.no_grad()
def make_material(verifier: Path, count: int, prompt: int = 6, answer: int = 40, seed: int = 0) -> tuple[list[TokenSample], MemoryDump, FrozenVerifier]:
    """`count` greedy answers of the verifier to random prompts, with their hidden states (fp32)."""
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    last: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_pre_hook(lambda module, args: last.__setitem__("x", args[0]))
    g = torch.Generator().manual_seed(seed)
    samples, states = [], {}
    for index in range(count):
        ids = torch.randint(10, model.config.vocab_size, (1, prompt), generator=g)
        for _ in range(answer):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        hidden = model.model(ids, output_hidden_states=True).hidden_states
        name = f"sample-{index}"
        samples.append(TokenSample(name, "test", ids[0].tolist(), [0] * prompt + [1] * answer, prompt, 1, []))
        states[name] = torch.stack([*(hidden[i][0] for i in LAYER_IDS), last["x"][0]], dim=1)
    return samples, MemoryDump(states), load_frozen(verifier, torch.float32)
