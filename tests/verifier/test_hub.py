"""`hf:` sources use the hub's own cache, offline where told so, and fail in one line where the hub is out of reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.pairing.identity import compute_identity
from tests.pairing.edits import copy_model
from tests.verifier.running import run_stage, write_params

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tiny_verifier: Path, tmp_path: Path) -> Path:
    """A hub cache that holds org/tiny at branch main, as a download leaves it."""
    repository = tmp_path / "home" / "hub" / "models--org--tiny"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return copy_model(tiny_verifier, repository / "snapshots" / COMMIT)


def test_a_cached_revision_is_linked_not_copied(hub: Path, tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    for revision in ("main", COMMIT):
        write_params(tmp_path, source=f"hf:org/tiny@{revision}")
        done = run_stage(tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        entry = tmp_path / "outputs" / "verifier" / "models" / compute_identity(hub).digest[:16]
        assert entry.is_symlink()
        assert entry.samefile(hub)


@pytest.mark.parametrize(
    ("environment", "named"),
    [({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"), ({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot reach http://127.0.0.1:9")],
)
def test_out_of_reach_is_one_clear_line(environment: dict[str, str], named: str, tmp_path: Path) -> None:
    write_params(tmp_path, source="hf:org/tiny@main")
    done = run_stage(tmp_path, HF_HOME=str(tmp_path / "home"), **environment)
    assert done.returncode == 1
    assert named in done.stderr
    assert "hf:org/tiny@main" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
