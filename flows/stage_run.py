"""One stage as a process that cannot outlive the flow: live output, status, and an end in every case.

`prefect flow-run cancel`, a killed worker and a killed flow leave subprocesses alive. So the stage is started in a session of
its own with a pipe as its standard input, and `stages/process.py` ends the whole group when that pipe closes, which the kernel
does however this process ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flows.errors import StageFailedError
from stages.process import WATCH_STDIN

KEEP_LINES = 40


def run_stage(directory: Path, name: str, on_line: Callable[[str], object], variables: dict[str, str] | None = None, force: bool = False) -> bool:
    """Run `dvc repro --single-item <name>` in `directory`.

    Args:
        on_line: called with each line of output as it comes.
        force: run it though nothing that it depends on has changed.
    Returns:
        Whether the stage's command ran; False: nothing that it depends on has changed.
    Raises:
        StageFailedError: it failed; the message is its own last line.
    """
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": str(directory),
        "PYTHONUNBUFFERED": "1",
        "DVC_NO_ANALYTICS": "1",
        WATCH_STDIN: "1",
        **(variables or {}),
    }
    process = subprocess.Popen(
        ["dvc", "--cd", str(directory), "repro", "--single-item", *(["--force"] if force else []), name],
        cwd=directory,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    last: deque[str] = deque(maxlen=KEEP_LINES)
    ran = False
    try:
        assert process.stdout is not None
        # Progress bars rewrite their line with carriage returns; universal newlines make a line of each state.
        for line in process.stdout:
            text = line.rstrip()
            if not text:
                continue
            ran = ran or text == f"Running stage '{name}':"
            last.append(text)
            on_line(text)
        status = process.wait()
    finally:
        end_group(process)
    if status != 0:
        raise StageFailedError(f"stage {name} ended with status {status}: {_reason(name, list(last))}")
    return ran


def end_group(process: subprocess.Popen[str]) -> None:
    """End everything that a stage has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _reason(name: str, lines: list[str]) -> str:
    """The stage's own line where it has said one, else the last before DVC's summary."""
    said = [line for line in lines if line.startswith(f"draftline {name}:")]
    if said:
        return said[-1]
    others = [line for line in lines if not line.startswith(("ERROR: failed to reproduce", "Running stage", "> "))]
    return others[-1] if others else "it printed nothing"
