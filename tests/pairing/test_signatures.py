"""A remembered digest saves reading 100 GB; it must never stand for content that has changed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from stages.artifacts import sha256_bytes
from stages.pairing.identity import compute_identity
from stages.pairing.signatures import KEEP, DigestCache, signature
from tests.pairing.edits import copy_model, edit_json, flip_weight_byte, sparse_shard


@pytest.fixture
def huge(tiny_verifier: Path, tmp_path: Path) -> Path:
    """The tiny verifier's other files with 100 GB of (sparse) weights in 20 shards."""
    model = copy_model(tiny_verifier, tmp_path / "model")
    (model / "model.safetensors").unlink()
    for number in range(1, 21):
        sparse_shard(model / f"model-{number:05d}-of-00020.safetensors", 5_000_000_000)
    return model


def test_an_unchanged_100_gb_model_is_recognised_without_reading_it(huge: Path, tmp_path: Path) -> None:
    path = tmp_path / "digests.json"
    cache = DigestCache(path)
    for number, shard in enumerate(sorted(huge.glob("*.safetensors"))):
        cache.remember(shard, "raw", f"{number:064x}")
    cache.save()
    read_before, start = psutil.Process().io_counters().read_chars, time.perf_counter()
    identity = compute_identity(huge, path)
    seconds, read = time.perf_counter() - start, psutil.Process().io_counters().read_chars - read_before
    assert seconds < 1.0
    assert read < 1 << 20, "only headers and small files"
    assert compute_identity(huge, path).digest == identity.digest


def test_what_was_hashed_once_is_not_read_again(tiny_verifier: Path, tmp_path: Path) -> None:
    model = copy_model(tiny_verifier, tmp_path / "model")
    (model / "model.safetensors").unlink()
    sparse_shard(model / "model.safetensors", 200 << 20)
    first = compute_identity(model, tmp_path / "digests.json")
    read_before = psutil.Process().io_counters().read_chars
    assert compute_identity(model, tmp_path / "digests.json").digest == first.digest
    assert psutil.Process().io_counters().read_chars - read_before < 1 << 20
    assert compute_identity(model).digest == first.digest


def test_a_write_right_after_hashing_is_noticed_although_size_and_mtime_are_restored(tiny_verifier: Path, tmp_path: Path) -> None:
    model = copy_model(tiny_verifier, tmp_path / "model")
    weights = model / "model.safetensors"
    seen = set()
    for position in range(1, 6):
        stat = weights.stat()
        flip_weight_byte(model, -position)
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        seen.add(compute_identity(model, tmp_path / "digests.json").weights)
    assert len(seen) == 5


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 99, "digests": {}}', '{"format": 1, "digests": 3}'])
def test_a_damaged_cache_is_an_empty_one(damage: str, tiny_verifier: Path, tmp_path: Path) -> None:
    path = tmp_path / "digests.json"
    path.write_text(damage)
    assert compute_identity(tiny_verifier, path).digest == compute_identity(tiny_verifier).digest
    assert DigestCache(path).entries


def test_where_the_cache_cannot_be_written_files_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    cache = DigestCache(file / "digests.json")
    assert cache.digests([(file, "raw")]) == [sha256_bytes(b"x")]
    assert DigestCache(cache.path).entries == {}


def test_a_json_file_and_the_same_bytes_as_raw_file_do_not_share_a_digest(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text('{"b": 1,  "a": 2}')
    raw, value = DigestCache(tmp_path / "digests.json").digests([(file, "raw"), (file, "json")])
    assert raw != value
    edit_json(tmp_path, "tokenizer.json", lambda content: None)
    assert DigestCache(tmp_path / "digests.json").digests([(file, "json")]) == [value]


def test_the_cache_stays_bounded_and_drops_the_oldest(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    path = tmp_path / "digests.json"
    old = {f"raw:{number}": "0" for number in range(KEEP)}
    path.write_text(json.dumps({"format": 1, "digests": old}))
    DigestCache(path).digests([(file, "raw")])
    kept = DigestCache(path).entries
    assert len(kept) == KEEP
    assert f"raw:{signature(file)}" in kept
    assert "raw:0" not in kept
