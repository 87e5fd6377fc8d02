"""Protects: no prompt on two sides of a split, for every size and ratio; copies counted; a limit that only ever takes more."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts import sha256_bytes
from stages.prepare.rows import TO_ANSWER, Message, Row, Tally, read_rows
from stages.prepare.splits import KeyedRow, assign, content_key, prompt_key, take, with_unique_ids, without_duplicates
from tests.paths import shared


def row(question: str, answer: str | None = None, *, id: str = "x", kind: str = "k", file: int = 0) -> Row:
    last: Message = TO_ANSWER if answer is None else {"role": "assistant", "content": answer}
    return Row(id, kind, [{"role": "user", "content": question}, last], None, f"file:{question}", file)


def ranks(prompts: list[str]) -> dict[str, str]:
    return {prompt: sha256_bytes(prompt.encode()) for prompt in prompts}


fractions = st.floats(0, 0.999, allow_nan=False)


@given(st.dictionaries(st.text(max_size=4), st.sampled_from("abcdefgh"), max_size=80), fractions, fractions)
def test_splits_are_disjoint_and_complete_for_every_size_and_ratio(kinds: dict[str, str], validation: float, evaluation: float) -> None:
    if validation + evaluation >= 1:
        validation, evaluation = validation / 2, evaluation / 2
    splits = assign(kinds, ranks(list(kinds)), validation, evaluation)
    assert set(splits) == set(kinds), "every prompt is in exactly one split"
    counts = Counter(splits.values())
    assert set(counts) <= {"train", "validation", "evaluation"}
    if kinds:
        assert counts["train"] >= 1
    enough = len(kinds) > (validation > 0) + (evaluation > 0)
    assert (counts["validation"] > 0) == (validation > 0 and enough)
    assert (counts["evaluation"] > 0) == (evaluation > 0 and enough)
    for kind, size in Counter(kinds.values()).items():
        own = Counter(splits[prompt] for prompt in kinds if kinds[prompt] == kind)
        if size >= 3:
            assert own["train"] >= 1
            assert (own["evaluation"] > 0) == (evaluation > 0), "each kind has held-out prompts"
            assert (own["validation"] > 0) == (validation > 0)
        if size >= 20 and validation + evaluation < 0.9:
            assert abs(own["evaluation"] - evaluation * size) <= 1
            assert abs(own["validation"] - validation * size) <= 1


@given(st.dictionaries(st.text(max_size=4), st.sampled_from("abc"), min_size=3, max_size=40), st.randoms(use_true_random=False))
def test_splits_depend_on_content_alone(kinds: dict[str, str], random: object) -> None:
    """Another order of the rows changes nothing; another evaluation share does not move what validates."""
    shuffled = list(kinds.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = assign(kinds, ranks(list(kinds)), 0.1, 0.2)
    assert assign(dict(shuffled), ranks(list(kinds)), 0.1, 0.2) == first
    wider = assign(kinds, ranks(list(kinds)), 0.1, 0.3)
    assert {prompt for prompt, split in first.items() if split == "evaluation"} <= {prompt for prompt, split in wider.items() if split == "evaluation"}


def test_a_row_more_moves_few_others() -> None:
    kinds = {f"prompt {number}": "k" for number in range(200)}
    before = assign(kinds, ranks(list(kinds)), 0.06, 0.1)
    after = assign({**kinds, "one more": "k"}, ranks([*kinds, "one more"]), 0.06, 0.1)
    assert sum(before[prompt] != after[prompt] for prompt in kinds) <= 2


def test_copies_are_found_by_content_and_white_space_at_the_ends_does_not_hide_them() -> None:
    rows = [row("a", "x"), row(" a\n", "x "), row("a", "y"), row("A", "x"), row("\u00e9", "x"), row("e\u0301", "x")]
    kept, duplicates = without_duplicates(rows, 0)
    assert duplicates == 1
    assert len({keyed.prompt for keyed in kept}) == 4, "the same question with two answers is one prompt, and so lies in one split"
    assert content_key(rows[0]) != content_key(rows[2])
    assert prompt_key(rows[0]) == prompt_key(rows[2])


def test_copies_of_evaluation_prompts_leave_the_other_rows() -> None:
    held_out, _ = without_duplicates([row("a")], 0)
    rows, duplicates = without_duplicates([row("a ", "an answer"), row("b", "x")], 0, held_out={keyed.prompt for keyed in held_out})
    assert [keyed.row.messages[0]["content"] for keyed in rows] == ["b"]
    assert duplicates == 1


def test_ids_become_unique_and_the_first_keeps_its_own() -> None:
    kept, _ = without_duplicates([row("a", id="1"), row("b", id="1"), row("c", id="2")], 0)
    ids = [keyed.row.id for keyed in with_unique_ids(kept)]
    assert ids[0] == "1"
    assert ids[2] == "2"
    assert ids[1].startswith("1~")
    assert len(set(ids)) == 3


def sized(files: dict[int, dict[str, int]]) -> list[KeyedRow]:
    rows = [row(f"{file} {kind} {number}", kind=kind, file=file) for file, kinds in files.items() for kind, size in kinds.items() for number in range(size)]
    return without_duplicates(rows, 0)[0]


@given(st.dictionaries(st.integers(0, 3), st.dictionaries(st.sampled_from("abc"), st.integers(1, 12), min_size=1), min_size=1), st.integers(1, 60))
def test_a_limit_is_even_over_files_and_a_larger_one_takes_the_same_and_more(files: dict[int, dict[str, int]], limit: int) -> None:
    rows, tally = sized(files), Tally()
    taken = take(rows, limit, tally)
    assert len(taken) == min(limit, len(rows))
    assert tally.beyond_limit == len(rows) - len(taken)
    assert taken == [keyed for keyed in rows if keyed in taken], "order is the files'"
    assert {keyed.prompt for keyed in taken} <= {keyed.prompt for keyed in take(rows, limit + 7, Tally())}
    counts = Counter(keyed.row.file for keyed in taken)
    sizes = Counter(keyed.row.file for keyed in rows)
    for file, size in sizes.items():
        if counts[file] < size:
            assert counts[file] >= max(counts.values()) - 1, "a file that has more rows is not behind another"


def test_shared_duplicates_file() -> None:
    rows, duplicates = without_duplicates(read_rows([shared("cases/duplicates.jsonl")], Tally(), "fail", "none"), 0)
    assert [keyed.row.id for keyed in rows] == ["ok-1", "ok-2", "ok-3"]
    assert duplicates == 21
