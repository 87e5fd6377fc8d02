"""What was dumped is read back bit for bit, and nothing else can be read: no half dump, no mixture, no other sample."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts import read_json, write_json
from stages.errors import ArtifactError
from stages.hidden_states import shards
from stages.hidden_states.format import SampleMismatch
from stages.hidden_states.shards import PlanError, ShardWriter, open_dump
from stages.pairing import signatures
from tests.hidden_states.samples import make_plan, make_samples, write_shards

LENGTHS = [3, 1, 7, 4, 9, 2, 5, 6, 1, 8]
VERIFIER = "v" * 64


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """The manifest of a finished dump of `LENGTHS`."""
    plan = make_plan(LENGTHS)
    path = tmp_path / "manifest.json"
    write_shards(tmp_path / "dumps" / "a", plan, make_samples(plan, LENGTHS)).write_manifest(path)
    return path


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    per_shard=st.integers(1, 5),
    layers=st.sampled_from([(6,), (1, 6), (1, 2, 6), (1, 6, 6)]),
)
def test_any_dump_is_read_back_bit_for_bit(lengths: list[int], dtype: str, per_shard: int, layers: tuple[int, ...]) -> None:
    plan = make_plan(lengths, dtype=dtype, samples_per_shard=per_shard, layer_ids=layers)
    samples = make_samples(plan, lengths)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.json"
        write_shards(Path(folder) / "dump", plan, samples).write_manifest(path)
        dump = open_dump(path, VERIFIER)
        assert dump.plan == plan
        assert dump.ids == [sample.id for sample in samples]
        for sample in reversed(samples):
            read = dump.read(sample.id, sample.token_ids.tolist())
            assert torch.equal(read.token_ids, sample.token_ids)
            assert read.hidden_states.dtype == sample.hidden_states.dtype
            assert read.hidden_states.is_contiguous()
            assert torch.equal(read.hidden_states, sample.hidden_states[:, plan.slots])
            assert dump.tokens(sample.id) == len(sample.token_ids)


def test_a_sample_with_other_tokens_or_another_length_is_rejected_alone(manifest: Path) -> None:
    dump = open_dump(manifest, VERIFIER)
    good = dump.read("sample-2", None).token_ids.tolist()
    with pytest.raises(SampleMismatch, match="sample-2 was extracted from other tokens"):
        dump.read("sample-2", [*good[:-1], good[-1] + 1])
    with pytest.raises(SampleMismatch, match="sample-2 has 7 tokens, the data set's has 6"):
        dump.read("sample-2", good[:-1])
    with pytest.raises(SampleMismatch, match="no hidden states of sample sample-99"):
        dump.read("sample-99", None)
    assert dump.read("sample-2", good).hidden_states.shape == (7, 3, 4)


def test_several_threads_read_what_one_reads(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "OPEN_SHARDS", 2)  # fewer than there are shards: handles are opened and dropped all the time
    dump = open_dump(manifest, VERIFIER)
    expected = {sample: dump.read(sample, None) for sample in dump.ids}

    def reads(seed: int) -> bool:
        order = torch.randperm(len(dump), generator=torch.Generator().manual_seed(seed)).tolist() * 5
        return all(torch.equal(dump.read(dump.ids[place], None).hidden_states, expected[dump.ids[place]].hidden_states) for place in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(reads, range(8)))


def test_a_partial_dump_cannot_be_read(tmp_path: Path) -> None:
    plan = make_plan(LENGTHS)
    writer = write_shards(tmp_path / "dumps" / "a", plan, make_samples(plan, LENGTHS), shards=2)
    assert not writer.complete
    with pytest.raises(ArtifactError, match="not finished"):
        open_dump(tmp_path / "manifest.json", VERIFIER)


def test_an_interrupted_dump_continues_and_ends_in_the_same_bytes(tmp_path: Path, manifest: Path) -> None:
    plan = make_plan(LENGTHS)
    samples = make_samples(plan, LENGTHS)
    directory = tmp_path / "second" / "dumps" / "a"
    write_shards(directory, plan, samples, shards=1)
    # What a killed writer leaves: its temporary files, and a final shard whose row was not written yet.
    for name in (".shard-00001.safetensors.x.tmp", ".tmpAbCd12"):
        (directory / name).write_bytes(b"half")
    ShardWriter(directory, plan).write(1, samples[4:8])
    (directory / "shard-00001.json").unlink()
    (directory / "shard-00001.safetensors").write_bytes(b"other")

    writer = ShardWriter(directory, plan)
    assert sorted(writer.finished) == [0]
    assert not list(directory.glob(".*"))
    for index in (1, 2):
        writer.write(index, [samples[position] for position in plan.shard_range(index)])
    writer.write_manifest(tmp_path / "second" / "manifest.json")
    assert (tmp_path / "second" / "manifest.json").read_bytes() == manifest.read_bytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", 8),
        ("max_seq_len", 100),
        ("data", "e" * 64),
        ("dtype", "bfloat16"),
        ("layer_ids", (1, 2, 6)),
        ("verifier", "w" * 64),
        ("samples_per_shard", 2),
    ],
)
def test_a_directory_of_another_plan_is_refused_naming_the_field(tmp_path: Path, field: str, value: Any) -> None:
    plan = make_plan(LENGTHS)
    write_shards(tmp_path, plan, make_samples(plan, LENGTHS), shards=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(PlanError, match=f"{field} .* there, .* wanted"):
        ShardWriter(tmp_path, dataclasses.replace(plan, **{field: value}))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_shards_without_a_plan_are_refused(tmp_path: Path) -> None:
    plan = make_plan(LENGTHS)
    write_shards(tmp_path, plan, make_samples(plan, LENGTHS), shards=1)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(PlanError, match="unknown plan"):
        ShardWriter(tmp_path, plan)


def test_a_dump_of_another_verifier_and_missing_or_truncated_shards_are_refused(manifest: Path) -> None:
    with pytest.raises(ArtifactError, match="states of verifier vvvvvvvvvvvv, the current one is wwwwwwwwwwww"):
        open_dump(manifest, "w" * 64)
    shard = manifest.parent / "dumps" / "a" / "shard-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-4])
    with pytest.raises(ArtifactError, match=r"shard-00001\.safetensors: \d+ bytes, .* says \d+"):
        open_dump(manifest, VERIFIER)
    shard.unlink()
    with pytest.raises(ArtifactError, match=r"shard-00001\.safetensors: missing"):
        open_dump(manifest, VERIFIER)


@pytest.mark.parametrize("spoil", [lambda content: bytes(len(content)), lambda content: content[:-5] + bytes([content[-5] ^ 4]) + content[-4:]])
def test_a_shard_of_the_right_size_with_other_content_is_refused(spoil: Callable[[bytes], bytes], manifest: Path) -> None:
    """States that nobody has computed train as readily as the verifier's."""
    open_dump(manifest, VERIFIER)
    shard = manifest.parent / "dumps" / "a" / "shard-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(spoil(content))
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"shard-00001\.safetensors: content differs from the sha256 in .*manifest\.json; run `dvc repro"):
            open_dump(manifest, VERIFIER)
    # What the message says to do mends it.
    writer = ShardWriter(shard.parent, make_plan(LENGTHS))
    assert 1 not in writer.finished
    assert 0 in writer.finished
    shard.write_bytes(content)
    assert ShardWriter(shard.parent, make_plan(LENGTHS)).complete
    open_dump(manifest, VERIFIER)


