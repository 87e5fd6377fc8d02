"""Mooncake Store as a `Store`: producer and reader on any nodes that reach one `mooncake_master` and each other.

A producer contributes a segment of its own memory, as large as its budget; a reader contributes none. Objects are hard
pinned: Mooncake evicts nothing, refuses where there is no room (-200), and only removal frees. Reads are one-sided: they need the
producer's process, not its Python. What Mooncake 0.3.13 was seen to do where it matters here:

- `put` on a name that exists returns 0 and stores nothing: names are used once, or removed before;
- a removal under another reader's read gives that reader mixed bytes of full length: every object has a checksum above;
- a plain removal of an object that was read lately is refused (-706): removals are forced;
- a full segment spills over into other producers' segments; only where all are full a `put` is refused: a producer's budget keeps it in its own;
- any call before `setup` or after `close` ends the process: `_client` is None then, and nothing is called.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stages.hidden_states.stores import Held, StoreError, StoreFullError

ENVIRONMENT = {
    # Bounds of every wait: without them a frozen master or producer holds a call for 30 s, an absent one for 93 s.
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
}
PACKAGES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Shared libraries that Mooncake's wheels do not bring, and the Debian packages that do."""

MIN_SEGMENT_BYTES = 1 << 24
"""Mooncake mounts nothing smaller."""
FULL, UNREACHABLE = -200, -900
ABSENT = (-704, -703)
"""No such object; one that is still being written."""
CONNECT_SECONDS = 3.0


def load_library() -> Any:
    """The module `mooncake.store`.

    Raises:
        StoreError: not installed, or system libraries are missing (with the packages that hold them).
    """
    missing = []
    for library, package in PACKAGES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append((library, package))
    if missing:
        libraries, packages = zip(*missing, strict=True)
        raise StoreError(f"extraction.transport = 'mooncake': {', '.join(libraries)} not found; install the system packages {' '.join(packages)} (Debian)")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import mooncake.store as library_module
    except ImportError as error:
        raise StoreError(f"extraction.transport = 'mooncake': {error}; install mooncake-transfer-engine") from None
    return library_module


def split_address(master: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`."""
    host, _, port = master.rpartition(":")
    return host.strip("[]"), int(port)


def own_address(master: str) -> str:
    """The address of this machine on the way to the master, by which others reach its segment.

    Raises:
        StoreError: nothing listens at `master`.
    """
    try:
        with socket.create_connection(split_address(master), timeout=CONNECT_SECONDS) as probe:
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise StoreError(f"extraction.master = {master!r}: cannot connect: {error}") from None


class MooncakeStore:
    """See the module."""

    def __init__(self, master: str, protocol: str = "tcp", devices: str = "", segment_bytes: int = 0) -> None:
        """
        Args:
            master: `host:port` of mooncake_master.
            segment_bytes: memory to contribute, 0 for a reader.
        Raises:
            StoreError: the library or the master is missing.
        """
        library = load_library()
        self.master = master
        address = own_address(master)
        self._lock = threading.Lock()
        self._written: dict[str, tuple[int, float]] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._client: Any = library.MooncakeDistributedStore()
        segment = max(segment_bytes, MIN_SEGMENT_BYTES) if segment_bytes else 0
        code = self._client.setup(address, "P2PHANDSHAKE", segment, 0, protocol, devices, master)
        if code != 0:
            self._client = None
            raise StoreError(f"extraction.master = {master!r}: Mooncake refused this client ({code}; protocol {protocol}, segment of {segment} bytes)")
        self._config = library.ReplicateConfig()
        self._config.with_hard_pin = True
        self._config.preferred_segment = self._client.get_hostname()

    def _failed(self, doing: str, name: str, code: int) -> StoreError:
        where = f"Mooncake at {self.master}"
        if code == FULL:
            return StoreFullError(f"{where} has no room for {name}")
        if code <= UNREACHABLE:
            return StoreError(f"{where}: the master does not answer ({doing} {name}: {code})")
        return StoreError(f"{where}: {doing} {name} failed ({code})")

    def _stage(self, size: int) -> Tensor:
        """The registered buffer, of at least `size` bytes: Mooncake moves bytes from and to registered memory only, and registering is slow."""
        if len(self._staging) < size:
            if len(self._staging):
                self._client.unregister_buffer(self._staging.data_ptr())
            self._staging = torch.empty(max(size, 1 << 20), dtype=torch.uint8)
            code = self._client.register_buffer(self._staging.data_ptr(), len(self._staging))
            if code != 0:
                self._staging = torch.empty(0, dtype=torch.uint8)
                raise self._failed("registering memory for", f"{size} bytes", code)
        return self._staging

    def write(self, name: str, parts: Sequence[Tensor]) -> None:
        size = sum(len(part) for part in parts)
        with self._lock:
            staging = self._stage(size)
            torch.cat(list(parts), out=staging[:size])
            code = self._client.put_from(name, staging.data_ptr(), size, self._config)
            if code != 0:
                raise self._failed("writing", name, code)
            self._written[name] = (size, time.monotonic())

    def read(self, name: str) -> Tensor | None:
        with self._lock:
            size = self._client.get_size(name)
            if size in ABSENT:
                return None
            if size < 0:
                raise self._failed("reading", name, size)
            staging = self._stage(size)
            read = self._client.get_into(name, staging.data_ptr(), size)
            if read in ABSENT:
                return None
            if read < 0:
                raise self._failed("reading", name, read)
            return staging[:read].clone()

    def remove(self, name: str) -> None:
        with self._lock:
            code = self._client.remove(name, True)
            if code not in (0, *ABSENT):
                raise self._failed("removing", name, code)
            self._written.pop(name, None)

    def remove_run(self, run: str) -> None:
        with self._lock:
            code = self._client.remove_by_regex(f"^{re.escape(run)}-.*", True)
            if code < 0:
                raise self._failed("removing", f"{run}-*", code)

    def held(self) -> dict[str, Held]:
        """Of this producer: what it wrote and nobody has removed yet."""
        with self._lock:
            names = list(self._written)
            found = self._client.batch_is_exist(names) if names else []
            if any(code < 0 for code in found):
                raise self._failed("listing", f"{len(names)} objects", min(found))
            for name, code in zip(names, found, strict=True):
                if code == 0:
                    del self._written[name]
            now = time.monotonic()
            return {name: Held(size, now - written) for name, (size, written) in self._written.items()}

    def exclusive(self) -> AbstractContextManager[None]:
        # Each producer has a segment, and so a budget, of its own.
        return nullcontext()

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                client.close()
