"""A server's end: it and what it has started are gone, and what they clean up in the end is cleaned up."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stages import servers

SERVER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {helper!r}], stdin=subprocess.PIPE)
print(child.pid, flush=True)
time.sleep(60)
"""
WAIT_FOR_PARENT = "import sys, time; from pathlib import Path; sys.stdin.read(); "


def started(folder: Path, helper: str) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """A server and its helper."""
    log = folder / "log"
    process = servers.start([sys.executable, "-c", SERVER.format(helper=WAIT_FOR_PARENT + helper)], {}, log)
    while not (text := log.read_text()).endswith("\n"):
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.5)  # the helper's own start
    return process, psutil.Process(int(text))


def test_a_helper_that_outlives_its_server_for_a_moment_ends_its_work(tmp_path: Path) -> None:
    """As `multiprocessing`'s resource tracker: killed at once it leaves vLLM's segments in shared memory for ever."""
    process, helper = started(tmp_path, f"time.sleep(0.5); Path({str(tmp_path / 'cleaned')!r}).touch()")
    servers.stop(process)
    assert (tmp_path / "cleaned").exists()
    assert not helper.is_running()


def test_a_helper_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FAMILY_SECONDS", 0.2)
    process, helper = started(tmp_path, "time.sleep(60)")
    servers.stop(process)
    psutil.wait_procs([helper], timeout=5)
    assert not helper.is_running()


def test_what_a_killed_server_leaves_running_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine outlives its server: it would keep the model's memory, on an accelerator too."""
    monkeypatch.setattr(servers, "FAMILY_SECONDS", 0.2)
    process, helper = started(tmp_path, "time.sleep(60)")
    process.kill()
    process.wait()
    servers.stop(process)
    psutil.wait_procs([helper], timeout=5)
    assert not helper.is_running()


@pytest.mark.parametrize(("nodes", "bound"), [(0, False), (1, False), (2, True)])
def test_only_memory_nodes_to_be_bound_to_are_worth_a_process(nodes: int, bound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one node the model runs in the engine's own process, with every core."""
    for number in range(nodes):
        (tmp_path / f"node{number}").mkdir()
    monkeypatch.setattr(servers, "MEMORY_NODES", tmp_path)
    assert ("--distributed-executor-backend" not in servers.vllm_command("cpu", Path("model"))) is bound
    assert servers.vllm_command("cuda", Path("model")) == ["vllm", "serve", "model"]
