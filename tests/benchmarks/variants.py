"""Train variants of the demo's drafter on the demo's own data, and decode the same held-out prompts with each.

Needs the outputs of a finished `dvc repro` in the current directory: token samples, hidden states, verifier.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.artifacts import read_json
from stages.dataset import read_split
from stages.decoding.engine import Completion, EngineConfig, Request
from stages.decoding.isolated import EngineProcess
from stages.decoding.speculative import spec_config
from stages.drafters.checkpoint import save_checkpoint
from stages.drafters.config import DrafterConfig
from stages.drafters.model import Drafter
from stages.evaluate.acceptance import prompt_count
from stages.evaluate.statistics import PairedDifference, PromptCount, acceptance_length
from stages.hidden_states.shards import open_dump
from stages.pairing.frozen import load_frozen
from stages.pairing.identity import read_identity
from stages.pairing.store import verifier_directory
from stages.params import Params, read_params
from stages.process import OUTPUTS
from stages.train.data import TrainingSet, choose_draft_vocabulary
from stages.train.loop import set_threads, train
from stages.train.precision import product_dtype

MAX_TOKENS = 128


def need_outputs() -> Params:
    """The demo's params; skips the benchmark where no demo has run."""
    if not (OUTPUTS / "extract" / "manifest.json").is_file():
        pytest.skip("outputs/extract/manifest.json is missing: run `make demo` first")
    return read_params()


def train_variant(directory: Path, params: Params, **changes: Any) -> Path:
    """Train a drafter like the demo's with `changes` of its shape, on the same samples, anchors and steps.

    Returns:
        A speculators checkpoint below `directory`.
    """
    drafter, data = new_drafter(params, **changes)
    train(drafter, data, None, params.train, directory / "work", lambda metrics, step: None)
    return export(directory / "checkpoint", drafter.config, drafter.state_dict(), data.draft_ids, params.verifier.name)


def new_drafter(params: Params, whole_vocabulary: bool = False, **changes: Any) -> tuple[Drafter, TrainingSet]:
    """A drafter with its initial weights, and the demo's training samples."""
    identity = read_identity()
    dump = open_dump(OUTPUTS / "extract" / "manifest.json", identity.digest)
    base = DrafterConfig.model_validate(read_json(OUTPUTS / "train" / "drafter" / "config.json"))
    if whole_vocabulary:
        changes["draft_vocab_size"] = base.vocab_size
    config = DrafterConfig.model_validate(base.model_dump() | changes)
    set_threads(params.train.threads)
    dtype = product_dtype(params.train.precision)
    frozen = load_frozen(verifier_directory(identity), dtype)
    samples = read_split(OUTPUTS / "prepare", "train")
    ids = choose_draft_vocabulary(samples, config.draft_vocab_size, config.vocab_size, identity.eos_token_ids) if config.reduced_vocabulary else None
    torch.manual_seed(params.train.seed)
    return Drafter(config, frozen, ids), TrainingSet(samples, dump, frozen, ids, dtype)


def export(checkpoint: Path, config: DrafterConfig, state: dict[str, torch.Tensor], draft_ids: torch.Tensor | None, verifier: str) -> Path:
    """Write trained tensors as a speculators checkpoint in bf16."""
    finished = Drafter(config, load_frozen(verifier_directory(read_identity()), torch.float32), draft_ids)
    finished.load_state_dict({name: state[name].float() for name in finished.state_dict()})
    save_checkpoint(checkpoint, finished, verifier, [], torch.bfloat16)
    return checkpoint


def decode(checkpoint: Path, params: Params) -> list[PromptCount]:
    """Greedy decoding of every held-out prompt with a drafter, in the served dtype."""
    samples = read_split(OUTPUTS / "prepare", "evaluation")
    settings = params.engine
    engine = EngineConfig(str(verifier_directory(read_identity())), settings.dtype, settings.max_model_len, settings.max_num_seqs, settings.kv_cache_bytes)
    speculative = spec_config(checkpoint, read_json(checkpoint / "config.json"))
    with EngineProcess(replace(engine, speculative=speculative), "decode") as process:
        completions: list[Completion] = process.generate([Request(s.id, s.prompt_ids, MAX_TOKENS) for s in samples])
    kinds = {s.id: s.kind for s in samples}
    return [prompt_count(completion, kinds[completion.id]) for completion in completions]


def table(names: tuple[str, str], first: list[PromptCount], second: list[PromptCount], difference: PairedDifference) -> str:
    """Both acceptance lengths and their difference with its 95 % interval, per kind and macro-averaged."""
    a, b = acceptance_length(first), acceptance_length(second)
    lines = [f"{'':<12}{names[0]:>10}{names[1]:>10}   difference (95 % interval)"]
    for kind, interval in difference.per_kind.items():
        values = (a["per_kind"][kind]["value"], b["per_kind"][kind]["value"])
        lines.append(f"{kind:<12}{values[0]:>10.3f}{values[1]:>10.3f}   {interval.estimate:+.3f} ({interval.low:+.3f} … {interval.high:+.3f})")
    macro = difference.macro
    lines.append(f"{'macro':<12}{a['macro']:>10.3f}{b['macro']:>10.3f}   {macro.estimate:+.3f} ({macro.low:+.3f} … {macro.high:+.3f})")
    return "\n".join(lines)
