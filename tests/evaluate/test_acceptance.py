"""Acceptance is counted from committed tokens: passes without a draft cost, positions behind a cut do not count."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.decoding.engine import Completion, Round
from stages.evaluate.acceptance import per_position, positions_by_kind, prompt_count, survival


def test_a_pass_without_a_draft_counts_as_a_pass() -> None:
    completion = Completion("a", [1, 2, 3, 4, 5], "length", [Round(5, [], 0, 1), Round(6, [3, 4], 2, 3)])
    count = prompt_count(completion, "code")
    assert (count.tokens, count.passes) == (4, 2)


def test_rates_are_conditional_and_survival_is_their_product() -> None:
    rounds = [Round(5, [1, 2, 3], 3, 4), Round(9, [1, 2, 3], 1, 2), Round(11, [1, 2, 3], 0, 1), Round(12, [1, 2, 3], 1, 2)]
    table = per_position(rounds, 3)
    assert [(row["reached"], row["accepted"]) for row in table] == [(4, 3), (3, 1), (1, 1)]
    assert [row["rate"] for row in table] == [0.75, pytest.approx(1 / 3), 1.0]
    assert [row["cumulative"] for row in table] == [0.75, pytest.approx(0.25), pytest.approx(0.25)]


def test_what_a_cut_hides_is_neither_accepted_nor_rejected() -> None:
    cut_on_a_draft = Round(5, [1, 2, 3], 1, 1)
    table = per_position([cut_on_a_draft], 3)
    assert [(row["reached"], row["accepted"], row["rate"]) for row in table] == [(1, 1, 1.0), (0, 0, None), (0, 0, None)]
    ended_by_the_verifiers_own_token = Round(5, [1, 2, 3], 1, 2)
    assert [row["reached"] for row in per_position([ended_by_the_verifiers_own_token], 3)] == [1, 1, 0]


def test_short_proposals_reach_only_their_own_length() -> None:
    assert [row["reached"] for row in per_position([Round(5, [1], 1, 2), Round(7, [], 0, 1)], 3)] == [1, 0, 0]


ROUNDS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (max(pair), min(pair))), min_size=1, max_size=30)


@given(ROUNDS)
def test_without_cuts_survival_gives_the_acceptance_length(pairs: list[tuple[int, int]]) -> None:
    rounds = [Round(9, [7] * 5, accepted, accepted + 1) for _, accepted in pairs]
    table = per_position(rounds, 5)
    length = sum(entry.committed for entry in rounds) / len(rounds)
    assert math.isclose(1 + sum(row["cumulative"] for row in table), length)
    for row in table:
        assert math.isclose(row["cumulative"], sum(entry.accepted >= row["position"] for entry in rounds) / len(rounds), abs_tol=1e-12)


@given(ROUNDS)
def test_what_k_drafts_are_worth_counts_the_rounds_that_had_fewer(pairs: list[tuple[int, int]]) -> None:
    """Prompt lookup that is right whenever it finds something, but seldom finds anything, gains little."""
    rounds = [Round(9, [7] * drafted, accepted, accepted + 1) for drafted, accepted in pairs]
    assert math.isclose(1 + sum(survival(rounds, 5)), sum(entry.committed for entry in rounds) / len(rounds))


def test_what_a_cut_hides_counts_for_no_number_of_drafts() -> None:
    ended_by_a_draft, by_its_own_token = Round(5, [1, 2, 3], 1, 1), Round(5, [1], 1, 2)
    assert survival([ended_by_a_draft, by_its_own_token], 3) == [1.0, 0.0, 0.0]
    assert survival([ended_by_a_draft, Round(5, [1, 2, 3], 2, 3), by_its_own_token], 3) == [1.0, 0.5, 0.0]


@given(ROUNDS)
def test_kinds_add_up_to_all(pairs: list[tuple[int, int]]) -> None:
    completions = [Completion(str(i), [], "length", [Round(9, [7] * drafted, accepted, accepted + 1)]) for i, (drafted, accepted) in enumerate(pairs)]
    kinds = {completion.id: f"kind{int(completion.id) % 3}" for completion in completions}
    tables = positions_by_kind(completions, kinds, 5)
    for position, row in enumerate(tables["all"]):
        for key in ("reached", "accepted"):
            assert row[key] == sum(table[position][key] for table in tables["per_kind"].values())
