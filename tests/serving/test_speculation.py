"""How many tokens a server drafts: by what was measured on this machine with this pair, or as ever."""

from __future__ import annotations

from typing import Any

import pytest

from stages.decoding.costs import CostError, CostTable, costs_section
from stages.serving.speculation import Speculation, plan_speculation
from tests.decoding.tables import CHECKPOINT, MACHINE, VERIFIER, table

ACCEPTANCE = {"4": [0.7, 0.45, 0.3, 0.2]}


def report(costs: CostTable | None = None, acceptance: dict[str, list[float]] = ACCEPTANCE, **changes: Any) -> dict[str, Any]:
    measured = costs_section(costs or table(), {int(count): survival for count, survival in acceptance.items()})
    return {"verifier": VERIFIER, "checkpoint": CHECKPOINT, "costs": measured, **changes}


def plan(value: dict[str, Any], draft_tokens: int = 4, max_requests: int = 8, dtype: str = "bfloat16") -> Speculation:
    return plan_speculation(value, MACHINE, dtype, draft_tokens, max_requests, "report.json")


def test_the_setting_covers_every_batch_that_is_served_and_ends_where_speculation_stops_paying() -> None:
    out = plan(report())
    assert out.ranges is not None
    assert out.ranges[0][0] == 1
    assert out.ranges[0][2] == 4
    assert out.ranges[-1][1:] == [8, 0]
    assert "draft tokens by requests in a step: 4 at 1" in out.note
    assert plan(report(), max_requests=64).ranges == [*out.ranges[:-1], [out.ranges[-1][0], 64, 0]]


def test_without_a_measurement_nothing_is_chosen() -> None:
    assert plan({"verifier": VERIFIER, "checkpoint": CHECKPOINT}) == Speculation(None)
    assert not Speculation(None).alone


def test_where_speculation_pays_nowhere_the_verifier_is_served_alone() -> None:
    out = plan(report(acceptance={"4": [0.01, 0.0, 0.0, 0.0]}))
    assert out.alone
    assert "it pays at no batch size" in out.note


def test_an_idle_drafter_that_costs_over_two_percent_is_not_served() -> None:
    """Never slower than the verifier alone by more than 2 % in any measured cell."""
    out = plan(report(table(idle=1.05)))
    assert out.alone
    assert "over 2% slower than the verifier" in out.note
    # At the batch sizes where it drafts, what an idle drafter costs does not matter.
    assert not plan(report(table(idle=1.05)), max_requests=1).alone


def test_more_drafts_than_the_drafter_makes_are_not_chosen() -> None:
    """The engine may make one fewer than the drafter was trained for."""
    out = plan(report(acceptance={"2": [0.7, 0.45], "4": [0.7, 0.45, 0.3, 0.2]}), draft_tokens=3)
    assert out.ranges is not None
    assert max(count for _, _, count in out.ranges) == 2


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (report(verifier="c" * 64), r"report\.json: measured on another pair: verifier"),
        (report(checkpoint="c" * 64), r"report\.json: measured on another pair: checkpoint"),
        (report(table().model_copy(update={"machine": MACHINE.model_copy(update={"cores": 64})})), r"another machine: cores 64 \(here 2\); measure again"),
        (report(costs=None) | {"costs": {"table": {}, "acceptance": {}}}, r"report\.json: not a cost table: machine: Field required"),
        (report() | {"costs": {"table": table().model_dump(mode="json")}}, r"report\.json: costs: not what evaluate writes"),
        (report() | {"costs": []}, r"report\.json: costs: not what evaluate writes"),
    ],
)
def test_costs_of_anything_else_are_refused_in_one_line(value: dict[str, Any], match: str) -> None:
    with pytest.raises(CostError, match=match) as caught:
        plan(value)
    assert "\n" not in str(caught.value)
