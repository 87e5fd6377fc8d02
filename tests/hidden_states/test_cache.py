"""Kept samples come back bit for bit, up to a limit, across runs; whatever is not intact or not of this plan counts as absent."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.hidden_states.cache import SampleCache, open_cache
from stages.hidden_states.format import HiddenSample, Plan
from stages.hidden_states.shards import PlanError
from tests.hidden_states.samples import make_plan, make_samples

LENGTHS = [3, 9, 5, 7, 8, 2]
ROOM = 1 << 20


def training_samples(plan: Plan) -> list[HiddenSample]:
    """As a stream hands them over: states `[T, L+1, H]`."""
    return [dataclasses.replace(sample, hidden_states=sample.hidden_states[:, plan.slots]) for sample in make_samples(plan, LENGTHS)]


def kept(cache: SampleCache, samples: list[HiddenSample]) -> list[bool]:
    """Which samples the cache has; each that it has is the right one."""
    found = [cache.read(sample.id, sample.token_ids.tolist()) for sample in samples]
    for got, sample in zip(found, samples, strict=True):
        if got is not None:
            assert got.id == sample.id
            assert torch.equal(got.hidden_states, sample.hidden_states)
            assert torch.equal(got.token_ids, sample.token_ids)
    return [got is not None for got in found]


def fill(directory: Path, plan: Plan, limit: int = ROOM) -> tuple[SampleCache, list[HiddenSample]]:
    cache, samples = SampleCache(directory, plan, limit), training_samples(plan)
    for sample in samples:
        cache.write(sample)
    return cache, samples


@pytest.mark.parametrize("layer_ids", [(1, 3, 6), (6,), (1, 6, 6)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_kept_comes_back_in_this_run_and_in_the_next(tmp_path: Path, layer_ids: tuple[int, ...], dtype: str) -> None:
    plan = make_plan(LENGTHS, layer_ids=layer_ids, dtype=dtype)
    cache, samples = fill(tmp_path, plan)
    assert all(kept(cache, samples))
    again = SampleCache(tmp_path, plan, ROOM)
    assert all(kept(again, samples))
    assert again.bytes == cache.bytes
    assert again.read("sample-99", [1]) is None


@pytest.mark.parametrize("threads", [1, 4])
def test_it_keeps_as_much_as_the_limit_allows_and_stays_below_it_over_runs(tmp_path: Path, threads: int) -> None:
    plan = make_plan(LENGTHS)
    limit = fill(tmp_path / "whole", plan)[0].bytes // 2
    samples = training_samples(plan)
    for _ in range(2):
        cache = SampleCache(tmp_path / "half", plan, limit)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(cache.write, samples * 3))
        size = sum(path.stat().st_size for path in (tmp_path / "half").iterdir() if path.name != "plan.json")
        assert limit / 2 < size <= limit
        assert size == cache.bytes
        assert any(kept(cache, samples))


@pytest.mark.parametrize("suffix", [".data", ".json"])
def test_a_torn_sample_counts_as_absent_and_can_be_kept_anew(tmp_path: Path, suffix: str) -> None:
    plan = make_plan(LENGTHS)
    _, samples = fill(tmp_path, plan)
    torn, cut, gone, *_ = sorted(path for path in tmp_path.glob(f"*{suffix}") if path.name != "plan.json")
    content = bytearray(torn.read_bytes())
    content[len(content) // 2] ^= 4
    torn.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    cache = SampleCache(tmp_path, plan, ROOM)
    assert sum(kept(cache, samples)) == len(samples) - 3
    for sample in samples:
        cache.write(sample)
    assert all(kept(cache, samples))


def test_a_sample_with_other_tokens_counts_as_absent(tmp_path: Path) -> None:
    cache, samples = fill(tmp_path, make_plan(LENGTHS))
    assert cache.read("sample-0", [*samples[0].token_ids.tolist()[:-1], 1]) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("verifier", "w" * 64), ("layer_ids", (1, 2, 6)), ("dtype", "bfloat16"), ("max_seq_len", 100), ("data", "e" * 64), ("samples", 7), ("tokens", 99)],
)
def test_the_cache_of_another_plan_is_refused_by_field_and_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any) -> None:
    plan = make_plan(LENGTHS)
    fill(tmp_path / "cache", plan)
    other = dataclasses.replace(plan, **{field: value})
    with pytest.raises(PlanError, match=rf"plan\.json: this cache was made for another plan \({field} .* there, .* wanted\)"):
        SampleCache(tmp_path / "cache", other, ROOM)
    assert all(kept(SampleCache(tmp_path / "cache", plan, ROOM), training_samples(plan))), "a refusal removes nothing"
    cache = open_cache(tmp_path / "cache", other, ROOM)
    said = capsys.readouterr().out
    assert f"{field} " in said
    assert "not used, and made anew" in said
    assert not any(kept(cache, training_samples(plan)))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["plan.json"]


@pytest.mark.parametrize("content", [None, "{", "[]", "null"])
def test_a_cache_of_an_unknown_or_unreadable_plan_is_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None) -> None:
    plan = make_plan(LENGTHS)
    fill(tmp_path / "cache", plan)
    path = tmp_path / "cache" / "plan.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    cache = open_cache(tmp_path / "cache", plan, ROOM)
    assert "made anew" in capsys.readouterr().out
    assert not any(kept(cache, training_samples(plan)))


def test_what_a_killed_writer_left_is_removed_and_takes_no_room(tmp_path: Path) -> None:
    plan = make_plan(LENGTHS)
    cache, samples = fill(tmp_path, plan)
    (tmp_path / ".cache-0.data.tmp").write_bytes(b"half")
    half = next(tmp_path.glob("cache-*.json"))
    half.unlink()
    again = SampleCache(tmp_path, plan, ROOM)
    assert not (tmp_path / ".cache-0.data.tmp").exists()
    assert not half.with_suffix(".data").exists()
    assert again.bytes < cache.bytes
    assert sum(kept(again, samples)) == len(samples) - 1


def test_a_full_disk_ends_the_cache_once_and_harms_no_one(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan([5000] * 30)
    cache, samples = SampleCache(small_disk / "cache", plan, 1 << 30), make_samples(plan, [5000] * 30)
    for sample in samples:
        cache.write(sample)
    assert capsys.readouterr().out.count("the cache ends at") == 1
    held = kept(cache, samples)
    assert held[0]
    assert not held[-1]
    assert kept(SampleCache(small_disk / "cache", plan, 1 << 30), samples) == held
