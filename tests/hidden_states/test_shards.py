"""What was dumped is read back bit for bit, and nothing else can be read: no half dump, no mixture, no other sample."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stages.artifacts import read_json, sha256_file, write_json
from stages.errors import ArtifactError
from stages.hidden_states import shards
from stages.hidden_states.format import SampleMismatch
from stages.hidden_states.shards import DIGESTS, REDO, REMAKE, PlanError, ShardWriter, open_dump
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


def flip(shard: Path) -> None:
    """Another byte in the middle of the states; size and mtime stay."""
    stat, content = shard.stat(), bytearray(shard.read_bytes())
    content[-stat.st_size // 2] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_flipped_byte_is_refused_and_extract_writes_that_shard_again(manifest: Path) -> None:
    open_dump(manifest, VERIFIER)
    plan, directory, before = make_plan(LENGTHS), manifest.parent / "dumps" / "a", manifest.read_bytes()
    flip(directory / "shard-00001.safetensors")
    with pytest.raises(ArtifactError) as refused:
        open_dump(manifest, VERIFIER)
    assert str(refused.value) == f"{directory / 'shard-00001.safetensors'}: content differs from the sha256 in {manifest}; {REDO}"

    writer = ShardWriter(directory, plan)
    assert sorted(writer.finished) == [0, 2]
    writer.write(1, make_samples(plan, LENGTHS)[4:8])
    writer.write_manifest(manifest)
    assert manifest.read_bytes() == before
    assert len(open_dump(manifest, VERIFIER)) == len(LENGTHS)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed from here on."""
    names: list[str] = []
    original = signatures.METHODS["raw"]

    def hash_raw(path: Path, progress: signatures.Progress) -> str:
        names.append(path.name)
        return original(path, progress)

    monkeypatch.setitem(signatures.METHODS, "raw", hash_raw)
    return names


def test_only_shards_that_changed_are_read_for_their_digest(manifest: Path, hashed: list[str]) -> None:
    directory = manifest.parent / "dumps" / "a"
    open_dump(manifest, VERIFIER)
    ShardWriter(directory, make_plan(LENGTHS))
    assert hashed == [], "the writer has remembered what it wrote"
    (directory / DIGESTS).unlink()
    open_dump(manifest, VERIFIER)
    assert sorted(hashed) == [f"shard-{index:05d}.safetensors" for index in range(3)]
    os.utime(directory / "shard-00002.safetensors")
    open_dump(manifest, VERIFIER)
    assert hashed[3:] == ["shard-00002.safetensors"]
    open_dump(manifest, VERIFIER)
    assert len(hashed) == 4


def test_ranks_that_open_a_dump_at_the_same_time_read_it_once(manifest: Path, hashed: list[str]) -> None:
    (manifest.parent / "dumps" / "a" / DIGESTS).unlink()
    together = threading.Barrier(4)

    def rank(number: int) -> int:
        together.wait()
        return len(open_dump(manifest, VERIFIER))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rank, range(4))) == [len(LENGTHS)] * 4
    assert sorted(hashed) == [f"shard-{index:05d}.safetensors" for index in range(3)]


