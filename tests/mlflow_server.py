"""A real `mlflow server` for a test: its own process, answering, ended with the block."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stages.process import end_process_tree
from stages.servers import free_port
from stages.tracking import TrackingError, connect


@contextmanager
def mlflow_server(root: Path, backend: str, env: Mapping[str, str] | None = None, seconds: float = 240.0) -> Iterator[str]:
    """The URI of a server that keeps artifacts itself, below `root`; its log is `root/log`."""
    uri = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", uri.rpartition(":")[2], "--workers", "1"]
    command += ["--backend-store-uri", backend, "--artifacts-destination", str(root / "store")]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=root, env={**os.environ, **(env or {})}, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                connect(uri).search_experiments()
                break
            except TrackingError:
                assert process.poll() is None, (root / "log").read_text()
                assert time.monotonic() < deadline, (root / "log").read_text()
                time.sleep(0.5)
        yield uri
    finally:
        end_process_tree(process.pid)
        process.wait()
