"""Which fields of a checkpoint's `config.json` tie a drafter to its verifier, by what kind of drafter it is. Works without torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from stages.errors import ArtifactError


class Shape(NamedTuple):
    """What a drafter needs of its verifier; None: nothing.

    Attributes:
        layer_ids: tapped layers; None for drafters that see tokens alone.
        weights: whether it has any. tokenizer: whether it brings one of its own.
    """

    layer_ids: list[int] | None
    hidden_size: int | None
    target_hidden_size: int | None
    vocab_size: int
    draft_vocab_size: int
    mask_token_id: int | None
    weights: bool = True
    tokenizer: bool = False


def _speculators(config: dict[str, Any], layer_ids: str) -> Shape:
    layers = config["transformer_layer_config"]
    return Shape(
        layer_ids=config[layer_ids],
        hidden_size=layers["hidden_size"],
        target_hidden_size=config.get("target_hidden_size") or layers["hidden_size"],
        vocab_size=layers["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        mask_token_id=config.get("mask_token_id"),
    )


def _block(config: dict[str, Any]) -> Shape:
    return _speculators(config, "aux_hidden_state_layer_ids")


def _eagle3(config: dict[str, Any]) -> Shape:
    return _speculators(config, "eagle_aux_hidden_state_layer_ids")


def _draft_model(config: dict[str, Any]) -> Shape:
    return Shape(None, None, None, config["vocab_size"], config["vocab_size"], None, tokenizer=True)


def _ngram(config: dict[str, Any]) -> Shape:
    vocab = config["draftline"]["vocab_size"]
    return Shape(None, None, None, vocab, vocab, None, weights=False)


SHAPES = {"dspark": _block, "dflash": _block, "eagle3": _eagle3, "draft_model": _draft_model, "ngram": _ngram}


def algorithm_of(config: dict[str, Any], where: str = "config.json") -> str:
    """The kind of a checkpoint: a speculators type, or what the directory's own `draftline` key says.

    Raises:
        ArtifactError: neither is there, or it is unknown here.
    """
    own = config.get("draftline")
    kind = config.get("speculators_model_type") or (own.get("algorithm") if isinstance(own, dict) else None)
    if kind is None:
        raise ArtifactError(f"{where}: key 'speculators_model_type' or 'draftline' is missing: not a drafter's checkpoint")
    if kind not in SHAPES:
        raise ArtifactError(f"{where}: a drafter of kind {kind!r}; supported: {', '.join(SHAPES)}")
    return str(kind)


def shape_of(config: dict[str, Any], where: str = "config.json") -> Shape:
    """The fields of a checkpoint's `config.json` that tie it to a verifier.

    Raises:
        ArtifactError: one is missing.
    """
    try:
        return SHAPES[algorithm_of(config, where)](config)
    except KeyError as error:
        raise ArtifactError(f"{where}: key {error.args[0]!r} is missing") from None
