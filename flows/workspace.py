"""One folder per verifier: a git worktree on a branch of its own, so that two verifiers never share outputs.

    workspaces/<verifier>/         branch draftline/<verifier>; params.yaml, dvc.lock and metrics of its runs are committed there
    workspaces/.<verifier>.lock    held by the one run that works there

All workspaces share the repository's DVC cache: a result that one has is not made again in another.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from flows.errors import BusyError, FlowError

WORKSPACES = "workspaces"
AUTHOR = ("-c", "user.name=draftline", "-c", "user.email=draftline@localhost")
POLL_SECONDS = 1.0
RECORDS = ("params.yaml", "dvc.lock", "outputs/train/metrics.json", "outputs/evaluate/report.json")
"""What a workspace's branch records of its runs: the parameters, what was made from what, and the metrics."""


def git(directory: Path, *words: str) -> str:
    """Run git in `directory`; what it prints.

    Raises:
        FlowError: with git's own last line.
    """
    done = subprocess.run(["git", *words], cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
        raise FlowError(f"{directory}: git {words[0]}: {lines[-1]}")
    return done.stdout


def ensure(repository: Path, verifier: str) -> Path:
    """The workspace of a verifier, made where it is missing, with the code that the repository has now.

    What the branch holds of `dvc.lock` stays; everything else follows the repository's HEAD (`params.yaml` is written by each run).
    """
    folder = repository / WORKSPACES / verifier
    branch = f"draftline/{verifier}"
    if not (folder / ".git").exists():
        git(repository, "worktree", "prune")
        folder.parent.mkdir(exist_ok=True)
        known = git(repository, "branch", "--list", branch).strip()
        git(repository, "worktree", "add", "--quiet", *([str(folder), branch] if known else ["-b", branch, str(folder), "HEAD"]))
    else:
        _settle(folder)
    head = git(repository, "rev-parse", "HEAD").strip()
    git(folder, *AUTHOR, "merge", "--quiet", "--no-edit", "-X", "ours", head)
    _share_cache(repository, folder)
    return folder


def _settle(folder: Path) -> None:
    """Take up what a killed run has left: a merge is undone, finished results (`dvc.lock` names them) are kept."""
    if git(folder, "rev-parse", "--verify", "--quiet", "HEAD") and (Path(git(folder, "rev-parse", "--git-dir").strip()) / "MERGE_HEAD").exists():
        git(folder, "merge", "--abort")
    commit(folder, "What an interrupted run has left", *RECORDS)


def _share_cache(repository: Path, folder: Path) -> None:
    config = folder / ".dvc" / "config.local"
    text = f"[cache]\n    dir = {(repository / '.dvc' / 'cache').absolute()}\n"
    if not config.is_file() or config.read_text(encoding="utf-8") != text:
        config.parent.mkdir(exist_ok=True)
        config.write_text(text, encoding="utf-8")


@contextmanager
def claimed(repository: Path, verifier: str, busy: Literal["wait", "refuse"], seconds: float) -> Iterator[None]:
    """Be the only run that works for a verifier; the claim ends with this process.

    Raises:
        BusyError: another run works there (at once, or after `seconds` of waiting).
    """
    path = repository / WORKSPACES / f".{verifier}.lock"
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + (seconds if busy == "wait" else 0.0)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyError(f"another run works for verifier {verifier!r} ({path} is locked); wait for its end, or pass busy: wait") from None
                time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def commit(folder: Path, message: str, *paths: str) -> str | None:
    """Commit those of `paths` that exist and have changed; the commit's id, None where nothing has."""
    present = [path for path in paths if (folder / path).exists()]
    git(folder, "add", "--force", "--", *present)
    if not git(folder, "diff", "--cached", "--name-only").strip():
        return None
    git(folder, *AUTHOR, "commit", "--quiet", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def push_data(repository: Path, folder: Path) -> bool:
    """`dvc push` of a workspace's results to the repository's default remote; whether it has one.

    Raises:
        FlowError: the remote does not take them.
    """
    from dvc.config import Config
    from dvc.repo import Repo

    # As the repository sees them: with its config.local, which a workspace has not, and relative paths from where it is.
    config = Config(str(repository / ".dvc"))
    name = config["core"].get("remote")
    if not name:
        return False
    try:
        with Repo(str(folder), config={"core": {"remote": name}, "remote": config["remote"]}) as workspace:
            workspace.push()
    except Exception as error:  # A remote's library raises what it likes.
        raise FlowError(f"dvc push to remote {name!r}: {' '.join(str(error).split()) or type(error).__name__}") from None
    return True
