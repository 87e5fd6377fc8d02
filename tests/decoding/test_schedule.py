"""The prefix scheduler: what it admits, that it stays lossless, and that a version that looks ahead would not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from stages.decoding.schedule import ScheduleError, batch_ranges, choose_at, choose_draft_tokens, hardware_lengths, static_lengths, too_slow
from tests.decoding.tables import table

RUNS = hypothesis_settings(max_examples=150, deadline=None)


def brute_force(survival: list[list[float]], seconds: list[float]) -> list[int]:
    """The paper's loop, word for word: admit the best slot that is left, until the rate no longer grows."""
    requests = len(survival)
    lengths = [0] * requests
    expected, tokens = float(requests), 0
    while True:
        ahead = [(-row[lengths[r]], lengths[r], r) for r, row in enumerate(survival) if lengths[r] < len(row)]
        if not ahead:
            return lengths
        negative, _, r = min(ahead)
        if not (expected - negative) / seconds[tokens + 1] > expected / seconds[tokens]:
            return lengths
        expected, tokens = expected - negative, tokens + 1
        lengths[r] += 1


@st.composite
def offers(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Survival `[R, K]`, products of confidences in sixteenths (exact sums, ties at times), and seconds `[1 + R·K]`, non-decreasing."""
    requests, slots = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    confidence = draw(st.lists(st.lists(st.integers(0, 16), min_size=slots, max_size=slots), min_size=requests, max_size=requests))
    survival = (torch.tensor(confidence, dtype=torch.float64) / 16).cumprod(dim=1)
    steps = draw(st.lists(st.integers(0, 8), min_size=requests * slots, max_size=requests * slots))
    start = draw(st.integers(1, 60))
    return survival, torch.tensor([start, *itertools.accumulate(steps, initial=start)][1:], dtype=torch.float64)


@RUNS
@given(offers())
def test_it_is_the_published_loop(offer: tuple[Tensor, Tensor]) -> None:
    survival, seconds = offer
    lengths = hardware_lengths(survival, seconds)
    assert lengths.tolist() == brute_force(survival.tolist(), seconds.tolist())
    assert lengths.shape == (len(survival),)
    assert bool(((lengths >= 0) & (lengths <= survival.shape[1])).all())


@RUNS
@given(st.integers(1, 5), st.integers(1, 5), st.floats(0.0, 0.5), st.integers(0, 2**31))
def test_which_place_a_request_has_in_the_batch_does_not_matter(requests: int, slots: int, slope: float, seed: int) -> None:
    """Equal survivals are told apart by place; here no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    survival = torch.rand(requests, slots, generator=generator, dtype=torch.float64).cumprod(dim=1)
    seconds = 1.0 + slope * torch.arange(1 + requests * slots)
    order = torch.randperm(requests, generator=generator)
    assert torch.equal(hardware_lengths(survival[order], seconds), hardware_lengths(survival, seconds)[order])


@RUNS
@given(offers(), st.data())
def test_a_slot_is_admitted_without_a_look_at_what_lies_behind_it(offer: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    """Losslessness in one property: confidences after slot j, which hang on its token, never change whether slot j is verified."""
    survival, seconds = offer
    request = data.draw(st.integers(0, len(survival) - 1))
    slot = data.draw(st.integers(0, survival.shape[1] - 1))
    other = survival.clone()
    scale = data.draw(st.integers(0, 16)) / 16
    behind = survival[request, slot] * torch.tensor([scale ** (1 + step) for step in range(survival.shape[1] - slot - 1)], dtype=torch.float64)
    other[request, slot + 1 :] = behind
    for before, after in (
        (hardware_lengths(survival, seconds), hardware_lengths(other, seconds)),
        (static_lengths(survival, 0.4), static_lengths(other, 0.4)),
    ):
        assert bool(before[request] > slot) == bool(after[request] > slot)


@RUNS
@given(offers(), st.integers(0, 15))
def test_a_threshold_cuts_at_the_first_slot_below_it(offer: tuple[Tensor, Tensor], sixteenths: int) -> None:
    survival, _ = offer
    threshold = sixteenths / 16
    expected = [next((j for j, value in enumerate(row) if value < threshold), len(row)) for row in survival.tolist()]
    assert static_lengths(survival, threshold).tolist() == expected


@RUNS
@given(offers(), st.data())
def test_drafts_that_are_not_there_are_not_verified(offer: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    survival, seconds = offer
    available = torch.tensor([data.draw(st.integers(0, survival.shape[1])) for _ in survival])
    short = [row[:count] for row, count in zip(survival.tolist(), available.tolist(), strict=True)]
    assert hardware_lengths(survival, seconds, available).tolist() == brute_force(short, seconds.tolist())
    assert bool((static_lengths(survival, 0.2, available) <= available).all())


def test_verification_goes_where_it_is_worth_most() -> None:
    survival = torch.tensor([[0.9, 0.8, 0.7], [0.5, 0.1, 0.05]])
    flat, steep = torch.full((7,), 1.0), torch.linspace(1.0, 4.0, 7)
    assert hardware_lengths(survival, flat).tolist() == [3, 3]
    assert hardware_lengths(survival, steep).tolist() == [0, 0]
    assert hardware_lengths(survival, 1.0 + 0.2 * torch.arange(7)).tolist() == [3, 0]


# Losslessness, measured. Three tokens, two requests with two slots each. The confidence of slot 2 hangs on the token drafted in slot 1.
VERIFIER = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
DRAFTER = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
FIRST = float(torch.minimum(VERIFIER, DRAFTER).sum())
SECOND = (0.95, 0.05, 0.05)
"""Confidence of slot 2 after each token."""
SAMPLES = 200_000
SIGNIFICANT = 13.8
"""Chi-square with two degrees of freedom: p = 0.001."""

Choose = Callable[[Tensor, Tensor], Tensor]


def look_ahead(survival: Tensor, seconds: Tensor) -> Tensor:
    """The best place to stop over all slots of the step: what must not be done."""
    value, order = survival.T.reshape(-1).sort(descending=True, stable=True)
    rate = (len(survival) + torch.cat([value.new_zeros(1), value.cumsum(dim=0)])) / seconds
    return torch.bincount(order[: int(rate.argmax())] % len(survival), minlength=len(survival))


def verified(choose: Choose, seconds: Tensor) -> Tensor:
    """`[3, 3]` how many drafts of the first request are verified, by the tokens that both requests drafted in slot 1."""
    table = torch.zeros(3, 3, dtype=torch.long)
    for mine, other in itertools.product(range(3), repeat=2):
        confidence = torch.tensor([[FIRST, SECOND[mine]], [FIRST, SECOND[other]]], dtype=torch.float64)
        table[mine, other] = choose(confidence.cumprod(dim=1), seconds)[0]
    return table


def chi_square(choose: Choose, seconds: Tensor) -> float:
    """Of the first token that the first request commits in each of `SAMPLES` steps, against the verifier's distribution."""
    generator = torch.Generator().manual_seed(0)
    mine, other = (torch.multinomial(DRAFTER, SAMPLES, replacement=True, generator=generator) for _ in range(2))
    fresh = torch.multinomial(VERIFIER, SAMPLES, replacement=True, generator=generator)
    instead = torch.multinomial((VERIFIER - DRAFTER).clamp(min=0.0), SAMPLES, replacement=True, generator=generator)
    accepted = torch.rand(SAMPLES, generator=generator, dtype=torch.float64) < (VERIFIER / DRAFTER)[mine]
    tokens = torch.where(verified(choose, seconds)[mine, other] > 0, torch.where(accepted, mine, instead), fresh)
    expected = VERIFIER * SAMPLES
    return float(((torch.bincount(tokens, minlength=3) - expected).square() / expected).sum())


def test_looking_ahead_would_bias_what_is_sampled_and_stopping_early_does_not() -> None:
    """A look ahead verifies the drafts that will go on well and lets the verifier draw anew in place of the others."""
    # One slot more does not pay, several do if they are likely: a valley that stopping early never crosses.
    valley = torch.tensor([1.0, 1.5, 1.95, 2.0, 2.05], dtype=torch.float64)
    assert set(verified(look_ahead, valley).flatten().tolist()) == {0, 1, 2}
    assert chi_square(look_ahead, valley) > 10 * SIGNIFICANT
    assert chi_square(hardware_lengths, valley) < SIGNIFICANT
    # Lengths that do hang on the drafts: slot 2 is verified after one token and not after the others, slot 1 always.
    slope = 1.0 + 0.15 * torch.arange(5, dtype=torch.float64)
    assert set(verified(hardware_lengths, slope).flatten().tolist()) == {1, 2}
    assert chi_square(hardware_lengths, slope) < SIGNIFICANT


# Before anything is drafted: K for each batch size.
ACCEPTANCE = {4: [0.7, 0.45, 0.3, 0.2]}


def test_the_number_of_drafts_falls_as_the_machine_fills_up() -> None:
    """Compute-bound: a token more costs what a token gives, so nothing is drafted."""
    choices = choose_draft_tokens(table(), ACCEPTANCE)
    drafts = [choice.draft_tokens for choice in choices]
    assert drafts[0] == 4
    assert drafts[-1] == 0
    assert drafts == sorted(drafts, reverse=True)
    assert all(choice.rate >= choice.alone * 0.98 for choice in choices)
    assert too_slow(choices) == []


def test_where_speculation_costs_more_than_it_gives_the_number_is_0() -> None:
    assert choose_at(table(), {4: [0.02, 0.0, 0.0, 0.0]}, 1).draft_tokens == 0
    assert choose_at(table(), {4: [1.0, 1.0, 1.0, 1.0]}, 1).draft_tokens == 4


def test_an_engine_whose_drafter_slows_it_down_even_idle_is_named() -> None:
    """A drafter follows the context also where it drafts nothing; at more than 2 % the verifier alone is the better server."""
    named = [choice.requests for choice in too_slow(choose_draft_tokens(table(idle=1.05), ACCEPTANCE))]
    assert 8 in named
    assert 1 not in named


def test_acceptance_measured_with_as_many_drafts_goes_before_that_of_longer_blocks() -> None:
    short = {2: [0.9, 0.9], 4: [0.1, 0.0, 0.0, 0.0]}
    assert choose_at(table(), short, 1).draft_tokens == 2
    with pytest.raises(ScheduleError, match=r"known for 2 positions, asked for 4"):
        choose_at(table(), {4: [0.5, 0.5]}, 1)


def test_ranges_cover_every_batch_once_and_speculate_on_nothing_that_was_not_measured() -> None:
    choices = choose_draft_tokens(table(), ACCEPTANCE)
    ranges = batch_ranges(choices, 12)
    assert ranges[0][0] == 1
    assert ranges[-1][1] == 12
    assert [entry[0] for entry in ranges[1:]] == [entry[1] + 1 for entry in ranges[:-1]]
    assert ranges[-1][2] == 0
    by_size = {size: entry[2] for entry in ranges for size in range(entry[0], entry[1] + 1)}
    assert by_size == {choice.requests: choice.draft_tokens for choice in choices} | {size: 0 for size in range(9, 13)}
    assert batch_ranges(choices, 1) == [[1, 1, 4]]
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    assert build_dynamic_sd_schedule_lookup(ranges, 12, 4) == [0, *(by_size[size] for size in range(1, 13))]
