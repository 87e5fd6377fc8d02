"""One spelling for the quantization that checkpoints declare in a dozen ways.

    {"method", "bits", "group_size", "ignored", "kv_cache_dtype", "dtype", "details"}

`details` holds whatever else the checkpoint declares (symmetry, activations, act-order, kernel version of AWQ, …), so that
every declared change is a change of the identity, whether or not a key is known here. What only records which tool wrote
the file is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

BITS = ("bits", "w_bit", "num_bits", "weight_bits")
GROUP_SIZE = ("group_size", "q_group_size")
IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude", "llm_int8_skip_modules")
KV_CACHE = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method", "kv_cache_dtype")
BOOKKEEPING = ("quant_method", "quant_algo", "producer", "quantizer", "model_name_or_path", "model_file_base_name", "damp_percent", "meta")
DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
METHOD_BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4, "nvfp4": 4, "awq": 4}
"""Bits that a method implies where the checkpoint does not say."""


def simplified(value: Any) -> Any:
    """JSON value without nulls in mappings (null and absent mean the same) whole floats as integers, infinities as text."""
    if isinstance(value, Mapping):
        return {str(key): simplified(item) for key, item in sorted(value.items()) if item is not None}
    if isinstance(value, list):
        return [simplified(item) for item in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else value if math.isfinite(value) else str(value)
    return value


def _take(declared: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """Remove all `names` from `declared`; the values that were set."""
    found = [declared.pop(name) for name in names if name in declared]
    return [value for value in found if value not in ([], "")]


def _one_or_all(values: list[Any]) -> Any:
    """The value if all agree, else the distinct ones in order."""
    distinct = [value for index, value in enumerate(values) if value not in values[:index]]
    return distinct[0] if len(distinct) == 1 else distinct or None


def _kv_cache(value: Any) -> str:
    """What the checkpoint was calibrated for, as `float8`, `int8`, `fp8`, …"""
    if isinstance(value, Mapping):
        return f"{value.get('type', 'float')}{value.get('num_bits', '')}"
    return str(value).lower()


def normalise_quantization(declared: Mapping[str, Any] | None, dtype: str) -> dict[str, Any]:
    """The normal form of a checkpoint's quantization.

    Args:
        declared: `quantization_config` of config.json, or `quantization` of hf_quant_config.json; None: not quantised.
        dtype: what the checkpoint asks to be served in.
    """
    rest = dict(simplified(declared or {}))
    # ModelOpt says quant_algo; old GPTQ files do not name the method at all.
    unnamed = "none" if not rest else "gptq" if "desc_act" in rest else "unnamed"
    method = str(rest.get("quant_method") or rest.get("quant_algo") or unnamed).lower().replace("_", "-")
    if method in {"compressed-tensors", "sparseml"}:
        method = "compressed-tensors"
        rest.pop("version", None)  # of the library that wrote it; AWQ's `version` names a kernel layout and stays
        rest.pop("quantization_status", None)
        rest.pop("global_compression_ratio", None)
    groups = [group.get("weights") or {} for _, group in sorted(rest.get("config_groups", {}).items()) if isinstance(group, Mapping)]
    bits = _one_or_all(_take(rest, BITS) + [group["num_bits"] for group in groups if "num_bits" in group])
    group_size = _one_or_all(_take(rest, GROUP_SIZE) + [group["group_size"] for group in groups if "group_size" in group])
    if bits is None and method == "none":
        bits = DTYPE_BITS.get(dtype)
    elif bits is None:
        bits = 4 if rest.get("load_in_4bit") else 8 if rest.get("load_in_8bit") else METHOD_BITS.get(method.replace("-", "_"))
    ignored = {str(module) for modules in _take(rest, IGNORED) for module in modules}
    kv_cache = _take(rest, KV_CACHE)
    if kv_cache and isinstance(kv_cache[0], Mapping):
        rest["kv_cache_scheme"] = kv_cache[0]
    for name in BOOKKEEPING:
        rest.pop(name, None)
    return {
        "method": method,
        "bits": bits,
        "group_size": group_size,
        "ignored": sorted(ignored),
        "kv_cache_dtype": _kv_cache(kv_cache[0]) if kv_cache else "auto",
        "dtype": dtype,
        "details": rest,
    }
