"""A workspace's data on its way to the repository's default DVC remote; real git and DVC, no server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flows.errors import FlowError
from flows.workspace import ensure, push_data
from stages.servers import free_port


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one file that DVC knows."""
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    for name in ("GLOBAL", "SYSTEM"):
        monkeypatch.setenv(f"DVC_{name}_CONFIG_DIR", str(tmp_path / name))
    (root / "result.txt").write_text("a result\n")
    (root / ".gitignore").write_text("/workspaces\n")
    run(root, "git", "init", "-q")
    run(root, "dvc", "init", "-q")
    run(root, "dvc", "add", "-q", "result.txt")
    run(root, "git", "add", "-A")
    run(root, "git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "start")
    return root


def run(root: Path, *words: str) -> None:
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def objects(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file()]


@pytest.mark.parametrize("words", [[], ["--local"]], ids=["config", "config.local"])
def test_with_a_default_remote_it_is_pushed(repository: Path, words: list[str]) -> None:
    """Also where it is a path relative to the repository, and where credentials would stand: in the file that git does not know."""
    folder = ensure(repository, "tiny")
    assert not push_data(repository, folder), "there is none yet"
    run(repository, "dvc", "remote", "add", "-q", *words, "-d", "store", "../store")
    assert push_data(repository, folder)
    assert [path.read_text() for path in objects(repository.parent / "store")] == ["a result\n"]
    assert objects(repository / "workspaces" / "store") == []
    assert push_data(repository, folder), "once more it is nothing to do"


def test_a_remote_that_does_not_take_it_is_one_line(repository: Path) -> None:
    folder = ensure(repository, "tiny")
    (repository.parent / "taken").write_text("a file\n")
    for url in ("../taken", f"http://127.0.0.1:{free_port()}/store"):
        run(repository, "dvc", "remote", "add", "-q", "-f", "-d", "store", url)
        with pytest.raises(FlowError, match=r"^dvc push to remote 'store': ") as refused:
            push_data(repository, folder)
        print(refused.value)
        assert "\n" not in str(refused.value)
