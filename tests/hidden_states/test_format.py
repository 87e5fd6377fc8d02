"""The plan of a dump decides what may be mixed, and a fresh sample is checked against the one that was asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stages.hidden_states.format import Plan, all_finite, data_digest, estimate_bytes, refusal
from tests.hidden_states.samples import make_plan, make_samples


def test_a_plan_survives_json_and_its_digest_sees_every_field() -> None:
    plan = make_plan([3, 5])
    assert Plan.from_json(plan.to_json()) == plan
    for field in dataclasses.fields(Plan):
        value = getattr(plan, field.name)
        other = (*value, 7) if isinstance(value, tuple) else value + 1 if isinstance(value, int) else "other"
        assert dataclasses.replace(plan, **{field.name: other}).digest != plan.digest, field.name


def test_the_estimate_is_tokens_times_layers_times_hidden_size_times_item_size_and_the_token_ids() -> None:
    plan = make_plan([100] * 10, layer_ids=(2, 8, 15, 22, 28, 30), hidden_size=576, dtype="bfloat16")
    assert estimate_bytes(plan) == 1000 * (6 * 576 * 2 + 4)


def test_a_tapped_last_layer_is_stored_once() -> None:
    plan = make_plan([2], layer_ids=(1, 6, 6))
    assert plan.stored_ids == (1, 6)
    assert plan.slots == [0, 1, 1]


def test_shards_cover_all_samples_once_and_in_order() -> None:
    plan = make_plan([1] * 10, samples_per_shard=4)
    assert [position for index in range(plan.shards) for position in plan.shard_range(index)] == list(range(10))


def test_the_data_digest_sees_ids_tokens_and_order() -> None:
    one, two = ("a", [1, 2]), ("b", [3])
    base = data_digest([one, two])
    assert base == data_digest([one, two])
    assert len({base, data_digest([two, one]), data_digest([("a", [1]), ("b", [2, 3])]), data_digest([("a", [1, 2]), ("c", [3])]), data_digest([one])}) == 5


def test_a_fresh_sample_is_refused_for_its_length_its_tokens_its_dtype_and_values_that_are_not_finite() -> None:
    plan = make_plan([5])
    (sample,) = make_samples(plan, [5])
    tokens = sample.token_ids.tolist()

    def reason(token_ids: torch.Tensor = sample.token_ids, states: torch.Tensor = sample.hidden_states) -> str | None:
        return refusal("x", token_ids, states, tokens, plan)

    assert reason() is None
    assert "shape (4, 3, 4), expected (5, 3, 4)" in (reason(states=sample.hidden_states[:4]) or "")
    assert "token ids" in (reason(token_ids=sample.token_ids + 1) or "")
    assert "token ids" in (reason(token_ids=sample.token_ids[:4]) or "")
    assert "float64" in (reason(states=sample.hidden_states.double()) or "")
    for value in (float("nan"), float("inf")):
        broken = sample.hidden_states.clone()
        broken[2, 1, 3] = value
        assert "not finite" in (reason(states=broken) or "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_finiteness_is_exact(dtype: torch.dtype) -> None:
    huge = torch.full((300, 3, 8), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(huge), "finite, although the sum is not"
    assert all_finite(huge[:0])
    for value in (float("nan"), float("inf"), float("-inf")):
        states = torch.randn(300, 3, 8).to(dtype)
        assert all_finite(states)
        states[299, 2, 7] = value
        assert not all_finite(states)
        states[0, 0, 0] = -value
        assert not all_finite(states)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_item_sizes_are_torchs(dtype: str, size: int) -> None:
    assert torch.empty(0, dtype=getattr(torch, dtype)).element_size() == size
    assert make_plan([1], dtype=dtype, hidden_size=1, layer_ids=(1,)).token_bytes == size
