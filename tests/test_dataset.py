"""Protects: samples come back as they were written, and many of them fit in memory."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.dataset import ROWS_PER_GROUP, TokenSample, iter_split, read_split, split_file, split_writer, write_split
from stages.errors import ArtifactError


def sample(number: int, ids: list[int]) -> TokenSample:
    return TokenSample(f"s-{number}", "é", ids, [token % 2 for token in ids], len(ids) // 2, 1, [{"role": "user", "content": f"\u2028 {number}"}])


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 300_000), max_size=5), max_size=8))
def test_samples_survive_a_file(tmp_path_factory: object, lists: list[list[int]]) -> None:
    folder: Path = tmp_path_factory.mktemp("split")  # type: ignore[attr-defined]
    samples = [sample(number, ids) for number, ids in enumerate(lists)]
    assert write_split(folder, "train", samples) == len(samples)
    assert read_split(folder, "train") == samples


@pytest.mark.parametrize("damage", ["cut", "zeroed", "empty", "other columns"])
def test_a_damaged_split_is_one_line(damage: str, tmp_path: Path) -> None:
    write_split(tmp_path, "train", [sample(number, [1, 2, 3]) for number in range(20)])
    path = split_file(tmp_path, "train")
    content = path.read_bytes()
    if damage == "other columns":
        pq.write_table(pq.read_table(path).drop_columns(["loss_mask"]), path)
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "zeroed": bytes(len(content)), "empty": b""}[damage])
    with pytest.raises(ArtifactError, match=r"samples\.parquet: .*; run `dvc repro --force --single-item prepare`, then `dvc repro`$"):
        read_split(tmp_path, "train")


def test_row_groups_do_not_depend_on_how_samples_arrive(tmp_path: Path) -> None:
    samples = [sample(number, [number, number + 1, 70_000]) for number in range(2 * ROWS_PER_GROUP + 10)]
    write_split(tmp_path, "train", samples)
    whole = pq.read_table(split_file(tmp_path, "train"))
    with split_writer(tmp_path, "validation") as writer:
        for start, end in ((0, 3), (3, 3), (3, ROWS_PER_GROUP), (ROWS_PER_GROUP, 2 * ROWS_PER_GROUP + 9), (2 * ROWS_PER_GROUP + 9, None)):
            writer.add(whole.slice(start, None if end is None else end - start))
    assert writer.count == len(samples)
    assert split_file(tmp_path, "validation").read_bytes() == split_file(tmp_path, "train").read_bytes()


def test_equal_token_ids_are_one_object(tmp_path: Path) -> None:
    """Otherwise half a million samples take 40 bytes a token, not 8."""
    write_split(tmp_path, "train", [sample(number, [70_000, 70_001]) for number in range(3)])
    first, *others = iter_split(tmp_path, "train")
    assert all(other.input_ids[0] is first.input_ids[0] for other in others)
