"""What is unpacked is what was packed, bit for bit, or an error: never other data, never another's."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts import canonical_json
from stages.hidden_states.envelope import (
    KEY,
    NOBODY,
    RUN,
    ForeignError,
    Manifest,
    Producer,
    Refusal,
    TornError,
    from_bytes,
    make_key,
    pack,
    require_origin,
    to_bytes,
    unpack,
)
from tests.hidden_states.samples import make_origin

KEY_A, KEY_B = make_key("run", "a"), make_key("run", "b")
PRODUCER = Producer(name="host:1", published=3)
DTYPES = ["bfloat16", "float16", "float32"]


def packed(tokens: int = 7, hidden: int = 3, dtype: str = "float32", layers: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Manifest]:
    """Random states and token ids, their data in one piece, their manifest."""
    generator = torch.Generator().manual_seed(tokens)
    states = torch.randn(tokens, layers, hidden, generator=generator).to(getattr(torch, dtype))
    token_ids = torch.randint(1 << 40, (tokens,), generator=generator)
    parts, manifest = pack(KEY_A, states, token_ids, make_origin(dtype, layer_ids=list(range(1, layers + 1))), PRODUCER)
    return states, token_ids, torch.cat(parts), manifest


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 40), hidden=st.integers(1, 9), layers=st.integers(1, 4), dtype=st.sampled_from(DTYPES))
def test_any_sample_comes_back_bit_for_bit(tokens: int, hidden: int, layers: int, dtype: str) -> None:
    states, token_ids, data, manifest = packed(tokens, hidden, dtype, layers)
    again = from_bytes(KEY_A, to_bytes(manifest))
    assert again == manifest
    got_states, got_ids = unpack(again, data)
    assert got_states.dtype == states.dtype
    assert torch.equal(got_states, states)
    assert torch.equal(got_ids, token_ids)


def test_infinities_and_nans_keep_their_bits() -> None:
    states = torch.tensor([0x7FC1, 0xFF80, 0x0001, 0x8000], dtype=torch.uint16).view(torch.bfloat16).reshape(1, 2, 2)
    parts, manifest = pack(KEY_A, states, torch.tensor([1]), make_origin("bfloat16"), PRODUCER)
    assert torch.equal(unpack(manifest, torch.cat(parts))[0].view(torch.int16), states.view(torch.int16))


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), dtype=st.sampled_from(DTYPES))
def test_a_flipped_bit_anywhere_is_torn(place: float, bit: int, dtype: str) -> None:
    """Of the data: states and token ids; of the manifest: text, line end and checksum."""
    _, _, data, manifest = packed(dtype=dtype)
    data[int(place * len(data))] ^= 1 << bit
    with pytest.raises(TornError, match=KEY_A):
        unpack(manifest, data)
    raw = to_bytes(manifest)
    raw[int(place * len(raw))] ^= 1 << bit
    with pytest.raises(TornError, match=KEY_A):
        from_bytes(KEY_A, raw)


@settings(max_examples=60, deadline=None)
@given(kept=st.floats(0, 1, exclude_max=True))
def test_what_is_cut_short_or_too_long_is_torn(kept: float) -> None:
    _, _, data, manifest = packed()
    raw = to_bytes(manifest)
    for wrong in (data[: int(kept * len(data))], torch.cat([data, data[:1]])):
        with pytest.raises(TornError):
            unpack(manifest, wrong)
    for wrong in (raw[: int(kept * len(raw))], torch.cat([raw, raw[:1]])):
        with pytest.raises(TornError):
            from_bytes(KEY_A, wrong)


def test_the_manifest_of_another_key_or_format_is_refused_by_name() -> None:
    *_, manifest = packed()
    with pytest.raises(TornError, match=f"sample {KEY_B}: the manifest is that of {KEY_A}"):
        from_bytes(KEY_B, to_bytes(manifest))
    with pytest.raises(TornError, match="format 2, this version reads 1"):
        from_bytes(KEY_A, to_bytes(manifest.model_copy(update={"format": 2})))


def signed(text: str) -> torch.Tensor:
    """A manifest of any text, with a checksum that fits."""
    return torch.frombuffer(bytearray(f"{text}\n{xxhash.xxh3_128_hexdigest(text.encode())}".encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "changed",
    [{"tokens": 8}, {"hidden_size": 4}, {"bytes": 1}, {"tokens": -7}, {"origin": None}, {"refusal": {"reason": "both"}}, {"extra": 1}, {"producer": None}],
    ids=str,
)
def test_a_manifest_that_contradicts_itself_is_torn(changed: dict[str, Any]) -> None:
    """Whoever reaches the store can write there; the reader must not die of it."""
    *_, manifest = packed()
    with pytest.raises(TornError, match="not a manifest"):
        from_bytes(KEY_A, signed(canonical_json(manifest.model_dump() | changed)))


@pytest.mark.parametrize("text", ["", "[]", "1", "null", "{", "{}"])
def test_what_is_no_manifest_at_all_is_torn(text: str) -> None:
    with pytest.raises(TornError):
        from_bytes(KEY_A, signed(text))


def test_a_refusal_survives_the_trip() -> None:
    manifest = Manifest(key=KEY_A, producer=PRODUCER, refusal=Refusal(reason="no room: ünïcode\nsecond line", number=28, again=True))
    assert from_bytes(KEY_A, to_bytes(manifest)) == manifest


OTHER: dict[str, Any] = {"verifier": "w" * 64, "layer_ids": [1, 5], "dtype": "float16"}


@pytest.mark.parametrize("fields", [fields for count in (1, 2, 3) for fields in combinations(OTHER, count)], ids="+".join)
def test_a_sample_of_another_kind_is_refused_naming_every_differing_field(fields: tuple[str, ...]) -> None:
    *_, manifest = packed()
    mine = manifest.model_copy(update={"origin": make_origin()})
    assert require_origin(mine, make_origin()) == make_origin()
    with pytest.raises(ForeignError, match="producer host:1") as refused:
        require_origin(mine, make_origin(**{field: OTHER[field] for field in fields}))
    assert [field for field in OTHER if f"{field} " in str(refused.value)] == list(fields)


@settings(max_examples=200, deadline=None)
@given(run=st.text(st.characters(exclude_categories=()), max_size=40), request=st.text(st.characters(exclude_categories=()), max_size=60))
def test_every_key_names_one_object_and_nothing_else(run: str, request: str) -> None:
    """Runs and request ids come from clients; lone surrogates, slashes, line ends and all."""
    key = make_key(run, request)
    assert KEY.fullmatch(key)
    assert key.startswith(f"{run if RUN.fullmatch(run) else NOBODY}-")
    assert key != make_key(run, f"{request}x")


@pytest.mark.parametrize("run", ["../..", "a/b", "", "A", "run-1", "x" * 33, "a\n", "ü", "\x00", "a*"])
def test_a_run_that_is_no_name_counts_as_none(run: str) -> None:
    assert make_key(run, "1") == make_key(NOBODY, "1")
