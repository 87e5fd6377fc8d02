"""One trainer's optimizer step on made hidden states, in a process of its own, so that its peak memory is its own.

    python -m tests.benchmarks.step_worker TRAINER CASE DIRECTORY

TRAINER is `ours` or `reference`, CASE the fields of `Case` as JSON, DIRECTORY a place for the verifier's ends and for initial weights. For
every line `n` on stdin it makes n steps and prints one line of JSON; `products n` times the step's matrix products alone.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from stages.artifacts import write_json
from stages.dataset import TokenSample
from stages.drafters.checkpoint import save_checkpoint
from stages.drafters.config import DrafterConfig
from stages.drafters.model import Drafter
from stages.hidden_states.format import HiddenSample, Plan
from stages.pairing.frozen import load_frozen
from stages.params import Train
from stages.train.data import TrainingSet, make_batch
from stages.train.loop import backward, set_threads
from stages.train.model_step import objective
from stages.train.optimizer import make_optimizers
from stages.train.parallel import Step
from stages.train.precision import product_dtype
from tests.benchmarks.reference_step import batch, load_model, loss_arguments, take_step

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS = 576, 1536, 9, 3, 30
"""SmolLM2-135M."""
TAPPED = [2, 8, 15, 22, 28]
SAMPLES = 4
BLOCK = 8


@dataclass(frozen=True)
class Case:
    """A step's size: `length` tokens of context, `anchors` blocks of 8 slots, a full vocabulary of `vocab`."""

    vocab: int = 49152
    anchors: int = 64
    length: int = 512
    layers: int = 2
    rank: int = 64
    precision: str = "fp32"

    @property
    def slots(self) -> int:
        return self.anchors * BLOCK


