"""Checkpoints declare the same quantization in many ways; every declared change must show, tool bookkeeping must not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.pairing.quantization import normalise_quantization

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "version": "0.17.0",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "model.layers.0.mlp.gate"],
    "kv_cache_scheme": None,
}


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (None, {"method": "none", "bits": 16, "group_size": None, "ignored": [], "kv_cache_dtype": "auto"}),
        ({}, {"method": "none", "bits": 16}),
        (W8A8, {"method": "compressed-tensors", "bits": 8, "group_size": None, "ignored": ["lm_head", "model.layers.0.mlp.gate"], "kv_cache_dtype": "auto"}),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, {"method": "gptq", "bits": 4, "group_size": 128}),
        ({"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, {"method": "gptq", "bits": 4}),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "gemm"}, {"method": "awq", "bits": 4, "group_size": 64}),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["visual"]}, {"method": "awq", "bits": 4, "ignored": ["visual"]}),
        ({"quant_method": "fp8", "ignored_layers": ["lm_head"], "activation_scheme": "dynamic"}, {"method": "fp8", "bits": 8, "ignored": ["lm_head"]}),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}, {"method": "fp8", "bits": 8, "kv_cache_dtype": "fp8"}),
        ({**W8A8, "kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor"}}, {"kv_cache_dtype": "float8"}),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {"method": "bitsandbytes", "bits": 4}),
        ({"quant_method": "mxfp4"}, {"method": "mxfp4", "bits": 4}),
    ],
)
def test_normal_form(declared: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    found = normalise_quantization(declared, "bfloat16")
    assert {key: found[key] for key in expected} == expected
    assert found["dtype"] == "bfloat16"


def test_the_same_awq_declared_by_two_tools_is_the_same() -> None:
    ours = normalise_quantization({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "gemm"}, "float16")
    assert ours == normalise_quantization({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "modules_to_not_convert": None}, "float16")


def _leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    return [path]


UNSEEN = {("quant_method",), ("quantization_status",), ("version",)}
CONFIGS = [
    W8A8,
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "checkpoint_format": "gptq", "dynamic": {"-:lm_head": {}}},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": ["a"]},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "ignored_layers": ["b"]},
]


@given(config=st.sampled_from(CONFIGS), data=st.data())
def test_every_declared_value_counts_and_key_order_and_nulls_do_not(config: dict[str, Any], data: st.DataObject) -> None:
    before = normalise_quantization(config, "bfloat16")
    items = data.draw(st.permutations(list(config.items())))
    assert normalise_quantization({**dict(items), "unheard_of": None}, "bfloat16") == before
    path = data.draw(st.sampled_from([leaf for leaf in _leaves(config) if leaf not in UNSEEN]))
    changed = copy.deepcopy(config)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = ["changed"] if isinstance(place[path[-1]], list) else {"num_bits": 3} if place[path[-1]] is None or place[path[-1]] == {} else "changed"
    assert normalise_quantization(changed, "bfloat16") != before
