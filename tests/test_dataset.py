"""Protects: samples come back as they were written, and many of them fit in memory."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.dataset import REDO, ROWS_PER_GROUP, TokenSample, iter_split, read_split, split_file, split_writer, write_split
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


def refusal(folder: Path) -> str:
    """What reading the training split is refused with: one line that names the file and what to do."""
    with pytest.raises(ArtifactError) as refused:
        read_split(folder, "train")
    found = re.fullmatch(rf"{split_file(folder, 'train')}: not what prepare writes: (.+); {REDO}", str(refused.value))
    assert found is not None, refused.value
    return found[1]


@pytest.mark.parametrize("damage", [lambda content: bytes(len(content)), *(lambda content, cut=cut: content[:cut] for cut in (0, 1, 100, -9, -1))])
def test_a_truncated_or_zeroed_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_split(tmp_path, "train", [sample(number, [1, 2, 3]) for number in range(5)])
    path = split_file(tmp_path, "train")
    path.write_bytes(damage(path.read_bytes()))
    assert "Parquet" in refusal(tmp_path)


def column(name: str, values: list[Any], kind: pa.DataType | None = None) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(name)
        return table.set_column(index, name, pa.array(values, kind or table.schema.field(name).type))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns("loss_mask"), "no column loss_mask"),
        (lambda table: table.rename_columns({"id": "name"}), "no column id"),
        (column("input_ids", [[1, 2], [3, 4]], pa.list_(pa.int64())), "column input_ids is list<element: int64>, expected list<item: int32>"),
        (column("turns", ["1", "1"], pa.string()), "column turns is string, expected int32"),
        (column("kind", ["a", None]), "column kind lacks values"),
        (column("loss_mask", [[0, 1], None]), "column loss_mask lacks values"),
        (column("input_ids", [[1, 2], [3, None]]), "column input_ids lacks values"),
        (column("input_ids", [[1, 2], [3, -4]]), "column input_ids holds -4 to 3, token ids are 0 to 4194303"),
        (column("input_ids", [[1, 1 << 30], [3, 4]]), "column input_ids holds 1 to 1073741824, token ids are 0 to 4194303"),
        (column("loss_mask", [[0, 1], [0, 3]]), "column loss_mask holds 3, a mask is 0 or 1"),
        (column("loss_mask", [[0, 1], [0]]), "loss_mask of sample s-1 does not fit its 2 input_ids"),
        (column("prompt_length", [3, 1]), "prompt_length of sample s-0 does not fit its 2 input_ids"),
        (column("prompt_length", [1, -1]), "prompt_length of sample s-1 does not fit its 2 input_ids"),
        (column("messages", ["[]", "["]), "messages of sample s-1: not valid JSON: Expecting value: line 1 column 2 (char 1)"),
        (column("messages", ["[]", "[3]"]), "messages of sample s-1: not a list of messages"),
    ],
)
def test_other_columns_and_values_than_prepare_writes_are_refused(tmp_path: Path, change: Callable[[pa.Table], pa.Table], message: str) -> None:
    write_split(tmp_path, "train", [sample(number, [1, 2]) for number in range(2)])
    path = split_file(tmp_path, "train")
    pq.write_table(change(pq.read_table(path)), path)
    assert refusal(tmp_path) == message


def test_whatever_bit_is_flipped_nothing_but_a_refusal_is_raised(tmp_path: Path) -> None:
    write_split(tmp_path, "train", [sample(number, [number, 70_000]) for number in range(20)])
    path = split_file(tmp_path, "train")
    content, draw = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            read_split(tmp_path, "train")
        except ArtifactError:
            refused += 1
            refusal(tmp_path)
    assert refused > 100
