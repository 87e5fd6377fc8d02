"""Threads beside the computing one take no team of OpenMP threads: it would slow down the computing one's."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import os, sys, threading
import torch
from stages.hidden_states.threads import stay_aside

def work():
    if sys.argv[1] == "aside":
        stay_aside()
    torch.ones(1 << 22).sum()
    counted.append(len(os.listdir("/proc/self/task")))

torch.set_num_threads(2)
torch.ones(1 << 22).sum()
before, counted = len(os.listdir("/proc/self/task")), []
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(counted[0] - before - 1, torch.get_num_threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize(("kind", "extra"), [("aside", 0), ("plain", 1)])
def test_a_thread_that_stays_aside_starts_no_others(kind: str, extra: int) -> None:
    """Row "plain" shows that the count would see them. The main thread keeps its two."""
    found = subprocess.run([sys.executable, "-c", COUNT, kind], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == [str(extra), "2"]
