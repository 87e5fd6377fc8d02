"""Where the connector puts a finished sample, and how the other side takes it.

The connector knows only `Sink`; another transport is another class in `open_sink`. A key is used for one sample once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

from stages.errors import DraftlineError
from stages.hidden_states.files import save_tensors

REFUSED = ".refused"
TENSORS = ".safetensors"


class Sink(Protocol):
    """A transport's producing end. Called from one writer thread; may block, which in the end pauses the engine."""

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Publish a sample whole or not at all: `hidden_states [T, ids, H]` and `token_ids [T]`, contiguous, on the CPU."""

    def refuse(self, key: str, reason: str, number: int | None = None) -> None:
        """Publish that there will be no such sample. `number`: errno, where the system refused."""

    def close(self) -> None:
        """Nothing more will come."""


class RefusedError(DraftlineError):
    """The producer marked a sample as unusable."""


class FileSink:
    """Spool directory on one machine: `<key>.safetensors` or `<key>.refused`, each by one rename. Not flushed: a spool does not outlive its run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        temporary = self.directory / f".{key}.tmp"
        try:
            save_tensors(temporary, tensors)
            temporary.replace(self.directory / f"{key}{TENSORS}")
        finally:
            temporary.unlink(missing_ok=True)

    def refuse(self, key: str, reason: str, number: int | None = None) -> None:
        temporary = self.directory / f".{key}.tmp"
        temporary.write_text(json.dumps({"reason": reason, "errno": number}), encoding="utf-8")
        temporary.replace(self.directory / f"{key}{REFUSED}")

    def close(self) -> None:
        return


def open_sink(config: Mapping[str, Any]) -> Sink:
    """The sink that a `kv_connector_extra_config` names: `{"sink": "file", "spool": directory}`."""
    kind = config.get("sink", "file")
    if kind != "file":
        raise ValueError(f"kv_connector_extra_config.sink = {kind!r}: allowed is 'file'")
    if not config.get("spool"):
        raise ValueError("kv_connector_extra_config.spool: a directory is needed")
    return FileSink(Path(config["spool"]))


def take(directory: Path, key: str, seconds: float, alive: Callable[[], bool] = lambda: True) -> dict[str, torch.Tensor]:
    """Take one sample out of a spool directory: wait for it, load it, remove it.

    Args:
        seconds: longest wait.
        alive: asked while waiting; False ends the wait.
    Raises:
        RefusedError: the producer marked it, or it did not come in time.
        OSError: the producer's file system refused it (full).
    """
    data, refused = directory / f"{key}{TENSORS}", directory / f"{key}{REFUSED}"
    deadline = time.monotonic() + seconds
    while not data.exists():
        if refused.exists():
            mark = json.loads(refused.read_text(encoding="utf-8"))
            refused.unlink()
            if mark["errno"] is not None:
                raise OSError(mark["errno"], os.strerror(mark["errno"]), str(directory))
            raise RefusedError(mark["reason"])
        if time.monotonic() > deadline or not alive():
            raise RefusedError(f"not written within {seconds:.0f} s")
        time.sleep(0.002)
    tensors: dict[str, torch.Tensor] = load_file(data)
    data.unlink()
    return tensors
