"""Which files hold a model's weights, and what their headers say: plain file reading, no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from stages.errors import ArtifactError

INDEX = "model.safetensors.index.json"


def json_object(path: Path, hint: str = "") -> dict[str, Any]:
    """A file that holds a JSON object; `hint` is added where it is absent.

    Raises:
        ArtifactError: absent, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file{'; ' + hint if hint else ''}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def shown(value: Any) -> str:
    """A JSON value for one-line messages."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the model, by name: those that the engine loads.

    Raises:
        ArtifactError: none, a shard is missing, a file is shorter or longer than its own header says, or there is a copy
            of the weights that the engine prefers.
    """
    # Mistral ships the same weights a second time in its own layout. Where vLLM sees such a file, in a subdirectory too, it
    # reads that layout alone; training cannot, so what is served would not be what the identity covers.
    if second := sorted(file for file in directory.rglob("consolidated*.safetensors") if file.is_file()):
        raise ArtifactError(
            f"{second[0]}: weights in Mistral's own layout, which vLLM prefers to the other *.safetensors; "
            f"use a copy of {directory} without consolidated*.safetensors"
        )
    index = directory / INDEX
    if index.is_file():
        listed = json_object(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ArtifactError(f"{index}: weight_map = {shown(listed)}: expected an object, tensor name to file name")
        for tensor, name in listed.items():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise ArtifactError(f"{index}: weight_map.{tensor} = {shown(name)}: expected the name of a .safetensors file beside it")
        files = [directory / name for name in sorted(set(listed.values()))]
        named_by = index.name
    else:
        files = _with_series(sorted(directory.glob("*.safetensors")))
        named_by = "the other shards' names"
    if not files:
        raise ArtifactError(f"{directory}: no *.safetensors weights (other formats are not accepted)")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ArtifactError(f"{directory}: {len(missing)} of {len(files)} weight shards missing: {', '.join(missing[:8])} (named by {named_by})")
    for file in files:
        safetensors_header(file)
    return files


def _with_series(files: list[Path]) -> list[Path]:
    """Without an index, `model-00001-of-00003.safetensors` still says how many there must be."""
    expected = set(files)
    for file in files:
        match = re.fullmatch(r"(.*-)(\d+)-of-(\d+)(\.safetensors)", file.name)
        if match:
            width = len(match[2])
            expected |= {file.with_name(f"{match[1]}{number:0{width}d}-of-{match[3]}{match[4]}") for number in range(1, int(match[3]) + 1)}
    return sorted(expected)


def safetensors_header(file: Path) -> dict[str, Any]:
    """Tensor name → {"dtype", "shape", "data_offsets"}, read without loading a tensor.

    Raises:
        ArtifactError: not a safetensors file, or cut off.
    """
    with file.open("rb") as stream:
        size = file.stat().st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, 100_000_000):
            raise ArtifactError(f"{file}: not a complete safetensors file ({size} bytes)")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            raise ArtifactError(f"{file}: not a safetensors file (unreadable header)") from None
    if not isinstance(header, dict):
        raise ArtifactError(f"{file}: not a safetensors file (its header is of type {type(header).__name__}, expected an object)")
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        _check_entry(file, name, tensor)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != end:
        raise ArtifactError(f"{file}: {size} bytes, its header says {end}; download or copy it again")
    return dict(header)


def _check_entry(file: Path, name: str, tensor: Any) -> None:
    """Refuse what a header says of one tensor unless it is {"dtype", "shape", "data_offsets"}."""
    if not isinstance(tensor, dict):
        raise ArtifactError(f"{file}: header: {name} = {shown(tensor)}: expected an object with dtype, shape and data_offsets")
    shape, offsets = tensor.get("shape"), tensor.get("data_offsets")
    if not isinstance(tensor.get("dtype"), str):
        raise ArtifactError(f"{file}: header: {name}.dtype = {shown(tensor.get('dtype'))}: expected a string")
    if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
        raise ArtifactError(f"{file}: header: {name}.shape = {shown(shape)}: expected a list of integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(place, int) for place in offsets):
        raise ArtifactError(f"{file}: header: {name}.data_offsets = {shown(offsets)}: expected two integers")
