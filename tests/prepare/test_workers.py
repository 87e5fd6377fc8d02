"""Protects: however many processes work, the same input gives the same files and the same error, and memory does not grow with it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from stages.artifacts import sha256_file
from stages.prepare import __main__ as stage
from stages.prepare import workers
from stages.prepare.jobs import JobContext
from stages.prepare.lines import BATCH_LINES, PrepareError
from stages.prepare.workers import BYTES_PER_PROCESS, Processes, process_count
from tests.prepare.project import chat, make_project, prepare


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """Four hands, six inputs under way."""
    monkeypatch.setattr(workers, "_context", object())
    with ThreadPoolExecutor(4) as threads:
        yield Processes(cast(Any, threads), 6)


def late(context: JobContext, number: int) -> int:
    time.sleep(random.random() / 100)
    if number == 30:
        raise PrepareError("line 30")
    return number


def test_results_come_in_order_and_few_inputs_are_under_way(pool: Processes) -> None:
    given: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(30):
            given.append(number)
            yield number

    for count, result in enumerate(pool.in_order(late, numbers())):
        assert result == count
        assert len(given) <= count + 6


def test_of_two_errors_the_one_that_stands_first_is_raised(pool: Processes) -> None:
    def numbers(end: int) -> Iterator[int]:
        yield from range(end)
        raise PrepareError(f"input {end}")

    for end, says in ((29, "input 29"), (32, "line 30")):
        results: list[int] = []
        with pytest.raises(PrepareError, match=says):
            results.extend(pool.in_order(late, numbers(end)))
        assert results == list(range(min(end, 30)))


def test_little_input_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [process_count(size) for size in (0, 2 * BYTES_PER_PROCESS - 1, 2 * BYTES_PER_PROCESS, 1 << 40)] == [1, 1, 2, 8]


def test_two_processes_write_what_one_writes(tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [chat(number % 700, answer=f"Answer {number}.", kind="abc"[number % 3]) for number in range(4 * BATCH_LINES)]
    rows[BATCH_LINES + 5]["messages"][0]["role"] = "narrator"
    rows[-1] = rows[0]
    make_project(tiny_verifier, {"a.jsonl": rows[:900], "b.jsonl": rows[900:]}, limit=950, max_seq_len=24)
    written = []
    for count in (1, 2):
        monkeypatch.setattr(stage, "process_count", lambda _, count=count: count)
        report = prepare()
        written.append({path: sha256_file(path) for path in Path("outputs/prepare").rglob("*") if path.is_file()})
    assert written[0] == written[1]
    assert report["splits"]["train"]["cut_samples"] > 0
    assert report["rows"]["duplicates"] > 0
    Path("b.jsonl").write_bytes(Path("b.jsonl").read_bytes() + b"{\n[]\n")
    with pytest.raises(PrepareError, match=r"^b\.jsonl:125: not JSON"):
        prepare()
