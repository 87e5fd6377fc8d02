"""Which cases of a table run for every change, and which only with `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def long_but(kept: Callable[[Any], bool], values: Iterable[Any], ids: Sequence[str] | None = None) -> list[Any]:
    """Parameters of a test, marked `long` but for those that are kept. Tuples are the values of several arguments."""
    listed = list(values)
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=() if kept(value) else pytest.mark.long, id=ids[index] if ids else None)
        for index, value in enumerate(listed)
    ]
