"""The proven pair of the registration tests, registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.pairing.identity import read_identity
from stages.register.__main__ import run as run_register
from tests.register.conftest import proven, proven_template

__all__ = ["proven", "proven_template", "registered"]


@pytest.fixture
def registered(proven: Path) -> dict[str, Any]:
    """Content of outputs/register/version.json, after a registration; the current directory is the tiny repository."""
    from stages.artifacts import read_json
    from stages.params import read_params

    run_register(read_params(), Path("outputs/register"))
    version: dict[str, Any] = read_json(Path("outputs/register/version.json"))
    assert version["verifier"] == read_identity().digest
    return version
