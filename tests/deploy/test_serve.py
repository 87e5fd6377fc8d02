"""`make serve`: a real server from the registry, a real answer, real counters, and nothing left behind, however it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from stages.artifacts import read_json, write_json
from stages.deploy.__main__ import run as run_deploy
from stages.params import read_params
from stages.process import end_process_tree
from stages.servers import cause
from stages.serving.server import Acceptance, acceptance
from tests.paths import REPOSITORY

PLAN = Path("outputs/deploy/plan.json")


@pytest.fixture
def planned(registered: dict[str, Any]) -> dict[str, Any]:
    """A plan for the tiny pair on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    yaml = YAML()
    data = yaml.load(Path("params.yaml").read_text(encoding="utf-8"))
    data["engine"] |= {"dtype": "float32", "max_model_len": 256, "kv_cache_bytes": 1 << 26}
    data["prepare"] |= {"max_seq_len": 128}
    data["deploy"] |= {"port": port, "startup_seconds": 300}
    with Path("params.yaml").open("w", encoding="utf-8") as stream:
        yaml.dump(data, stream)
    run_deploy(read_params(), Path("outputs/deploy"))
    plan: dict[str, Any] = read_json(PLAN)
    return plan


Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts `python -m stages.deploy.serve` with options; whatever a failing test leaves is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "stages.deploy.serve", *options]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        end_process_tree(process.pid)
        process.wait()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def runs(process: psutil.Process, module: str) -> bool:
    """Whether that is what a process runs; one that has ended meanwhile runs nothing."""
    try:
        return module in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: list[psutil.Process], seconds: float = 100.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert [process for process in alive if lives(process)] == []


@pytest.mark.integration
class TestServing:
    def test_it_serves_the_registered_drafter_without_the_workspace_and_kill_9_leaves_nothing(self, planned: dict[str, Any], serve: Serve) -> None:
        for stage in ("convert", "register", "gate", "prepare"):
            shutil.rmtree(Path("outputs") / stage)
        process = serve()
        assert process.stdout is not None
        output = ""
        for line in iter(process.stdout.readline, ""):
            output += line
            if "serving; Ctrl-C ends it" in line:
                break
        assert f"smollm2-135m with drafter.smollm2-135m version 1 at http://127.0.0.1:{planned['port']}/v1" in output
        found = re.search(r"acceptance length (\d\.\d\d) \((\d+) drafts, (\d+) of (\d+) drafted tokens accepted; per position [\d. ]+\)", output)
        assert found, output
        # The Markov head of this pair knows the verifier's bigrams; without it nothing would be accepted.
        assert int(found[3]) > 0
        assert int(found[4]) == 4 * int(found[2])

        second = serve("--once")
        _, errors = second.communicate(timeout=200)
        assert (second.returncode, errors.count("\n")) == (1, 1)
        assert f"deploy.port = {planned['port']}: Address already in use" in errors

        started = family(process)
        assert len(started) >= 2, "the server and its engine"
        process.send_signal(signal.SIGKILL)
        wait_until_gone(started)
        process.communicate()

    def test_ctrl_c_while_it_loads_ends_everything(self, planned: dict[str, Any], serve: Serve) -> None:
        process = serve()
        deadline = time.monotonic() + 200
        started: list[psutil.Process] = []
        while not any(runs(child, "vllm.entrypoints.openai.api_server") for child in started):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            started = family(process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=200)
        assert process.returncode == 0
        wait_until_gone(started)

    def test_a_server_that_cannot_start_is_one_line_with_its_cause(self, planned: dict[str, Any], serve: Serve) -> None:
        argv = planned["argv"]
        argv[argv.index("--max-model-len") + 1] = "100000"
        write_json(PLAN, {**planned, "argv": argv})
        started = time.monotonic()
        process = serve("--once")
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1
        line = errors.strip().splitlines()[-1]
        assert line.startswith("draftline serve: the server ended with status")
        assert "max_model_len" in line
        assert time.monotonic() - started < planned["startup_seconds"]


def test_a_plan_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    monkeypatch.chdir(tmp_path)
    PLAN.mkdir(parents=True)
    process = serve("--once")
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (1, f"draftline serve: {PLAN}: Is a directory\n")


class TestReadingTheServer:
    def test_the_cause_is_the_error_that_others_only_report(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text(
            "INFO starting\n"
            "(EngineCore pid=7) ERROR 11-30 02:00:00 [core.py:1] ValueError: The checkpoint has no fc.weight\n"
            "(EngineCore pid=7) Traceback (most recent call last):\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n"
            "nothing more\n",
            encoding="utf-8",
        )
        assert cause(log) == "ValueError: The checkpoint has no fc.weight"
        log.write_text("usage: api_server\napi_server.py: error: unrecognized arguments: --x\n", encoding="utf-8")
        assert cause(log) == "api_server.py: error: unrecognized arguments: --x"
        log.write_text("", encoding="utf-8")
        assert cause(log) == "it printed nothing"

    def test_counters_are_read_per_position(self, tmp_path: Path) -> None:
        metrics = (
            "# HELP vllm:spec_decode_num_drafts_total x\n"
            'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0\n'
            'vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09\n'
            'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 20.0\n'
            'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="0"} 1.79e+09\n'
        )
        (tmp_path / "metrics").write_text(metrics, encoding="utf-8")
        files = subprocess.Popen(
            [
                sys.executable,
                "-u",
                "-c",
                "import http.server as h; s = h.ThreadingHTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler); print(s.server_port); s.serve_forever()",
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert files.stdout is not None
            found = acceptance(f"http://127.0.0.1:{int(files.stdout.readline())}")
        finally:
            files.kill()
            files.communicate()
        assert found == Acceptance(10, 20, 9, [6, 3])
        assert str(found) == "acceptance length 1.90 (10 drafts, 9 of 20 drafted tokens accepted; per position 0.60 0.30)"
        assert str(Acceptance(0, 0, 0, [])) == "no draft was verified"