def test_a_dump_is_read_where_nothing_can_be_remembered(manifest: Path, hashed: list[str]) -> None:
    directory = manifest.parent / "dumps" / "a"
    for name in (DIGESTS, f"{DIGESTS}.{platform.node()}.lock"):  # what is a folder can be written by nobody, not even by root
        (directory / name).unlink()
        (directory / name).mkdir()
    for number in (1, 2):
        assert len(open_dump(manifest, VERIFIER)) == len(LENGTHS)
        assert len(hashed) == 3 * number
    assert not list(directory.glob(".*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_sample_that_is_not_finite_is_named_with_its_shard(tmp_path: Path, value: float) -> None:
    """Its digest is right: the states came so. Otherwise the first who notices is the loss."""
    plan = make_plan(LENGTHS)
    samples = make_samples(plan, LENGTHS)
    samples[5].hidden_states[1, 2, 3] = value
    directory = tmp_path / "dumps" / "a"
    write_shards(directory, plan, samples).write_manifest(tmp_path / "manifest.json")
    dump = open_dump(tmp_path / "manifest.json", VERIFIER)
    assert torch.equal(dump.read("sample-4", None).hidden_states, samples[4].hidden_states)
    shard = directory / "shard-00001.safetensors"
    with pytest.raises(ArtifactError) as refused:
        dump.read("sample-5", None)
    assert str(refused.value) == f"{shard}: sample sample-5: hidden states that are not finite; {REMAKE}"
    assert sorted(ShardWriter(directory, plan).finished) == [0, 1, 2]
    shard.unlink()
    assert sorted(ShardWriter(directory, plan).finished) == [0, 2], "deleted, it is made again"


Tensors = dict[str, torch.Tensor]


def rewrite(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    return lambda path: save_file(change(load_file(path)), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "header"),
        (lambda path: path.write_bytes(b""), "header"),
        (rewrite(lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()}), "hidden_states"),
        (rewrite(lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "token_ids"}), "token_ids"),
        (rewrite(lambda tensors: tensors | {"hidden_states": tensors["hidden_states"][:-1]}), r"hidden_states is F32 \[21, 3, 4\], expected F32 \[22, 3, 4\]"),
        (rewrite(lambda tensors: tensors | {"hidden_states": tensors["hidden_states"].half()}), r"hidden_states is F16 .*, expected F32"),
        (rewrite(lambda tensors: tensors | {"token_ids": tensors["token_ids"].float()}), r"token_ids is F32 \[22\], expected I32 \[22\]"),
    ],
    ids=["zeroed", "empty", "renamed", "without tokens", "too short", "another dtype", "tokens that are no integers"],
)
def test_a_shard_that_is_none_is_refused_in_one_line(manifest: Path, damage: Callable[[Path], None], message: str) -> None:
    """At once where its digest tells; a shard that came so, when it is first read."""
    shard = manifest.parent / "dumps" / "a" / "shard-00001.safetensors"
    damage(shard)
    with pytest.raises(ArtifactError, match=rf"shard-00001\.safetensors: .*{manifest}.*; {REDO}$"):
        open_dump(manifest, VERIFIER)
    content = read_json(manifest)
    content["shards"][1] |= {"bytes": shard.stat().st_size, "sha256": sha256_file(shard)}
    write_json(manifest, content)
    dump = open_dump(manifest, VERIFIER)
    dump.read("sample-0", None)
    with pytest.raises(ArtifactError, match=rf"^{shard}: [^\n]*{message}[^\n]*; {REMAKE}$"):
        dump.read("sample-4", None)


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {name: value for name, value in content.items() if name != key}


def row(index: int, **changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {"shards": [entry | changed if place == index else entry for place, entry in enumerate(content["shards"])]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: [content], "list there, an object wanted"),
        (lambda content: None, "NoneType there, an object wanted"),
        (without("format"), "format None, this version reads 1"),
        (lambda content: content | {"format": 7}, "format 7, this version reads 1"),
        *((without(key), f"{key}: Field required") for key in ("verifier", "plan", "directory", "shards")),
        (lambda content: content | {"verifier": 3}, "verifier = 3: "),
        (lambda content: content | {"plan": without("layer_ids")(content["plan"])}, "plan.layer_ids: Field required"),
        (lambda content: content | {"plan": content["plan"] | {"hidden_size": "4"}}, "plan.hidden_size = '4': "),
        (lambda content: content | {"shards": [without("sha256")(entry) for entry in content["shards"]]}, "shards.0.sha256: Field required"),
        (row(1, ids=["sample-4"]), "shards.1: 1 ids, but tokens of 4 samples"),
        (row(1, tokens=[1, 2, 3, -4]), "shards.1.tokens.3 = -4: "),
        (row(1, ids=[1, 2, 3, 4]), "shards.1.ids.0 = 1: "),
    ],
)
def test_a_manifest_that_extract_has_not_written_is_refused_naming_the_field(manifest: Path, damage: Callable[[dict[str, Any]], Any], message: str) -> None:
    manifest.write_text(json.dumps(damage(read_json(manifest))))
    with pytest.raises(ArtifactError) as refused:
        open_dump(manifest, VERIFIER)
    assert str(refused.value).startswith(f"{manifest}: {message}")
    assert str(refused.value).endswith(f"; {REDO}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_a_manifest_that_is_not_json_is_refused_saying_what_writes_it(manifest: Path, content: bytes) -> None:
    manifest.write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"^{manifest}: not valid JSON: [^\n]*; run the stage that writes it \(dvc repro\)$"):
        open_dump(manifest, VERIFIER)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"sha256"', '"sha1"'),
        lambda text: text.replace('"sample-4",', ""),
        lambda text: text.replace("shard-00001.", "shard-00000."),
    ],
)
def test_a_shard_without_a_whole_row_is_written_again(manifest: Path, damage: Callable[[str], str]) -> None:
    path = manifest.parent / "dumps" / "a" / "shard-00001.json"
    path.write_text(damage(path.read_text()))
    assert sorted(ShardWriter(path.parent, make_plan(LENGTHS)).finished) == [0, 2]


def test_a_plan_that_is_not_json_is_refused(manifest: Path) -> None:
    directory = manifest.parent / "dumps" / "a"
    (directory / "plan.json").write_text("{")
    with pytest.raises(PlanError, match=rf"plan\.json: not valid JSON; delete {directory}$"):
        ShardWriter(directory, make_plan(LENGTHS))


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
