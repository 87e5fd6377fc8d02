"""Edits of a model directory, for tables of what must and what must not change an identity."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Edit = Callable[[Path], Path | None]
"""Changes the directory it is given; returns where the model lies afterwards if that is elsewhere."""


def copy_model(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def edit_json(directory: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((directory / name).read_text(encoding="utf-8"))
    change(content)
    (directory / name).write_text(json.dumps(content), encoding="utf-8")


def flip_weight_byte(directory: Path, position: int = -1, name: str = "model.safetensors") -> None:
    """Flip the lowest bit of one byte of the weights, counted from the end of the file."""
    path = directory / name
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def sparse_shard(path: Path, size: int) -> None:
    """A safetensors file of `size` bytes that takes no disk: one tensor of zeros."""
    header = b""
    for _ in range(3):  # the header holds the length that its own length decides
        data = size - 8 - len(header)
        header = json.dumps({"w": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}).encode()
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(size)
