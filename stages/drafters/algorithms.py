"""The drafters by `drafter.algorithm`: what the stages ask of each, in one table.

How each is trained is in stages/train/objectives.py, how vLLM is told to run it in stages/decoding/speculative.py, which of its
`config.json` ties it to a verifier in stages/pairing/shapes.py: tables by the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.artifacts import read_json, write_json
from stages.drafters import checkpoint, draft_model, eagle3
from stages.drafters.checkpoint import CONFIG
from stages.drafters.config import DrafterConfig
from stages.drafters.draft import Drafts, greedy_drafts
from stages.drafters.model import Drafter
from stages.drafters.ngram import NgramConfig, look_up
from stages.errors import DraftlineError
from stages.pairing.frozen import FrozenVerifier
from stages.pairing.identity import VerifierIdentity
from stages.pairing.shapes import algorithm_of
from stages.params import Drafter as DrafterParams


@dataclass(frozen=True)
class Target:
    """The verifier that a drafter is made for.

    Attributes:
        directory: of its files. config: its `config.json`.
        layer_ids: of which hidden states are extracted, without the last layer's output.
    """

    identity: VerifierIdentity
    directory: Path
    config: dict[str, Any]
    layer_ids: list[int]


@dataclass(frozen=True)
class Algorithm:
    """One kind of drafter. A *drafter* is a module; for prompt lookup its settings.

    Attributes:
        configure: params and target → configuration; raises DraftlineError where the verifier cannot satisfy a knob.
        create: configuration, frozen ends, draft ids (None: all), target → the drafter that training starts from; None: nothing trains.
        save_trained, load_trained: the trainer's own directory. export: the checkpoint that engines read, target's name and
            architectures given; returns its `config.json`. load: the checkpoint alone (and frozen ends) → drafter.
        redraft: greedy drafts at anchor positions `[A]` of one sequence: drafter, token ids, its aux hidden states `[T, L·H]`, positions.
        masks: whether drafted positions are held by a mask token, which must appear in no chat.
    """

    configure: Callable[[DrafterParams, Target], Any]
    create: Callable[[Any, FrozenVerifier, Tensor | None, Target], Any] | None
    save_trained: Callable[[Path, Any, torch.dtype], None]
    load_trained: Callable[[Path, FrozenVerifier, torch.dtype], Any]
    export: Callable[[Path, Any, Path, str, list[str], torch.dtype], dict[str, Any]]
    load: Callable[[Path, FrozenVerifier, torch.dtype], Any]
    redraft: Callable[[Any, Sequence[int], Tensor | None, Tensor], Drafts]
    masks: bool = False


def _shape(params: DrafterParams, target: Target) -> dict[str, Any]:
    """Widths that a drafter takes over from its verifier."""
    vocab = target.identity.vocab_size
    if params.draft_vocab_size is not None and params.draft_vocab_size > vocab:
        raise DraftlineError(f"params.yaml: drafter.draft_vocab_size = {params.draft_vocab_size}: must be at most the verifier's vocabulary, {vocab}")
    config = target.config
    heads = int(str(config["num_attention_heads"]))
    hidden = target.identity.hidden_size
    return {
        "draft_vocab_size": params.draft_vocab_size or vocab,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": params.intermediate_size or config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "rms_norm_eps": config["rms_norm_eps"],
        "max_position_embeddings": config["max_position_embeddings"],
        "rope_parameters": config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)},
    }


BLOCK_KNOBS = (
    *("algorithm", "block_size", "num_layers", "sample_from_anchor", "mask_token_id", "markov_rank", "markov_head_type"),
    *("confidence_head", "confidence_head_with_markov"),
)


def _configure_block(params: DrafterParams, target: Target) -> DrafterConfig:
    shape = _shape(params, target)
    if params.mask_token_id >= shape["vocab_size"]:
        raise DraftlineError(f"params.yaml: drafter.mask_token_id = {params.mask_token_id}: must be below the verifier's vocabulary, {shape['vocab_size']}")
    return DrafterConfig.model_validate({**params.model_dump(include=set(BLOCK_KNOBS)), **shape, "layer_ids": target.layer_ids})


def _configure_eagle3(params: DrafterParams, target: Target) -> eagle3.Eagle3Config:
    return eagle3.Eagle3Config(draft_tokens=params.tokens_per_round, layer_ids=eagle3.tapped(target.layer_ids), **_shape(params, target))


def _configure_draft_model(params: DrafterParams, target: Target) -> draft_model.DraftModelConfig:
    available = target.identity.num_layers
    if params.num_layers > available:
        raise DraftlineError(f"params.yaml: drafter.num_layers = {params.num_layers}: a draft model takes at most the verifier's layers, {available}")
    layers = draft_model.spread(params.num_layers, available)
    model = draft_model.smaller(target.config, layers, available, params.dtype)
    return draft_model.DraftModelConfig(draft_tokens=params.tokens_per_round, layers=layers, vocab_size=target.identity.vocab_size, model=model)


def _configure_ngram(params: DrafterParams, target: Target) -> NgramConfig:
    return NgramConfig(draft_tokens=params.tokens_per_round, ngram_min=params.ngram_min, ngram_max=params.ngram_max, vocab_size=target.identity.vocab_size)


def _read_ngram(content: dict[str, Any]) -> NgramConfig:
    return NgramConfig.model_validate(content.get("draftline", content))


def _save_ngram(directory: Path, config: NgramConfig, dtype: torch.dtype) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / CONFIG, config.model_dump())


def _export_ngram(directory: Path, config: NgramConfig, *ignored: object) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / CONFIG, config.export())
    return config.export()


def _redraft_ngram(config: NgramConfig, tokens: Sequence[int], context: Tensor | None, positions: Tensor) -> Drafts:
    """Where fewer than `K` tokens followed, the rest are -1."""
    found = [look_up(tokens[: anchor + 1], config) for anchor in positions.tolist()]
    return Drafts(torch.tensor([drafts + [-1] * (config.draft_tokens - len(drafts)) for drafts in found]), None, None)


def _redraft_block(drafter: Drafter, tokens: Sequence[int], context: Tensor | None, positions: Tensor) -> Drafts:
    assert context is not None
    return greedy_drafts(drafter, context, torch.tensor(tokens)[positions], positions)


def _redraft_eagle3(drafter: eagle3.Eagle3, tokens: Sequence[int], context: Tensor | None, positions: Tensor) -> Drafts:
    assert context is not None
    return eagle3.greedy_chains(drafter, context, torch.tensor(tokens), positions)


BLOCK = Algorithm(
    configure=_configure_block,
    create=lambda config, frozen, draft_ids, target: Drafter(config, frozen, draft_ids),
    save_trained=checkpoint.save_trained,
    load_trained=checkpoint.load_trained,
    export=lambda directory, drafter, verifier, name, architectures, dtype: checkpoint.save_checkpoint(directory, drafter, name, architectures, dtype),
    load=checkpoint.load_drafter,
    redraft=_redraft_block,
    masks=True,
)

ALGORITHMS: dict[str, Algorithm] = {
    "dspark": BLOCK,
    "dflash": BLOCK,
    "eagle3": Algorithm(
        configure=_configure_eagle3,
        create=lambda config, frozen, draft_ids, target: eagle3.Eagle3(config, frozen, draft_ids),
        save_trained=checkpoint.save_trained,
        load_trained=checkpoint.load_trained,
        export=BLOCK.export,
        load=checkpoint.load_drafter,
        redraft=_redraft_eagle3,
    ),
    "draft_model": Algorithm(
        configure=_configure_draft_model,
        create=lambda config, frozen, draft_ids, target: draft_model.from_verifier(config, frozen, target.directory),
        save_trained=draft_model.save_trained,
        load_trained=draft_model.load_trained,
        export=lambda directory, model, verifier, name, architectures, dtype: draft_model.save_checkpoint(directory, model, verifier, dtype),
        load=lambda directory, frozen, dtype: draft_model.load_draft_model(directory, dtype),
        redraft=lambda model, tokens, context, positions: draft_model.greedy_continuations(model, torch.tensor(tokens), positions),
    ),
    "ngram": Algorithm(
        configure=_configure_ngram,
        create=None,
        save_trained=_save_ngram,
        load_trained=lambda directory, frozen, dtype: _read_ngram(read_json(directory / CONFIG)),
        export=_export_ngram,
        load=lambda directory, frozen, dtype: _read_ngram(read_json(directory / CONFIG)),
        redraft=_redraft_ngram,
    ),
}


def trained_algorithm(directory: Path) -> Algorithm:
    """Of the trainer's own directory."""
    return ALGORITHMS[read_json(directory / CONFIG)["algorithm"]]


def checkpoint_algorithm(directory: Path) -> Algorithm:
    """Of a checkpoint.

    Raises:
        ArtifactError: its `config.json` names no drafter that is known here.
    """
    return ALGORITHMS[algorithm_of(read_json(directory / CONFIG), str(directory / CONFIG))]
