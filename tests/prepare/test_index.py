"""Protects: copies counted, ids unique, a limit that only ever takes more; numbers stand for rows as the rows would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts import digest_json
from stages.prepare.index import Index, Records, distinct, index_rows, keys, new_id, within
from stages.prepare.rows import TO_ANSWER, Message, Row, Tally
from tests.paths import shared
from tests.prepare.project import read_rows


def row(question: str, answer: str | None = None, *, id: str = "x", kind: str = "k", file: int = 0) -> Row:
    last: Message = TO_ANSWER if answer is None else {"role": "assistant", "content": answer}
    return Row(id, kind, [{"role": "user", "content": question}, last], None, f"file:{question}", file)


def indexed(rows: Iterable[Row], held_out: Iterable[Row] = (), tally: Tally | None = None) -> tuple[Index, Index, list[str]]:
    """Held-out rows, rows, names of kinds."""
    tally = Tally() if tally is None else tally
    records = Records()

    def collect(some: Iterable[Row]) -> object:
        batch = list(some)
        return records.collect([index_rows(enumerate(batch), 0, Tally(read=len(batch)))], tally)

    held = collect(held_out)
    return *distinct(held, collect(rows), tally), list(records.kinds)  # type: ignore[arg-type]


contents = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": contents},
        optional={"name": st.just("n"), "tool_calls": st.just([{"function": {"name": "f", "arguments": {"é": 1.5}}}])},
    ),
    max_size=4,
)


@given(messages, st.one_of(st.none(), st.just([{"type": "function"}])))
def test_keys_are_digests_of_what_is_said(said: list[Message], tools: list[dict[str, object]] | None) -> None:
    stripped = [{**message, "content": message["content"].strip() if message["content"] is not None else None} for message in said]
    asked = [message for message in stripped if message["role"] != "assistant" or "tool_calls" in message]
    assert keys(Row("x", "k", said, tools, "file:1", 0)) == (digest_json([asked, tools]), digest_json([stripped, tools]))


def test_copies_are_found_by_content_and_white_space_at_the_ends_does_not_hide_them() -> None:
    rows = [row("a", "x"), row(" a\n", "x "), row("a", "y"), row("A", "x"), row("\u00e9", "x"), row("e\u0301", "x")]
    tally = Tally()
    _, kept, _ = indexed(rows, tally=tally)
    assert tally.duplicates == 1
    assert kept.position.tolist() == [0, 2, 3, 4, 5], "the first of each content, in order"
    assert len(set(kept.prompt.tolist())) == 4, "the same question with two answers is one prompt, and so lies in one split"


def test_copies_of_evaluation_prompts_leave_the_other_rows() -> None:
    tally = Tally()
    _, kept, _ = indexed([row("a ", "an answer"), row("b", "x")], held_out=[row("a")], tally=tally)
    assert kept.position.tolist() == [1]
    assert tally.duplicates == 1


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.sampled_from([None, 0, 1, 2])), max_size=12), st.integers(0, 5))
def test_ids_become_unique_and_the_first_keeps_its_own(drawn: list[tuple[int, int, int | None]], border: int) -> None:
    """Also where a file spells the id that another row is given."""
    rows: list[Row] = []
    for number, name, spelt in drawn:
        new = None if spelt is None or spelt >= len(rows) else new_id(rows[spelt])
        rows.append(row(str(number), id=new or f"id-{name}"))
    contents = list(dict.fromkeys(keys(each) for each in rows))
    rows = [next(each for each in rows if keys(each) == content) for content in contents]
    held, kept, _ = indexed(rows[border:], rows[:border])
    renamed = [*held.renamed.tolist(), *kept.renamed.tolist()]
    taken: set[str] = set()
    for each, new in zip(rows, renamed, strict=True):
        assert new == (each.id in taken)
        taken.add(new_id(each) if new else each.id)
    assert len(taken) == len(rows)


def test_a_row_that_spells_the_new_id_of_a_later_one_is_renamed_itself() -> None:
    later = row("b", id="x")
    rows = [row("c", id=new_id(later)), row("a", id="x"), later]
    assert len({new_id(rows[0]), "x", new_id(later)}) == 3
    _, kept, _ = indexed(rows)
    assert kept.renamed.tolist() == [True, False, True]


def sized(files: dict[int, dict[str, int]]) -> tuple[Index, list[str]]:
    rows = [row(f"{file} {kind} {number}", kind=kind, file=file) for file, kinds in files.items() for kind, size in kinds.items() for number in range(size)]
    _, index, kinds = indexed(rows)
    return index, kinds


@given(st.dictionaries(st.integers(0, 3), st.dictionaries(st.sampled_from("abc"), st.integers(1, 12), min_size=1), min_size=1), st.integers(1, 60))
def test_a_limit_is_even_over_files_and_kinds_and_a_larger_one_takes_the_same_and_more(files: dict[int, dict[str, int]], limit: int) -> None:
    index, kinds = sized(files)
    taken = index.at(within(limit, index, kinds))
    assert len(taken) == min(limit, len(index))
    assert set(taken.prompt.tolist()) <= set(index.at(within(limit + 7, index, kinds)).prompt.tolist())
    counts = Counter(taken.file.tolist())
    for file, size in Counter(index.file.tolist()).items():
        if counts[file] < size:
            assert counts[file] >= max(counts.values()) - 1, "a file that has more rows is not behind another"
        of_kind = Counter(taken.kind[taken.file == file].tolist())
        for kind, there in Counter(index.kind[index.file == file].tolist()).items():
            if of_kind[kind] < there:
                assert of_kind[kind] >= max(of_kind.values(), default=0) - 1, "nor is a kind"


def test_shared_duplicates_file() -> None:
    tally = Tally()
    rows = list(read_rows([shared("cases/duplicates.jsonl")], Tally(), "fail", "none"))
    _, kept, _ = indexed(rows, tally=tally)
    assert [rows[position].id for position in kept.position.tolist()] == ["ok-1", "ok-2", "ok-3"]
    assert tally.duplicates == 21