def write_verifier_ends(directory: Path, case: Case) -> Path:
    """Config, embedding (tied head) and final norm of a verifier with random weights: all that a trainer reads of it."""
    if (directory / "config.json").is_file():
        return directory
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(case.vocab, HIDDEN, generator=generator).mul_(0.05).to(torch.bfloat16)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    shape = {"vocab_size": case.vocab, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS, "max_position_embeddings": 8192}
    rest = {"rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True, "hidden_act": "silu"}
    write_json(directory / "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, **heads, **rest})
    return directory


def drafter_config(case: Case) -> DrafterConfig:
    return DrafterConfig(
        algorithm="dspark",
        block_size=BLOCK,
        num_layers=case.layers,
        sample_from_anchor=True,
        vocab_size=case.vocab,
        draft_vocab_size=case.vocab,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        mask_token_id=3,
        markov_rank=case.rank,
        markov_head_type="vanilla",
        confidence_head=True,
        confidence_head_with_markov=True,
        layer_ids=TAPPED,
    )


class MadeStates:
    """Random hidden states, the same for both trainers."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(2)
        shape = (case.length, len(TAPPED) + 1, HIDDEN)
        self._states = {f"s{i}": torch.randn(shape, generator=generator).to(torch.bfloat16) for i in range(SAMPLES)}
        self.plan = Plan("made", (*TAPPED, LAYERS), HIDDEN, "bfloat16", case.length, "made", SAMPLES, SAMPLES * case.length)

    @property
    def ids(self) -> list[str]:
        return list(self._states)

    def read(self, sample: str, expected_token_ids: list[int] | None) -> HiddenSample:
        return HiddenSample(sample, torch.tensor(expected_token_ids), self._states[sample])


def training_set(case: Case, verifier: Path) -> TrainingSet:
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    random = np.random.default_rng(3)
    tokens = random.integers(4, case.vocab, (SAMPLES, case.length)).tolist()
    mask = [0] + [1] * (case.length - 1)
    samples = [TokenSample(id=f"s{i}", kind="made", input_ids=ids, loss_mask=mask, prompt_length=1, turns=1, messages=[]) for i, ids in enumerate(tokens)]
    return TrainingSet(samples, MadeStates(case), load_frozen(verifier, dtype), None, dtype)


def ours(case: Case, directory: Path) -> Callable[[int], None]:
    """Our step: batch, loss, backward, clipping, AdamW."""
    data = training_set(case, write_verifier_ends(directory, case))
    params = Train(steps=1, optimizer="adamw", precision=case.precision, anchors_per_sequence=case.anchors)  # type: ignore[arg-type]
    torch.manual_seed(0)
    drafter = Drafter(drafter_config(case), data.frozen).train()
    optimizers = make_optimizers(drafter, params)
    dtype = product_dtype(params.precision)
    module = Step(drafter, lambda model, batch: objective(model, data.head, batch, params.loss, dtype).loss)

    def step(number: int) -> None:
        made = make_batch(data, [number % SAMPLES], case.anchors, BLOCK, params.decay_gamma, ("train", 0, number))
        assert made is not None
        drafter.zero_grad(set_to_none=True)
        backward(module, [made], made, made.weight)
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), params.grad_clip)
        for optimizer in optimizers:
            optimizer.step()

    return step


def reference(case: Case, directory: Path) -> Callable[[int], None]:
    """The same step by the `speculators` package: its model, loss and optimizer, from our initial weights."""
    from speculators.train.config.schema import OptimizerArgs
    from speculators.train.optimizers import build_optimizers

    verifier = write_verifier_ends(directory, case)
    data = training_set(case, verifier)
    torch.manual_seed(0)
    initial = directory / f"initial-{case.layers}-{case.rank}"
    save_checkpoint(initial, Drafter(drafter_config(case), data.frozen), str(verifier), ["LlamaForCausalLM"], torch.float32)
    model, settings = load_model(initial), Train(steps=1)
    arguments = loss_arguments(model, settings, case.anchors)
    optimizers = build_optimizers(model, OptimizerArgs(optimizer="adamw"))

    def step(number: int) -> None:
        take_step(model, batch(data, [number % SAMPLES], data.dtype), arguments, optimizers, settings)

    return step


def product_shapes(case: Case) -> list[tuple[int, int, int]]:
    """`[m, k] @ [k, n]` of one step's forward and backward pass: the vocabulary's, and the backbone's linear layers."""
    n, width = case.slots, HIDDEN + case.rank
    predicting = min(case.length, n)
    vocabulary = [(predicting, HIDDEN, case.vocab), (n, width, case.vocab), (n, case.vocab, width), (case.vocab, n, case.rank)]
    kv = KV_HEADS * (HIDDEN // HEADS)
    context, block = case.length, n
    linear = [(context, len(TAPPED) * HIDDEN, HIDDEN)]
    for _ in range(case.layers):
        linear += [(block, HIDDEN, HIDDEN), (context + block, HIDDEN, kv), (context + block, HIDDEN, kv), (block, HIDDEN, HIDDEN)]
        linear += [(block, HIDDEN, INTERMEDIATE), (block, HIDDEN, INTERMEDIATE), (block, INTERMEDIATE, HIDDEN)]
    backward = [shape for m, k, n_out in linear for shape in ((m, n_out, k), (k, m, n_out))]
    return vocabulary + linear + backward


def products(case: Case) -> Callable[[int], None]:
    """The same products alone, each on operands of its own, in the step's dtype."""
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    operands = [(torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)) for m, k, n in sorted(set(product_shapes(case)))]
    counts = [product_shapes(case).count((a.shape[0], a.shape[1], b.shape[1])) for a, b in operands]

    def step(number: int) -> None:
        for (a, b), count in zip(operands, counts, strict=True):
            for _ in range(count):
                a @ b

    return step


def main() -> None:
    trainer, case, directory = sys.argv[1], Case(**json.loads(sys.argv[2])), Path(sys.argv[3])
    set_threads(None)
    step = {"ours": ours, "reference": reference, "products": lambda case, _: products(case)}[trainer](case, directory)
    made = 0
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.monotonic()
            step(made)
            seconds.append(time.monotonic() - start)
            made += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"trainer": trainer, "case": asdict(case), "seconds": seconds, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    main()
