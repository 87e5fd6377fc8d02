"""Tensors to a file, with a full disk reported as what it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write contiguous CPU tensors as safetensors. Not atomic by itself: give it a temporary name.

    Raises:
        OSError: the file system refused (`ENOSPC`, …); safetensors has an exception of its own that hides the number.
    """
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
            if f"os error {number})" in str(error):
                raise OSError(number, os.strerror(number), str(path)) from error
        raise


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of a killed writer: ours (`.<name>.<random>.tmp`) and safetensors' (`.tmp<random>`)."""
    for pattern in (".*.tmp", ".tmp*"):
        for leftover in directory.glob(pattern):
            leftover.unlink(missing_ok=True)