def test_a_dump_that_nobody_wrote_to_is_hashed_once(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_dump(manifest, VERIFIER)
    monkeypatch.setattr(signatures, "METHODS", {})
    open_dump(manifest, VERIFIER)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: [], "a list, this version reads format 1"),
        (lambda content: {**content, "format": 7}, "format 7, this version reads format 1"),
        (lambda content: {"format": 1}, r"manifest\.json: verifier"),
        (lambda content: {**content, "plan": {}}, "plan: 'layer_ids'"),
        (lambda content: {**content, "shards": [{**content["shards"][0], "ids": ["one"]}]}, r"shards\.0: .*1 ids and 4 tokens: one of each per sample"),
        (lambda content: {**content, "shards": [{"file": "x"}]}, r"shards\.0\.bytes"),
    ],
)
def test_a_manifest_that_extract_has_not_written_is_one_line(change: Callable[[Any], Any], says: str, manifest: Path) -> None:
    write_json(manifest, change(read_json(manifest)))
    with pytest.raises(ArtifactError, match=says) as refused:
        open_dump(manifest, VERIFIER)
    assert "run `dvc repro" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_shard_whose_row_cannot_be_read_is_made_again(manifest: Path) -> None:
    row = manifest.parent / "dumps" / "a" / "shard-00001.json"
    for content in ("", "{}", "[]"):
        row.write_text(content)
        assert 1 not in ShardWriter(row.parent, make_plan(LENGTHS)).finished


def test_rejected_samples_are_named_in_the_manifest_and_cannot_be_read(tmp_path: Path) -> None:
    plan = make_plan([2, 3])
    samples = make_samples(plan, [2, 3])
    writer = ShardWriter(tmp_path / "dump", plan)
    writer.write(0, samples[1:], {"sample-0": "not finite"})
    writer.write_manifest(tmp_path / "manifest.json")
    manifest = read_json(tmp_path / "manifest.json")
    assert (manifest["samples"], manifest["tokens"], manifest["rejected"]) == (1, 3, {"sample-0": "not finite"})
    dump = open_dump(tmp_path / "manifest.json", VERIFIER)
    assert "sample-0" not in dump
    assert torch.equal(dump.read("sample-1", None).hidden_states, samples[1].hidden_states)


def test_a_full_disk_leaves_no_readable_half_sample(small_disk: Path) -> None:
    lengths = [5000] * 8
    plan = make_plan(lengths, samples_per_shard=2, hidden_size=4)  # 500 kB a shard: the second does not fit
    samples = make_samples(plan, lengths)
    writer = write_shards(small_disk / "dumps" / "a", plan, samples, shards=1)
    with pytest.raises(OSError, match="No space left") as caught:
        writer.write(1, samples[2:4])
    assert caught.value.errno == errno.ENOSPC
    again = ShardWriter(small_disk / "dumps" / "a", plan)
    assert again.finished == writer.finished
    for index, entry in again.finished.items():
        assert entry.ids == [samples[position].id for position in plan.shard_range(index)]
    assert len(list((small_disk / "dumps" / "a").glob("*.safetensors"))) == len(again.finished)
    with pytest.raises(ArtifactError, match="not finished"):
        open_dump(small_disk / "manifest.json", VERIFIER)
