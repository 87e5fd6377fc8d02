"""`quantization: w8a8`: a round-to-nearest INT8 copy in compressed-tensors form that vLLM serves, also on a CPU.

Weights of every linear projection become int8 with one scale per output channel; activations are quantised to int8 per
token by the engine. No calibration: a production model arrives quantised through `verifier.source`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from stages.artifacts import staged_directory
from stages.pairing.identity import VerifierIdentity
from stages.pairing.weights import INDEX, safetensors_header, weight_files
from stages.verifier.sources import VerifierError

FORMAT = 1
"""Of the written directory: counted up when the copy becomes another one, so that earlier results are not reused."""
FLOATS = ("BF16", "F16", "F32")
PROJECTION = "_proj.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "wpe.weight", "lm_head.weight", "embeddings.weight")
TEMPLATES = "additional_chat_templates"
COPIED = ("*.json", "*.jinja", "*.model*", "*.txt", "*.py")


def quantise_directory(source: Path, directory: Path, identity: VerifierIdentity) -> Path:
    """Write the W8A8 copy of the model in `source` to `directory`, atomically.

    Args:
        identity: of the model in `source`.

    Raises:
        VerifierError: already quantised, or without linear layers that this scheme knows.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from tqdm import tqdm

    method = identity.quantization["method"]
    if method != "none":
        raise _refused(f"{source} is already quantised ({method})")
    files = weight_files(source)
    projections, ignored = _modules(source, files)
    with staged_directory(directory) as staged:
        for pattern in COPIED:
            for file in source.glob(pattern):
                shutil.copyfile(file, staged / file.name)
        if (source / TEMPLATES).is_dir():
            shutil.copytree(source / TEMPLATES, staged / TEMPLATES)
        weight_map: dict[str, str] = {}
        total = 0
        bar = tqdm(total=len(projections), desc="verifier: w8a8", unit="matrix", delay=2)
        for file in files:
            tensors: dict[str, Any] = {}
            with safe_open(file, "pt") as stream:
                for name in sorted(stream.keys()):
                    weight = stream.get_tensor(name)
                    if name in projections:
                        scale = weight.float().abs().amax(dim=1, keepdim=True) / 127.0
                        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
                        tensors[name] = torch.round(weight.float() / scale).clamp(-127, 127).to(torch.int8)
                        tensors[name.removesuffix("weight") + "weight_scale"] = scale
                        bar.update()
                    else:
                        tensors[name] = weight
            save_file(tensors, staged / file.name, metadata={"format": "pt"})
            (staged / file.name).chmod(0o644)  # written 0600
            weight_map |= dict.fromkeys(tensors, file.name)
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        bar.close()
        if len(files) > 1 or (source / INDEX).is_file():
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (staged / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = quantization_config(ignored)
        (staged / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return directory


def quantization_config(ignored: list[str]) -> dict[str, Any]:
    """The scheme as compressed-tensors states it in config.json."""
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**int8, "strategy": "channel", "dynamic": False},
                "input_activations": {**int8, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ignored,
    }


def _modules(source: Path, files: list[Path]) -> tuple[set[str], list[str]]:
    """Weights to quantise, and the modules that stay (the engine takes every other linear layer for quantised)."""
    projections: set[str] = set()
    ignored = {"lm_head"}
    for file in files:
        for name, tensor in safetensors_header(file).items():
            rank, floating = len(tensor["shape"]), tensor["dtype"] in FLOATS
            if "_proj" in name and rank == 3:
                raise _refused(f"{file}: {name} holds fused experts, which are not supported")
            if name.endswith(PROJECTION) and rank == 2 and floating:
                projections.add(name)
            elif name.endswith(".weight") and rank == 2 and not name.endswith(EMBEDDINGS):
                ignored.add(name.removesuffix(".weight"))
    if not projections:
        raise _refused(f"{source}: no *{PROJECTION} to quantise")
    return projections, sorted(ignored)


def _refused(reason: str) -> VerifierError:
    return VerifierError(f"params.yaml: verifier.quantization = 'w8a8': {reason}; use as-is")
