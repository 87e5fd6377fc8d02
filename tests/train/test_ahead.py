"""Data made ahead of the step: the same values in the same order, never further ahead than memory for one more step."""

from __future__ import annotations

import threading

import pytest
import torch

from stages.train.ahead import made_ahead


def test_the_next_one_is_made_while_the_last_is_used() -> None:
    made: list[int] = []
    started = [threading.Event() for _ in range(5)]

    def make(step: int) -> int:
        started[step].set()
        made.append(step)
        return step * step

    for step, value in enumerate(made_ahead(make, range(5))):
        assert value == step * step
        if step < 4:
            assert started[step + 1].wait(10)
        assert made[-1] <= step + 1
    assert made == list(range(5))


def test_no_step_makes_nothing() -> None:
    assert list(made_ahead(lambda step: step, range(0))) == []


def test_an_error_comes_in_its_turn() -> None:
    def make(step: int) -> int:
        if step == 1:
            raise ValueError("step 1")
        return step

    values = made_ahead(make, range(3))
    assert next(values) == 0
    with pytest.raises(ValueError, match="step 1"):
        next(values)


def test_sums_have_the_order_of_the_caller() -> None:
    """Another number of threads would change last bits, and a run would not repeat."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert list(made_ahead(lambda step: torch.get_num_threads(), range(2))) == [1, 1]
    finally:
        torch.set_num_threads(before)
