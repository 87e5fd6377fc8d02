"""How a stage's process starts and ends: one at a time per output directory, never longer than its parent.

`kill -9` of `dvc repro` leaves the running stage alive (measured); such an orphan would later overwrite what a
newer run has written. So a stage holds a lock on its output directory and ends when an ancestor has died.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import psutil

from stages.errors import DraftlineError
from stages.params import Params, StageParams, read_params

OUTPUTS = Path("outputs")
WATCH_STDIN = "DRAFTLINE_WATCH_STDIN"
"""Set in the environment of a stage whose standard input is a pipe that closes when whoever runs the graph has ended."""
LOCK_SECONDS = 60.0
INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell has it."""


def _ancestors() -> list[psutil.Process]:
    """The living processes above this one, up to and including `dvc` (or the parent alone without it)."""
    chain: list[psutil.Process] = []
    for process in psutil.Process().parents():
        if process.pid == 1:
            break
        chain.append(process)
        try:
            if any(Path(word).name == "dvc" for word in process.cmdline()[:3]):
                return chain
        except psutil.Error:
            break
    return chain[:1]


def _orphaned() -> bool:
    """Was this stage started by a `dvc` that is gone already?

    DVC names the stage in the environment of its command. If it was killed while the stage was still importing, nothing
    is left to watch: no ancestor is `dvc` or a Python program that runs it as a library.
    """
    if "DVC_STAGE" not in os.environ:
        return False
    for process in psutil.Process().parents():
        try:
            words = [Path(word).name for word in process.cmdline()[:3]]
        except psutil.Error:
            continue
        if "dvc" in words or any(word.startswith("python") for word in words[:1]):
            return False
    return True


def end_process_tree(pid: int, own: bool = True) -> None:
    """SIGKILL every descendant of `pid`, then `pid` itself if `own`."""
    try:
        process = psutil.Process(pid)
        victims = process.children(recursive=True) + ([process] if own else [])
    except psutil.NoSuchProcess:
        return
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue


def die_with_parent(poll_seconds: float = 0.5) -> None:
    """End this process and its children once an ancestor up to `dvc` is gone."""
    watched = _ancestors()

    def watch() -> None:
        while all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in watched):
            time.sleep(poll_seconds)
        end_process_tree(os.getpid(), own=False)
        os._exit(143)

    def guarded() -> None:
        try:
            watch()
        except psutil.NoSuchProcess:
            end_process_tree(os.getpid(), own=False)
            os._exit(143)

    if watched:
        threading.Thread(target=guarded, name="die-with-parent", daemon=True).start()


def die_with_stdin() -> None:
    """End this process's whole group (the `dvc` above it, and all below it) once the pipe at its standard input closes.

    Only where `WATCH_STDIN` is set, by a starter that gave the group to itself: elsewhere it would end a user's shell.
    """
    if WATCH_STDIN not in os.environ:
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-stdin", daemon=True).start()


@contextmanager
def output_lock(directory: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold `directory` for this process; wait at most `seconds` for another that is still ending.

    The lock file stands beside the directory's content and outlives it: DVC deletes declared outputs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DraftlineError(f"{path}: another process has written here for {seconds:.0f} s; end it, then run again") from None
                time.sleep(0.2)
        yield
    finally:
        os.close(descriptor)


def _full_disk(error: BaseException | None) -> str | None:
    """The path for which there was no space, if that is what `error` comes from; libraries wrap the OSError, or have their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return str(error.filename or OUTPUTS)
        if any(text in str(error) for text in ("No space left on device", "database or disk is full")):
            return str(OUTPUTS)
        error = error.__cause__ or error.__context__
    return None


def refused_path(error: BaseException) -> str | None:
    """`<path>: <why>` if a path that this user may not use, or that is not what is expected there, is the whole error."""
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
        return None
    return f"{os.fsdecode(error.filename)}: {error.strerror}" if isinstance(error.filename, (str, bytes, os.PathLike)) else None


def explained(error: Exception) -> str | None:
    """An error that the user can mend, in one line; None: it is ours."""
    text = refused_path(error)
    if text is None and (where := _full_disk(error)) is not None:
        text = f"{where}: no space left on the device; free some and run again, finished parts are kept"
    return text


def stage_main(name: str, stage: Callable[[Params, Path], None], alone: bool = True) -> int:
    """Run a stage: validate the whole of params.yaml, lock `outputs/<name>`, report a user's error in one line.

    Args:
        stage: called with the params (only the sections that dvc.yaml lists for it) and its output directory.
        alone: take the lock; not for a process that only helps another, which holds it.
    Returns:
        The exit status.
    """
    try:
        if _orphaned():
            raise DraftlineError("the dvc that started this stage has ended; nothing was done")
        params = cast(Params, StageParams(read_params(), name))
        output = OUTPUTS / name
        die_with_parent()
        die_with_stdin()
        with output_lock(output) if alone else nullcontext():
            stage(params, output)
    except DraftlineError as error:
        print(f"draftline {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"draftline {name}: interrupted; run again to go on from what is finished", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        text = explained(error)
        if text is None:
            raise
        print(f"draftline {name}: {text}", file=sys.stderr)
        return 1
    return 0
