"""The lock that ties a drafter to its verifier: `verifier_lock.json` inside the speculators checkpoint.

Nothing in the speculators format names the verifier's content, and an engine that loads the wrong pair does not notice:
acceptance falls to 1.0 and no line is logged. So the whole identity travels with the weights and is held against the
verifier field by field before anything is loaded. Works without torch, reads the drafter's weights only to digest them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.artifacts import canonical_json, read_json, sha256_file
from stages.errors import ArtifactError, PairError, ParamsError
from stages.pairing.identity import Difference, VerifierIdentity, describe_differences, leaves, tokenizer_digests
from stages.pairing.shapes import Shape, shape_of
from stages.pairing.weights import json_object, safetensors_header

LOCK_FILE = "verifier_lock.json"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT_VERSION = 1


class VerifierLock(BaseModel):
    """Everything a drafter was trained against.

    Attributes:
        identity: of the verifier, whole, so that a mismatch can name the field.
        layer_ids: tapped verifier layers, ascending; empty for drafters that see tokens alone.
        hidden_size, num_layers, vocab_size: the verifier's.
        draft_vocab_size: tokens the drafter can propose, at most `vocab_size`.
        mask_token_id: stands for a position to be drafted; None for drafters without one.
        weights_sha256: of the drafter's `model.safetensors`; None for drafters without weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int
    identity: VerifierIdentity
    layer_ids: list[int]
    hidden_size: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    mask_token_id: int | None
    weights_sha256: str | None


class Check(NamedTuple):
    """One comparison of the pair: what the drafter needs, what the verifier (or the checkpoint) has."""

    field: str
    expected: Any
    actual: Any
    match: bool


def check_layer_ids(layer_ids: Sequence[int], num_layers: int, where: str = "params.yaml: extraction.layer_ids") -> None:
    """Refuse tapped layers that the verifier does not have.

    Args:
        layer_ids: ids as everywhere (id `i` enters layer `i`, id `num_layers` leaves the last one).
        where: file and field that the message names.

    Raises:
        ParamsError: an id outside 1..num_layers, or ids that are not ascending and unique (a permuted list would load
            into any engine, with the inputs of the fusion layer permuted).
    """
    ids = list(layer_ids)
    outside = [layer for layer in ids if not 1 <= layer <= num_layers]
    if outside:
        raise ParamsError(f"{where} = {ids}: {outside if len(outside) > 1 else outside[0]} is outside 1..{num_layers} (the verifier has {num_layers} layers)")
    if not ids or ids != sorted(set(ids)):
        raise ParamsError(f"{where} = {ids}: must be ascending, without repeats, and not empty")


def build_lock(identity: VerifierIdentity, drafter_config: dict[str, Any], weights_sha256: str | None) -> VerifierLock:
    """The lock of a new checkpoint.

    Args:
        drafter_config: the checkpoint's `config.json`.
        weights_sha256: of its `model.safetensors`; None where it has none.

    Raises:
        PairError: the drafter does not fit this verifier at all (layers, widths, vocabulary, mask token).
        ArtifactError: a key is missing in `drafter_config`.
    """
    shape = shape_of(drafter_config, CONFIG_FILE)
    lock = VerifierLock(
        format_version=FORMAT_VERSION,
        identity=identity,
        layer_ids=shape.layer_ids or [],
        hidden_size=identity.hidden_size,
        num_layers=identity.num_layers,
        vocab_size=identity.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        mask_token_id=shape.mask_token_id,
        weights_sha256=weights_sha256,
    )
    wrong = _failures(_fit(lock, shape, identity) + _config_checks(lock, shape, identity))
    if wrong:
        raise PairError(f"{CONFIG_FILE}: the drafter does not fit the verifier: {describe_differences(wrong, 'drafter', 'verifier')}")
    return lock


def read_lock(checkpoint: Path) -> VerifierLock:
    """The lock inside a checkpoint.

    Raises:
        ArtifactError: absent or not a lock.
        PairError: of a format that is not known here.
    """
    path = checkpoint / LOCK_FILE
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file: nothing says which verifier this drafter belongs to; run dvc repro convert")
    content = read_json(path)
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise PairError(f"{path}: format_version = {version!r}; known: {FORMAT_VERSION}")
    try:
        return VerifierLock.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ArtifactError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def all_checks(checkpoint: Path, identity: VerifierIdentity) -> list[Check]:
    """Every comparison of a checkpoint with a verifier, matching or not.

    Raises:
        ArtifactError: lock, config.json or weights are missing or broken.
    """
    lock = read_lock(checkpoint)
    config = json_object(checkpoint / CONFIG_FILE, "a drafter checkpoint has a config.json")
    shape = shape_of(config, str(checkpoint / CONFIG_FILE))
    checks = _identity_checks(lock.identity, identity) + _fit(lock, shape, identity) + _config_checks(lock, shape, identity)
    if shape.tokenizer:
        checks += _tokenizer_checks(checkpoint, identity)
    weights = checkpoint / WEIGHTS_FILE
    if not shape.weights:
        return [*checks, _equal("drafter.weights", lock.weights_sha256, sha256_file(weights) if weights.is_file() else None)]
    if not weights.is_file():
        raise ArtifactError(f"{weights}: no such file; run dvc repro convert")
    header = safetensors_header(weights)
    if "fc.weight" in header and shape.layer_ids is not None and shape.hidden_size is not None:
        width = len(shape.layer_ids) * shape.hidden_size
        checks.append(_equal("drafter.fc.weight.shape", [shape.hidden_size, width], header["fc.weight"]["shape"]))
    checks.append(_equal("drafter.weights", lock.weights_sha256, sha256_file(weights)))
    return checks


