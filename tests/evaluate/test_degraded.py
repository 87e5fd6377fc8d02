"""A lossless drafter is never failed for what its verifier does by itself, nor by chance; a drafter that breaks outputs is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from stages.decoding.engine import Completion
from stages.evaluate.degraded import CHANCE, SIGNS, compare_outputs, degraded, enough_prompts, failures, loops

EOS = {2}
PROMPTS = 30


def completion(tokens: list[int], name: str = "a", reason: str | None = None) -> Completion:
    return Completion(name, tokens, reason or ("stop" if tokens and tokens[-1] in EOS else "length"), [])


def varied(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(10, 5000) for _ in range(length)]


@pytest.mark.parametrize("period", [1, 2, 7, 32])
def test_a_piece_repeated_to_the_end_is_a_loop(period: int) -> None:
    piece = varied(period)
    copies = max(4, -(-24 // period))
    assert loops(varied(20, 1) + piece * copies)
    assert loops(varied(20, 1) + (piece * (copies + 1))[: copies * period + period // 2])
    assert not loops(varied(20, 1) + piece * copies + varied(40, 2))


def test_short_runs_lists_and_tables_are_no_loops() -> None:
    assert not loops([])
    assert not loops([5] * 23)
    assert not loops(varied(33) * 4)
    assert not loops([token for row in range(8) for token in (7, 8, 100 + row, 9)])


def test_an_output_equal_to_its_reference_is_ok_whatever_it_is() -> None:
    for tokens in ([2], [*varied(3), 2], [5] * 60):
        assert degraded(completion(tokens), completion(tokens), EOS) == set()


def test_a_sign_counts_only_where_the_reference_does_not_show_it() -> None:
    long, looping = varied(100), varied(20) + [5] * 40
    assert degraded(completion(looping), completion(long), EOS) == {"loops"}
    assert degraded(completion(looping), completion([5] * 30), EOS) == set()
    assert degraded(completion([2]), completion(long), EOS) == {"empty"}
    assert degraded(completion([]), completion(long), EOS) == {"empty"}
    assert degraded(completion([*long[:49], 2]), completion(long), EOS) == {"truncated"}
    assert degraded(completion([*long[:50], 2]), completion(long), EOS) == set()
    assert degraded(completion(long[:49]), completion(long), EOS) == set(), "cut by the limit of tokens, not by itself"


def verifier_output(generator: random.Random) -> list[int]:
    """What a small verifier does at temperature 1: now and then it loops, says nothing or stops after a few words."""
    kind = generator.random()
    if kind < 0.3:
        return varied(30, generator.randrange(10**9)) + [5] * 50
    if kind < 0.4:
        return [2]
    if kind < 0.6:
        return [*varied(generator.randrange(1, 30), generator.randrange(10**9)), 2]
    return [*varied(generator.randrange(40, 128), generator.randrange(10**9)), 2]


def pairs(seed: int, break_it: Callable[[list[int]], list[int]], count: int = PROMPTS) -> dict[str, object]:
    generator = random.Random(seed)
    outputs = [completion(break_it(verifier_output(generator)), str(index)) for index in range(count)]
    return compare_outputs(outputs, [completion(verifier_output(generator), str(index)) for index in range(count)], EOS)


def test_a_lossless_drafter_is_failed_less_often_than_promised() -> None:
    failed = sum(bool(failures({f"K = {k}": pairs(100 * run + k, lambda tokens: tokens) for k in range(4)})) for run in range(500))
    assert failed <= 500 * CHANCE + 2


@pytest.mark.parametrize(
    ("sign", "break_it"),
    [
        ("empty", lambda tokens: [2]),
        ("loops", lambda tokens: tokens[:10] + [7] * 60),
        ("truncated", lambda tokens: [*(tokens[:2] if len(tokens) > 1 else varied(2)), 2]),
    ],
)
def test_a_broken_drafter_is_failed_and_the_line_names_the_sign(sign: str, break_it: Callable[[list[int]], list[int]]) -> None:
    for seed in range(20):
        lines = failures({"temperature 1, K = 7": pairs(seed, break_it, 40)})
        assert lines
        assert any(line.startswith("temperature 1, K = 7: ") and sign.rstrip("s") in line for line in lines)


def test_greedy_outputs_that_differ_in_near_ties_are_ok_and_counted() -> None:
    references = [completion(varied(60, seed), str(seed)) for seed in range(10)]
    outputs = [completion([*reference.token_ids[:30], *varied(30, 77)], reference.id) for reference in references[:4]] + references[4:]
    found = compare_outputs(outputs, references, EOS)
    assert (found["prompts"], found["identical"], found["ok"], found["degraded"]) == (10, 6, 10, 0)
    assert failures({"greedy": found}) == []


def test_so_many_prompts_are_enough_to_find_out_a_drafter_that_breaks_all() -> None:
    for comparisons in (1, 8):
        count = enough_prompts(comparisons)
        outputs = [completion([2], str(index)) for index in range(count)]
        references = [completion(varied(60), str(index)) for index in range(count)]
        found = compare_outputs(outputs, references, EOS)
        assert len(failures({str(index): found for index in range(comparisons)})) == comparisons
        assert failures({str(index): compare_outputs(outputs[1:], references[1:], EOS) for index in range(comparisons)}) == []
    assert enough_prompts(1) < 15


def test_every_degraded_output_is_counted_once_with_examples() -> None:
    outputs = [completion([2], "a"), completion([5] * 60, "b"), completion(varied(60), "c")]
    references = [completion(varied(60), name) for name in "abc"]
    found = compare_outputs(outputs, references, EOS)
    assert (found["ok"], found["degraded"]) == (1, 2)
    assert set(found["signs"]) == set(SIGNS) == set(found["examples"])
    assert found["examples"] == {"loops": ["b"], "empty": ["a"], "truncated": []}


def test_outputs_of_other_prompts_are_no_references() -> None:
    with pytest.raises(ValueError, match="not of the same prompts"):
        compare_outputs([completion([2], "a")], [completion([2], "b")], EOS)
