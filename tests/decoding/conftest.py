"""One tiny verifier with all its proposers for every test of the decoding loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.decoding.loops import Pair, make_pair


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads, many times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("loop"))
