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
    except ValueError as error:
        raise ArtifactError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the model, by name.

    Raises:
        ArtifactError: none, a shard is missing, or a file is shorter or longer than its own header says.
    """
    index = directory / INDEX
    if index.is_file():
        listed = json_object(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ArtifactError(f"{index}: no weight_map")
        files = [directory / name for name in sorted(set(listed.values()))]
        named_by = index.name
    else:
        files = sorted(directory.glob("*.safetensors"))
        if len(files) > 1:
            # Mistral ships the same weights a second time in its own layout.
            files = [file for file in files if not file.name.startswith("consolidated")] or files
        files = _with_series(files)
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
        except ValueError:
            raise ArtifactError(f"{file}: not a safetensors file (unreadable header)") from None
    header.pop("__metadata__", None)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != end:
        raise ArtifactError(f"{file}: {size} bytes, its header says {end}; download or copy it again")
    return dict(header)
