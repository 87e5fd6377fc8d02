"""Where the tests find what is not theirs: the repository and the folder of facts, cases and data beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"


def shared(relative: str) -> Path:
    """A file or folder below `../shared`; the calling test is skipped where it is absent."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path
