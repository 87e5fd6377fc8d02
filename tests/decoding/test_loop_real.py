"""Greedy identity on the real 135M verifier in fp32: a long conversation, a long prompt, and every shared prompt file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.decoding.blocks import BlockProposer
from stages.decoding.cached_model import load_model
from stages.decoding.draft_model import DraftModelProposer
from stages.decoding.eagle3 import Eagle3Proposer
from stages.decoding.loop import Decoder
from stages.decoding.ngram import LoopGuard, NgramProposer
from stages.decoding.proposer import Proposer, Sampling
from stages.decoding.stopping import Prompt
from stages.drafters.checkpoint import load_drafter
from stages.pairing.frozen import load_frozen
from tests.decoding.pairs import write_drafter
from tests.drafters.kinds import make_drafter
from tests.marks import long_but
from tests.paths import shared

FILES = ("gsm8k", "math500", "mbpp", "humaneval", "mt-bench")
KINDS = ("dspark", "dflash", "eagle3", "draft model", "prompt lookup", "guarded lookup")
EACH = long_but(lambda name: name == "dspark", KINDS)
"""A minute each."""
TOKENS = 48
PROMPTS_PER_FILE = 4
"""Evenly over the file: what could differ between prompts of one file is their length alone."""


@dataclass
class Real:
    """The verifier, its tokenizer, and stand-ins for trained drafters: their drafts are poor, so their caches rewind all the time."""

    model: Any
    tokenizer: Any
    drafters: dict[str, Any]
    shallow: Any
    known: dict[str, list[list[int]]] = field(default_factory=dict)

    def proposer(self, name: str) -> Proposer:
        if name == "eagle3":
            return Eagle3Proposer(self.drafters[name])
        if name in self.drafters:
            return BlockProposer(self.drafters[name])
        if name == "draft model":
            return DraftModelProposer(self.shallow, 4)
        return NgramProposer(6, 1, 3, LoopGuard() if name == "guarded lookup" else None)

    def decode(self, name: str | None, prompts: list[list[int]], max_tokens: int = TOKENS, batch_size: int = 4) -> list[list[int]]:
        decoder = Decoder(self.model, None if name is None else self.proposer(name))
        requests = [Prompt(str(index), ids, max_tokens) for index, ids in enumerate(prompts)]
        return [done.token_ids for done in decoder.decode(requests, batch_size)]

    def alone(self, prompts: list[list[int]], max_tokens: int = TOKENS) -> list[list[int]]:
        """What the verifier says by itself, one prompt at a time; decoded once for all proposers."""
        key = json.dumps([prompts, max_tokens])
        if key not in self.known:
            self.known[key] = self.decode(None, prompts, max_tokens, batch_size=1)
        return self.known[key]

    def chat(self, turns: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


@pytest.fixture(scope="module")
def real(real_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Real:
    from transformers import AutoTokenizer

    root = tmp_path_factory.mktemp("real")
    frozen = load_frozen(real_verifier, torch.float32)
    shape = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "num_layers": 1, "layer_ids": [8, 30], "max_position_embeddings": 8192}
    shape |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
    plain = {"algorithm": "dflash", "markov_rank": 0, "confidence_head": False, "confidence_head_with_markov": False}
    write_drafter(root / "dspark", real_verifier, "bigrams", **shape)
    write_drafter(root / "dflash", real_verifier, **shape | plain)
    drafters: dict[str, Any] = {name: load_drafter(root / name, frozen, torch.float32) for name in ("dspark", "dflash")}
    drafters["eagle3"] = make_drafter("eagle3", real_verifier, [2, 15, 28])
    shallow = load_model(real_verifier, torch.float32)
    # The verifier without its middle: the layers that are left agree with it now and then.
    shallow.model.layers = torch.nn.ModuleList([*shallow.model.layers[:12], *shallow.model.layers[-10:]])
    for index, layer in enumerate(shallow.model.layers):
        layer.self_attn.layer_idx = index
    shallow.config.num_hidden_layers = len(shallow.model.layers)
    return Real(load_model(real_verifier, torch.float32), AutoTokenizer.from_pretrained(real_verifier), drafters, shallow)


def margin(real: Real, tokens: list[int]) -> float:
    """The verifier's best logit minus its second after `tokens`: small at a near-tie."""
    best, second = real.model(torch.tensor([tokens])).logits[0, -1].topk(2).values.tolist()
    return float(best - second)


def check(real: Real, prompts: list[list[int]], expected: list[list[int]], found: list[list[int]]) -> None:
    """Token identity; a failure names the verifier's margin where the outputs part."""
    parted = []
    for index, (prompt, wanted, got) in enumerate(zip(prompts, expected, found, strict=True)):
        if wanted != got:
            place = next((at for at, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
            parted.append(f"prompt {index}, token {place}, margin {margin(real, prompt + wanted[:place]):.2g}")
    assert not parted, parted


@pytest.mark.integration
@torch.inference_mode()
def test_the_verifier_alone_is_what_transformers_generates(real: Real) -> None:
    prompt = real.chat([{"role": "user", "content": "What is the capital of France?"}])
    (ours,) = real.alone([prompt])
    theirs = real.model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :].tolist()
    assert ours == theirs


@pytest.mark.integration
@pytest.mark.parametrize("name", EACH)
def test_a_conversation_of_ten_turns_is_identical(real: Real, name: str) -> None:
    """Each turn's answer is part of the next turn's prompt."""
    turns: list[dict[str, str]] = []
    for number in range(10):
        turns.append({"role": "user", "content": f"Tell me fact number {number + 1} about rivers, in one sentence."})
        prompt = real.chat(turns)
        expected = real.alone([prompt], 16)
        check(real, [prompt], expected, real.decode(name, [prompt], 16))
        turns.append({"role": "assistant", "content": real.tokenizer.decode(expected[0], skip_special_tokens=True)})


@pytest.mark.integration
@pytest.mark.parametrize("name", EACH)
def test_a_prompt_of_3000_tokens_is_identical(real: Real, name: str) -> None:
    generator = random.Random(0)
    words = ["river", "house", "winter", "story", "number", "question", "engine", "morning", "window", "paper"]
    text = " ".join(generator.choice(words) for _ in range(4000))
    prompt = real.chat([{"role": "user", "content": text}])
    prompt = prompt[:2990] + prompt[-10:]
    assert len(prompt) == 3000
    check(real, [prompt], real.alone([prompt], 24), real.decode(name, [prompt], 24))


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_every_prompt_file_is_identical(real: Real, file: str, name: str) -> None:
    lines = shared(f"data/eval/{file}.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = lines[:: len(lines) // PROMPTS_PER_FILE][:PROMPTS_PER_FILE]
    prompts = [real.chat([{"role": "user", "content": json.loads(line)["turns"][0]}]) for line in chosen]
    check(real, prompts, real.alone(prompts), real.decode(name, prompts, batch_size=4))


@pytest.mark.benchmark
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.95)], ids=["greedy", "top-p"])
@pytest.mark.parametrize("name", ["dspark", "prompt lookup"])
def test_the_loop_costs_little_beside_its_models(real: Real, name: str, sampling: Sampling) -> None:
    """Everything but the two models' forwards: at most 5 % of a greedy round, 15 % with top-p."""
    prompts = [Prompt(str(number), real.chat([{"role": "user", "content": f"Write a story about {number} rivers."}]), 64) for number in range(4)]
    decoder = Decoder(real.model, real.proposer(name), sampling)
    decoder.decode(prompts)
    print(name, sampling, decoder.seconds.report())
    assert decoder.seconds.overhead <= (0.05 if sampling.greedy else 0.15), decoder.seconds