def check_pair(checkpoint: Path, identity: VerifierIdentity) -> list[Difference]:
    """Every field in which a checkpoint does not belong to a verifier; empty: the pair matches.

    Raises:
        ArtifactError: lock, config.json or weights are missing or broken.
    """
    return _failures(all_checks(checkpoint, identity))


def require_pair(checkpoint: Path, identity: VerifierIdentity) -> None:
    """Let a matching pair pass.

    Raises:
        PairError: names every differing field with both values.
        ArtifactError: lock, config.json or weights are missing or broken.
    """
    found = check_pair(checkpoint, identity)
    if found:
        raise PairError(refusal(checkpoint, found))


def refusal(checkpoint: Path, found: Sequence[Difference]) -> str:
    """The one line for a pair that does not match."""
    fields = "1 field differs" if len(found) == 1 else f"{len(found)} fields differ"
    return f"{checkpoint}: this drafter does not belong to this verifier: {fields}: {describe_differences(found, 'drafter', 'verifier')}"


def _equal(field: str, expected: Any, actual: Any) -> Check:
    return Check(field, expected, actual, canonical_json(expected) == canonical_json(actual))


def _failures(checks: Sequence[Check]) -> list[Difference]:
    return [Difference(check.field, check.expected, check.actual) for check in checks if not check.match]


def _identity_checks(expected: VerifierIdentity, actual: VerifierIdentity) -> list[Check]:
    left, right = leaves(expected.model_dump(mode="json")), leaves(actual.model_dump(mode="json"))
    return [_equal(name, left.get(name), right.get(name)) for name in sorted(left.keys() | right.keys())]


def _fit(lock: VerifierLock, shape: Shape, identity: VerifierIdentity) -> list[Check]:
    """Would the drafter fit the verifier's tensors? Named apart from the identity: these numbers tell why."""
    deepest = max(lock.layer_ids, default=0)
    ascending = bool(lock.layer_ids) and lock.layer_ids == sorted(set(lock.layer_ids)) and lock.layer_ids[0] >= 1
    taps = [] if shape.layer_ids is None else [Check("layer_ids", "ascending, from 1", lock.layer_ids, ascending)]
    tapped = f"at least {deepest} (tapped layers {lock.layer_ids})"
    mask = lock.mask_token_id
    return [
        *taps,
        Check("num_layers", tapped, identity.num_layers, deepest <= identity.num_layers),
        _equal("hidden_size", lock.hidden_size, identity.hidden_size),
        _equal("vocab_size", lock.vocab_size, identity.vocab_size),
        Check("draft_vocab_size", f"{lock.draft_vocab_size} tokens", f"{identity.vocab_size} tokens", 0 < lock.draft_vocab_size <= identity.vocab_size),
        Check("mask_token_id", mask, f"ids 0..{identity.vocab_size - 1}", mask is None or 0 <= mask < identity.vocab_size),
    ]


def _config_checks(lock: VerifierLock, shape: Shape, identity: VerifierIdentity) -> list[Check]:
    """Does the checkpoint's config.json, which engines read, say what the lock says?"""
    states = [
        _equal("drafter.aux_hidden_state_layer_ids", shape.layer_ids, lock.layer_ids),
        _equal("drafter.hidden_size", shape.hidden_size, identity.hidden_size),
        _equal("drafter.target_hidden_size", shape.target_hidden_size, identity.hidden_size),
    ]
    return [
        *(states if shape.layer_ids is not None else []),
        _equal("drafter.vocab_size", shape.vocab_size, identity.vocab_size),
        _equal("drafter.draft_vocab_size", shape.draft_vocab_size, lock.draft_vocab_size),
        _equal("drafter.mask_token_id", shape.mask_token_id, lock.mask_token_id),
    ]


def _tokenizer_checks(checkpoint: Path, identity: VerifierIdentity) -> list[Check]:
    """Does a drafter that brings a tokenizer bring the verifier's? Ids of another one would mean other words."""
    own = tokenizer_digests(checkpoint)
    return [_equal(f"drafter.tokenizer.{name}", own.get(name), identity.tokenizer.get(name)) for name in sorted(own.keys() | identity.tokenizer.keys())]
