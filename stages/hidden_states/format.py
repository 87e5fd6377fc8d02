"""What a sample of hidden states is, and the plan that one dump of them follows.

Letters: `T` tokens, `L` tapped layers, `H` hidden size. Layer id `i` is the residual stream entering layer `i`; the
id `num_layers` is the last layer's output before the final norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.artifacts import canonical_json, digest_json, sha256_bytes
from stages.errors import DraftlineError

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one stored value, by dtype name."""


class SampleMismatch(DraftlineError):  # noqa: N818 - it says what is wrong, not that something is
    """One sample's stored states are not those of the sample that was asked for; the other samples are not affected."""


class UnusableSampleError(SampleMismatch):
    """There are no states of this sample, and will be none: training goes on without it."""


REJECTED_FRACTION = 0.01
"""Samples that may be unusable; more mean that something is wrong with all of them."""


def allowed_rejections(samples: int) -> int:
    """How many of `samples` may be unusable: a hundredth, and one in any case."""
    return max(1, int(REJECTED_FRACTION * samples))


@dataclass
class HiddenSample:
    """One sample as it leaves the engine or the disk.

    Attributes:
        id: the sample's id in the data set.
        token_ids: `[T]` int64, the tokens that the states belong to.
        hidden_states: `[T, L+1, H]`: the tapped layers in ascending order, then the last layer's output before the final norm.
    """

    id: str
    token_ids: torch.Tensor
    hidden_states: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """Everything that a dump depends on: the same plan gives the same bytes on the same machine.

    Attributes:
        verifier: digest of the verifier's identity.
        layer_ids: the tapped ids, ascending, then `num_layers`.
        hidden_size: `H`.
        dtype: of the stored states and of the engine.
        max_seq_len: longest sample, tokens; it sizes the engine.
        data: digest of ids and tokens of all samples, in order (`data_digest`).
        samples: number of samples.
        tokens: sum of their lengths.
        samples_per_shard: samples that are extracted together: it decides which ones share a forward pass.
        max_num_seqs: sequences that the engine prefills at a time; it decides the same.
    """

    verifier: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    max_seq_len: int
    data: str
    samples: int
    tokens: int
    samples_per_shard: int = 64
    max_num_seqs: int = 8

    @property
    def digest(self) -> str:
        return digest_json(self.to_json())

    @property
    def stored_ids(self) -> tuple[int, ...]:
        """The ids that are extracted and stored: once each, also where `num_layers` is tapped as well."""
        return tuple(sorted(set(self.layer_ids)))

    @property
    def slots(self) -> list[int]:
        """For each of `layer_ids`, its place among the stored ids."""
        return [self.stored_ids.index(layer) for layer in self.layer_ids]

    def tapped(self, states: torch.Tensor) -> torch.Tensor:
        """`[T, L+1, H]`, in the order of `layer_ids`, of stored states `[T, stored ids, H]`; `states` itself where the two are the same."""
        slots = self.slots
        return states if slots == list(range(len(slots))) else states[:, slots]

    @property
    def token_bytes(self) -> int:
        """Stored bytes of one token's states."""
        return len(self.stored_ids) * self.hidden_size * ITEM_BYTES[self.dtype]

    @property
    def shards(self) -> int:
        return -(-self.samples // self.samples_per_shard)

    def shard_range(self, index: int) -> range:
        """Positions in the data set of the samples of shard `index`."""
        first = index * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.samples))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"layer_ids": list(self.layer_ids)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        return cls(**{**value, "layer_ids": tuple(value["layer_ids"])})


def plan_differences(existing: object, wanted: Mapping[str, Any]) -> list[str]:
    """`field: existing value, wanted value` for every field in which two plans (as JSON) differ; `existing` comes from a disk."""
    if not isinstance(existing, Mapping):
        return [f"{type(existing).__name__} there, an object wanted"]
    absent = "absent"
    return [
        f"{name} {existing.get(name, absent)!r} there, {wanted.get(name, absent)!r} wanted"
        for name in dict.fromkeys([*wanted, *existing])
        if existing.get(name, absent) != wanted.get(name, absent)
    ]


def data_digest(samples: Iterable[tuple[str, list[int]]]) -> str:
    """Digest of (id, token ids) of all samples in order. What extraction does not read (loss mask, text) does not count."""
    return digest_json([sha256_bytes(canonical_json([sample, tokens]).encode()) for sample, tokens in samples])


def estimate_bytes(plan: Plan, tokens: int | None = None) -> int:
    """Size of a dump, or of `tokens` tokens of it: states and token ids (int32)."""
    return (plan.tokens if tokens is None else tokens) * (plan.token_bytes + 4)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. The extremes prove it in one pass, several times as fast as a copy: a NaN is both of them."""
    return tensor.numel() == 0 or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def refusal(sample: str, token_ids: torch.Tensor, hidden_states: torch.Tensor, expected: list[int], plan: Plan) -> str | None:
    """Why freshly extracted states are not those of a sample, or None if they are.

    Args:
        token_ids: `[T]`, as the engine reports them.
        hidden_states: `[T, stored ids, H]`.
        expected: the sample's token ids.
    """
    shape = (len(expected), len(plan.stored_ids), plan.hidden_size)
    if tuple(hidden_states.shape) != shape:
        return f"sample {sample}: states of shape {tuple(hidden_states.shape)}, expected {shape} (tokens, layers, hidden size)"
    if token_ids.tolist() != expected:
        return f"sample {sample}: the engine's token ids are not the sample's"
    if str(hidden_states.dtype).removeprefix("torch.") != plan.dtype:
        return f"sample {sample}: states of dtype {hidden_states.dtype}, expected {plan.dtype}"
    if not all_finite(hidden_states):
        return f"sample {sample}: states that are not finite"
    return None
