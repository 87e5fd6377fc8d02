"""Which store a run uses: what an engine's connector and training must agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from stages.hidden_states.stores import FileStore, Store


class Transport(BaseModel):
    """`kind` file: `spool` is the directory; mooncake: `master` is `host:port`, `protocol` tcp or rdma (over `rdma_devices`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["file", "mooncake"] = "file"
    spool: str | None = None
    master: str | None = None
    protocol: Literal["tcp", "rdma"] = "tcp"
    rdma_devices: str = ""

    @property
    def place(self) -> str:
        """Where samples lie, for messages; two ends with different places never meet."""
        return f"file:{self.spool}" if self.kind == "file" else f"mooncake:{self.master}"


def open_store(transport: Transport, segment_bytes: int = 0) -> Store:
    """One end of a transport.

    Args:
        segment_bytes: memory that a producer contributes (Mooncake); 0 for a reader.
    Raises:
        StoreError: unreachable, or not usable on this machine.
    """
    if transport.kind == "file":
        assert transport.spool is not None
        return FileStore(Path(transport.spool))
    from stages.hidden_states.mooncake import MooncakeStore

    assert transport.master is not None
    return MooncakeStore(transport.master, transport.protocol, transport.rdma_devices, segment_bytes)
