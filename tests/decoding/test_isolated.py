"""An engine in its own process: how it fails, and that it never outlives who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from pydantic import BaseModel, ValidationError, field_validator

from stages.decoding.engine import EngineConfig, EngineError, Request
from stages.decoding.isolated import EngineProcess, cause, run_isolated
from stages.errors import DraftlineError
from tests.decoding.pairs import engine_config, requests
from tests.paths import REPOSITORY

PROMPTS = requests(2, max_tokens=8)

OWNER = """
import sys, time
from tests.decoding.pairs import engine_config, requests
from stages.decoding.isolated import EngineProcess
from pathlib import Path
import psutil

with EngineProcess(engine_config(Path(sys.argv[1]))) as engine:
    engine.generate(requests(1, max_tokens=2))
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    time.sleep(600)
"""
"""Starts an engine, names the processes below it, and waits."""


@pytest.mark.parametrize("ids", [[], list(range(128))], ids=["empty", "as long as the model's length"])
def test_a_prompt_that_cannot_be_decoded_is_refused_before_anything_starts(ids: list[int], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"request x: .*prompt"):
        run_isolated(engine_config(tmp_path / "absent"), [[Request("x", ids, 4)]])


def test_the_cause_is_the_first_error_of_a_chain_on_one_line() -> None:
    outer = RuntimeError("Engine core initialization failed. See root cause above.")
    outer.__cause__ = ValueError("the real\n  reason")
    assert cause(outer) == "ValueError: the real reason"
    assert cause(DraftlineError("params.yaml: x = 1: no")) == "params.yaml: x = 1: no"
    assert len(cause(ValueError("long " * 1000))) < 450

    class Model(BaseModel):
        length: int

        @field_validator("length")
        @classmethod
        def _short(cls, value: int) -> int:
            raise ValueError(f"{value}\n  is too long")

    with pytest.raises(ValidationError) as caught:
        Model.model_validate({"length": 7})
    assert cause(caught.value) == "ValidationError: 7 is too long"


def test_a_cache_that_is_too_small_names_the_knob() -> None:
    assert "engine.kv_cache_bytes = 7 is too small" in cause(ValueError("No available memory for the cache blocks."), 7)


@pytest.mark.integration
def test_an_engine_that_does_not_start_says_why(tiny_verifier: Path) -> None:
    too_long = replace(engine_config(tiny_verifier), max_model_len=4000)
    with pytest.raises(EngineError, match=r"vLLM with .*\(float32, no drafter\): .*max_model_len \(4000\)") as caught:
        run_isolated(too_long, [PROMPTS])
    assert "\n" not in str(caught.value)


@pytest.mark.integration
def test_a_killed_engine_is_an_error_and_its_sibling_goes_on(tiny_verifier: Path) -> None:
    with EngineProcess(engine_config(tiny_verifier)) as sibling:
        expected = sibling.generate(PROMPTS)
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        with EngineProcess(engine_config(tiny_verifier)) as engine:
            engine.wait_ready()
            (own,) = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
            assert own.pid == engine.pid
            own.kill()
            with pytest.raises(EngineError, match="ended by signal 9"):
                engine.generate(PROMPTS)
        assert sibling.generate(PROMPTS) == expected
    assert not [child for child in psutil.Process().children(recursive=True) if child.pid == own.pid]


@pytest.mark.integration
def test_results_come_as_they_finish_and_return_in_order(tiny_verifier: Path) -> None:
    prompts = [Request("same name", [5, 6, 7], 30, ignore_eos=True), Request("same name", [8, 9], 2, ignore_eos=True)]
    seen: list[tuple[int, int]] = []
    run = run_isolated(engine_config(tiny_verifier), [prompts, prompts[:1]], on_finished=lambda batch, done: seen.append((batch, len(done.token_ids))))
    assert seen == [(0, 2), (0, 30), (1, 30)]
    assert [[len(done.token_ids) for done in batch] for batch in run.completions] == [[30, 2], [30]]
    assert [[done.id for done in batch] for batch in run.completions] == [["same name"] * 2, ["same name"]]
    assert run.load_seconds > 0
    assert all(seconds > 0 for seconds in run.seconds)


def print_and_fail(config: EngineConfig, connection: Connection) -> int:
    """Stands for an engine whose libraries talk, and which ends without a word to its caller."""
    print("for people", flush=True)
    os.system("echo from a child")
    print(f"{os.getcwd()} {os.environ['TORCH_COMPILE_DISABLE']}", file=sys.stderr, flush=True)
    return 3


@pytest.mark.integration
def test_what_an_engine_prints_goes_to_its_caller_s_standard_error(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the moment: the server that it is forked from may have been started with another one, and in another folder."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    engine = EngineProcess(engine_config(tiny_verifier), live=print_and_fail)
    with pytest.raises(EngineError, match=r"vLLM with .*: its process ended with status 3; what it printed is above"), engine:
        engine.wait_ready()
    printed = capfd.readouterr()
    assert printed.out == ""
    assert {"for people", "from a child", f"{tmp_path} 1"} <= set(printed.err.splitlines())
    assert dict(os.environ) == before, "the caller's own environment stays as it was"


@pytest.mark.integration
def test_later_engines_import_nothing_anew(tiny_verifier: Path) -> None:
    """Importing vLLM is most of a small engine's start; CPU seconds, because the machine may be busy."""
    with EngineProcess(engine_config(tiny_verifier)) as first:
        first.wait_ready()
    with EngineProcess(engine_config(tiny_verifier)) as engine:
        engine.wait_ready()
        assert sum(psutil.Process(engine.pid).cpu_times()[:2]) < 2.5


def test_without_a_server_to_fork_from_the_error_names_the_engine(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import os; os._exit(3)")
    code = (
        "from stages.decoding.isolated import PROCESSES, run_isolated; from tests.decoding.pairs import engine_config, requests\n"
        "from stages.errors import DraftlineError; from pathlib import Path\n"
        "PROCESSES.set_forkserver_preload(['broken'])\n"
        "try: run_isolated(engine_config(Path('x')), [requests(1)])\n"
        "except DraftlineError as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("vLLM with x (float32, no drafter): the process that imports vLLM ended")
    assert done.stdout.count("\n") == 1


@pytest.mark.integration
def test_no_engine_outlives_a_killed_owner(tiny_verifier: Path) -> None:
    """`kill -9` of a stage leaves nobody to close the engine: memory and cores would stay taken."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tiny_verifier)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert owner.stdout is not None
    with owner.stdout:
        below = [int(word) for word in owner.stdout.readline().split()]
    assert len(below) == 3, "the fork server, its resource tracker and an engine"
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in below):
        assert time.monotonic() < deadline, "the engine is still there"
        time.sleep(0.2)
