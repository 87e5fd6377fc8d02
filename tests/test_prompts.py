"""Protects the bundled prompt set: every row readable, unique, and in the proportions its README states."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts"
KINDS = ("code", "dialogue", "fact", "math", "story")


def read_rows() -> list[tuple[str, dict[str, Any]]]:
    """All rows as (stem of the file, row); a line that is not JSON fails here, with the file and line in the message."""
    rows: list[tuple[str, dict[str, Any]]] = []
    for path in sorted(PROMPTS.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                rows.append((path.stem, json.loads(line)))
            except json.JSONDecodeError as error:
                pytest.fail(f"{path.name}:{number}: {error}")
    return rows


def normalised(text: str) -> str:
    """The text without differences of white space and case."""
    return " ".join(text.casefold().split())


def test_rows_have_the_documented_shape() -> None:
    for stem, row in read_rows():
        assert set(row) == {"id", "kind", "turns"}, row
        assert row["kind"] == stem
        assert re.fullmatch(rf"{stem}-\d{{3}}", row["id"]), row["id"]
        assert 1 <= len(row["turns"]) <= 3, row["id"]
        assert all(isinstance(turn, str) and turn.strip() == turn and turn for turn in row["turns"]), row["id"]


def test_five_kinds_and_enough_rows_of_each() -> None:
    rows = read_rows()
    assert tuple(sorted({stem for stem, _ in rows})) == KINDS
    assert len(rows) >= 500
    # The splits are drawn per kind: a thin kind would be held out with a handful of prompts.
    assert min(sum(stem == kind for stem, _ in rows) for kind in KINDS) >= 100


def test_ids_are_unique() -> None:
    ids = [row["id"] for _, row in read_rows()]
    assert len(ids) == len(set(ids))


def test_no_prompt_occurs_twice() -> None:
    """A prompt in two splits would let the drafter be evaluated on what it was trained on."""
    seen: dict[str, str] = {}
    for _, row in read_rows():
        key = normalised(row["turns"][0])
        assert key not in seen, f"{row['id']} repeats {seen[key]}"
        seen[key] = row["id"]


def test_every_kind_has_conversations_of_several_turns() -> None:
    several = [stem for stem, row in read_rows() if len(row["turns"]) > 1]
    assert set(several) == set(KINDS)


def test_readme_counts_are_true() -> None:
    rows = read_rows()
    readme = (PROMPTS / "README.md").read_text(encoding="utf-8")
    for kind in KINDS:
        assert f"{kind} {sum(stem == kind for stem, _ in rows)}" in readme
    assert f"{len(rows)} rows" in readme
    assert f"{sum(len(row['turns']) > 1 for _, row in rows)} rows have two or three turns" in readme
