"""One sample on its way from an engine to whoever asked for it: its bytes, and the manifest that is published after them.

Two objects per key. `<key>.data` holds the states `[T, ids, H]`, then the token ids `[T]` int64. `<key>.json` holds the
manifest and, on a second line, its own checksum; where it exists the sample is whole. Instead of a sample a manifest can
say why there will be none; an empty one says that there was no room for the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Self

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from stages.artifacts import canonical_json, sha256_bytes
from stages.errors import DraftlineError
from stages.hidden_states.format import ITEM_BYTES, Plan
from stages.hidden_states.stores import memory

FORMAT = 1
DATA = ".data"
MANIFEST = ".json"
MANIFEST_BYTES = 4096
"""Room for one manifest: what a budget reckons with for a sample beside its data."""

RUN = re.compile(r"[a-z0-9]{1,32}")
KEY = re.compile(r"[a-z0-9]{1,32}-[0-9a-f]{32}")
NOBODY = "anonymous"
"""The run of requests that name none."""


class TornError(DraftlineError):
    """A sample's bytes are not those that were published."""


class ForeignError(DraftlineError):
    """A sample comes from another verifier, or is of another kind than the plan's."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Origin(_Model):
    """What all samples of one engine have in common.

    Attributes:
        verifier: digest of the verifier's identity.
        layer_ids: the stored ids, ascending.
        dtype: of the states.
    """

    verifier: str
    layer_ids: list[int]
    dtype: str = Field(pattern="^(bfloat16|float16|float32)$")


def plan_origin(plan: Plan) -> Origin:
    """What samples for `plan` must say of themselves."""
    return Origin(verifier=plan.verifier, layer_ids=list(plan.stored_ids), dtype=plan.dtype)


class Producer(_Model):
    """A producer's own counters when it published a sample: `published`, `evicted` (unread for too long), `refused` so far."""

    name: str
    published: int = 0
    evicted: int = 0
    refused: int = 0


class Refusal(_Model):
    """Why there is no sample. `number`: errno, where the system refused; `again`: another attempt can succeed."""

    reason: str
    number: int | None = None
    again: bool = False


class Manifest(_Model):
    """See the module. `tokens`, `hidden_size`, `bytes` and `checksum` (xxh3, 128 bits, of all data) describe `<key>.data`.

    It is that of a sample, with an origin, or a refusal.
    """

    format: int = FORMAT
    key: str
    producer: Producer
    origin: Origin | None = None
    tokens: int = Field(0, ge=0)
    hidden_size: int = Field(0, ge=0)
    bytes: int = Field(0, ge=0)
    checksum: str = ""
    refusal: Refusal | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.origin is None) == (self.refusal is None):
            raise ValueError("neither a sample nor a refusal, or both")
        if self.origin is not None and self.bytes != self.states_bytes + 8 * self.tokens:
            raise ValueError(f"{self.bytes} bytes are not {self.tokens} tokens")
        return self

    @property
    def states_bytes(self) -> int:
        """Bytes of the states; the token ids follow."""
        assert self.origin is not None
        return self.tokens * len(self.origin.layer_ids) * self.hidden_size * ITEM_BYTES[self.origin.dtype]


def make_key(run: str, request_id: str) -> str:
    """The key of one attempt: vLLM makes `request_id` unique, also where a client sends the same id twice, and it may hold anything."""
    owner = run if RUN.fullmatch(run) else NOBODY
    return f"{owner}-{sha256_bytes(request_id.encode('utf-8', 'surrogatepass'))[:32]}"


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor's memory, `[n]` uint8, not copied."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def checksum(parts: Sequence[Tensor]) -> str:
    """Of uint8 tensors, one after the other."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(memory(part))
    return digest.hexdigest()


def pack(key: str, states: Tensor, token_ids: Tensor, origin: Origin, producer: Producer) -> tuple[list[Tensor], Manifest]:
    """The data of a sample, as uint8 tensors that share its memory, and its manifest.

    Args:
        states: `[T, ids, H]`. token_ids: `[T]` int64. Both on the CPU.
    """
    parts = [as_bytes(states), as_bytes(token_ids)]
    size = sum(len(part) for part in parts)
    tokens, _, hidden = states.shape
    return parts, Manifest(key=key, producer=producer, origin=origin, tokens=tokens, hidden_size=hidden, bytes=size, checksum=checksum(parts))


def _text_checksum(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8"))


def to_bytes(manifest: Manifest) -> Tensor:
    """`[n]` uint8."""
    text = canonical_json(manifest.model_dump())
    return torch.frombuffer(bytearray(f"{text}\n{_text_checksum(text)}".encode()), dtype=torch.uint8)


def from_bytes(key: str, raw: Tensor) -> Manifest:
    """Read the manifest of `key`.

    Raises:
        TornError: altered, of another format, or of another key.
    """
    text, _, check = raw.numpy().tobytes().decode("utf-8", "replace").partition("\n")
    if _text_checksum(text) != check:
        raise TornError(f"sample {key}: the manifest's checksum does not fit")
    try:
        value = json.loads(text)
        if isinstance(value, dict) and value.get("format") != FORMAT:
            raise TornError(f"sample {key}: format {value.get('format')!r}, this version reads {FORMAT}")
        manifest = Manifest.model_validate(value)
    except ValidationError as error:
        raise TornError(f"sample {key}: not a manifest: {error.errors()[0]['msg']}") from None
    except ValueError:
        raise TornError(f"sample {key}: not a manifest: no JSON") from None
    if manifest.key != key:
        raise TornError(f"sample {key}: the manifest is that of {manifest.key}")
    return manifest


def require_origin(manifest: Manifest, wanted: Origin) -> Origin:
    """The manifest's origin, which must be `wanted`.

    Raises:
        ForeignError: naming every field that differs.
    """
    origin = manifest.origin
    assert origin is not None, "a refusal has none"
    found, expected = origin.model_dump(), wanted.model_dump()
    wrong = [f"{field} {found[field]!r}, expected {expected[field]!r}" for field in expected if found[field] != expected[field]]
    if wrong:
        raise ForeignError(f"hidden states of another kind came from producer {manifest.producer.name}: {'; '.join(wrong)}")
    return origin


def unpack(manifest: Manifest, data: Tensor) -> tuple[Tensor, Tensor]:
    """The states `[T, ids, H]` and token ids `[T]` in `data` (`[n]` uint8), whose memory they share.

    Raises:
        TornError: the bytes are not those that were published.
    """
    assert manifest.origin is not None
    if len(data) != manifest.bytes or checksum([data]) != manifest.checksum:
        raise TornError(f"sample {manifest.key}: the checksum of its {len(data)} bytes is not that of the {manifest.bytes} published ones")
    shape = (manifest.tokens, len(manifest.origin.layer_ids), manifest.hidden_size)
    size = manifest.states_bytes
    states = data[:size].view(getattr(torch, manifest.origin.dtype)).view(shape)
    return states, data[size:].clone().view(torch.int64)
