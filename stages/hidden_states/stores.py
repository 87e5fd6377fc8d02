"""Where samples lie between an engine and whoever asked for them: named objects, written whole, read by name, removed.

A store knows nothing of samples; budget, expiry and refusals are the publisher's (`publisher.py`), waiting and
checking the receiver's (`receive.py`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from stages.errors import DraftlineError

TEMPORARY = ".tmp"


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor, not copied."""
    return memoryview(cast(Any, tensor.numpy()))


class StoreError(DraftlineError):
    """The store cannot be reached, or did not do what it was asked; it may later."""


class StoreFullError(StoreError):
    """There is no room. `number`: errno, where the system said so."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number


@dataclass(frozen=True)
class Held:
    """An object that takes room: its size, and the seconds since it was written."""

    bytes: int
    age: float


class Store(Protocol):
    """Used by several threads on the reading side, by one on the writing side. Every call returns or raises within seconds."""

    def write(self, name: str, parts: Sequence[Tensor]) -> None:
        """Write an object whole or not at all: uint8 tensors, one after the other. Raises StoreFullError, StoreError."""

    def read(self, name: str) -> Tensor | None:
        """An object's bytes, `[n]` uint8, the caller's own; None: there is none. Raises StoreError."""

    def remove(self, name: str) -> None:
        """Remove an object, also one that is being read; nothing happens where there is none. Raises StoreError."""

    def remove_run(self, run: str) -> None:
        """Remove all objects whose names start with `<run>-`. Raises StoreError."""

    def held(self) -> dict[str, Held]:
        """Everything that counts towards this producer's budget. Raises StoreError."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep other producers of the same budget out."""

    def close(self) -> None:
        """Nothing more will be asked."""


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """What the file system refuses is the store's error: whoever removes a directory in use must not take an engine down with it."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{directory}: {error.strerror or error}") from error


class FileStore:
    """A directory, in shared memory: for one machine. One budget for all producers that share it.

    Nothing is flushed to a disk: what lies here does not outlive its run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"extraction.spool = {str(directory)!r}: {error.strerror or error}") from None
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise StoreError(f"extraction.spool = {str(directory)!r}: this user may not write there; readers remove what they have read")

    def write(self, name: str, parts: Sequence[Tensor]) -> None:
        # The key of a killed producer's leftover comes never again, so a fixed temporary name cannot clash.
        temporary = self.directory / f".{name}{TEMPORARY}"
        try:
            with temporary.open("wb", buffering=0) as stream:
                # A full file system says so here, and not by SIGBUS or a short write halfway.
                if size := sum(len(part) for part in parts):
                    os.posix_fallocate(stream.fileno(), 0, size)
                for part in parts:
                    view = memory(part)
                    while view:
                        view = view[stream.write(view) :]
            temporary.replace(self.directory / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            text = f"{self.directory}: {error.strerror or error}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise StoreFullError(text, error.errno) from error
            raise StoreError(text) from error

    def read(self, name: str) -> Tensor | None:
        try:
            with (self.directory / name).open("rb", buffering=0) as stream:
                data = torch.empty(os.fstat(stream.fileno()).st_size, dtype=torch.uint8)
                view = memory(data)
                while view and (count := stream.readinto(view)):
                    view = view[count:]
                return data
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self.directory / name}: {error.strerror or error}") from error

    def remove(self, name: str) -> None:
        with _told(self.directory), suppress(FileNotFoundError):
            (self.directory / name).unlink()

    def remove_run(self, run: str) -> None:
        for pattern in (f"{run}-*", f".{run}-*{TEMPORARY}"):
            with _told(self.directory):
                for path in self.directory.glob(pattern):
                    path.unlink(missing_ok=True)

    def held(self) -> dict[str, Held]:
        found: dict[str, Held] = {}
        now = time.time()
        with _told(self.directory), os.scandir(self.directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # read and removed in between
                    if entry.name != ".lock" and entry.is_file():
                        status = entry.stat()
                        found[entry.name] = Held(status.st_size, now - status.st_mtime)
        return found

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with _told(self.directory):
            descriptor = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def close(self) -> None:
        return
