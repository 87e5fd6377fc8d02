"""A stage's process: one at a time per output directory, never longer than its parent, errors of a user in one line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stages.errors import DraftlineError
from stages.process import output_lock
from tests.paths import REPOSITORY

RUN = (
    "import sys, time, os, subprocess; from pathlib import Path\n"
    "from stages.process import stage_main; from stages.errors import DraftlineError\n"
    "def run(params, output):\n"
    "    {body}\n"
    "raise SystemExit(stage_main('lock', run))\n"
)
SLEEPER = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); print(os.getpid(), child.pid, flush=True); time.sleep(300)"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    shutil.copy(REPOSITORY / "params.yaml", tmp_path)
    return tmp_path


def environment(**extra: str) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if not key.startswith("DVC_")}, "PYTHONPATH": str(REPOSITORY), **extra}


def run_stage(here: Path, body: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN.format(body=body)], cwd=here, env=environment(**extra), capture_output=True, text=True, timeout=60)


def wait_until_gone(pids: list[int], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return
        time.sleep(0.1)
    pytest.fail(f"still alive: {[pid for pid in pids if psutil.pid_exists(pid)]}")


class TestErrors:
    def test_a_user_s_error_is_one_line_and_a_status(self, here: Path) -> None:
        done = run_stage(here, "raise DraftlineError('what, where, the value')")
        assert (done.returncode, done.stderr, done.stdout) == (1, "draftline lock: what, where, the value\n", "")

    def test_bad_params_stop_a_stage_that_reads_none(self, here: Path) -> None:
        """DVC re-runs only what lists a parameter: whichever stage runs first has to look at the whole file."""
        (here / "params.yaml").write_text("train: {steps: ten}\n", encoding="utf-8")
        done = run_stage(here, "print('ran')")
        assert done.returncode == 1
        assert done.stdout == ""
        assert "train.steps = 'ten'" in done.stderr

    def test_our_own_mistakes_keep_their_traceback(self, here: Path) -> None:
        done = run_stage(here, "raise KeyError('x')")
        assert done.returncode == 1
        assert "Traceback" in done.stderr

    def test_ctrl_c_is_one_line_and_the_status_that_shells_have_for_it(self, here: Path) -> None:
        done = run_stage(here, "os.kill(os.getpid(), 2); time.sleep(30)")
        assert (done.returncode, done.stderr) == (130, "draftline lock: interrupted; run again to go on from what is finished\n")

    @pytest.mark.parametrize(
        ("failing", "says"),
        [
            ("(output / 'a').mkdir(); (output / 'a').write_text('')", "outputs/lock/a: Is a directory"),
            ("(output / 'a').write_text(''); (output / 'a/b').read_text()", "outputs/lock/a/b: Not a directory"),
            ("raise PermissionError(13, 'Permission denied', 'data/x')", "data/x: Permission denied"),
            ("raise OSError(30, 'Read-only file system', Path('x'))", "x: Read-only file system"),
        ],
    )
    def test_a_path_that_cannot_be_used_is_one_line(self, here: Path, failing: str, says: str) -> None:
        done = run_stage(here, failing)
        assert (done.returncode, done.stderr) == (1, f"draftline lock: {says}\n")

    @pytest.mark.parametrize("error", ["OSError(13, 'Permission denied')", "OSError(5, 'Input/output error', 'x')", "PermissionError(1, 'no', 3)"])
    def test_an_error_without_a_path_or_of_another_kind_keeps_its_traceback(self, here: Path, error: str) -> None:
        assert "Traceback" in run_stage(here, f"raise {error}").stderr

    @pytest.mark.parametrize(
        "failing",
        [
            "Path(output / 'big').write_bytes(bytes(1 << 22))",
            "from safetensors.numpy import save_file; import numpy; save_file({'a': numpy.zeros(1 << 20)}, output / 'big')",
            "from stages.train import state; import torch; state.save(output / 'work', 1, torch.nn.Linear(600, 600), [])",
            "from stages.dataset import TokenSample, write_split; "
            "write_split(output, 'train', (TokenSample(str(n), 'k', list(range(n, n + 1000)), [1] * 1000, 1, 1, []) for n in range(3000)))",
        ],
        ids=["plain", "safetensors", "checkpoint", "parquet"],
    )
    def test_a_full_disk_is_one_line_and_leaves_no_half_file(self, here: Path, failing: str) -> None:
        script = here / "stage.py"
        script.write_text(RUN.format(body=failing), encoding="utf-8")
        (here / "outputs").mkdir()
        inside = f"mount -t tmpfs -o size=1m tmpfs outputs && {sys.executable} stage.py; status=$?; find outputs -type f; exit $status"
        done = subprocess.run(["unshare", "-rm", "sh", "-c", inside], cwd=here, env=environment(), capture_output=True, text=True, timeout=60)
        if "unshare" in done.stderr or "mount:" in done.stderr:
            pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
        assert done.returncode == 1
        assert "no space left on the device; free some and run again" in done.stderr
        assert done.stderr.count("\n") == 1
        if "write_split" in failing:
            assert "parquet" not in done.stdout


class TestLock:
    def test_a_second_writer_waits_and_is_then_refused(self, tmp_path: Path) -> None:
        with (
            output_lock(tmp_path / "train"),
            pytest.raises(DraftlineError, match=r"train/\.lock: another process has written here for 1 s"),
            output_lock(tmp_path / "train", seconds=1.0),
        ):
            pass

    def test_a_second_writer_gets_its_turn(self, tmp_path: Path) -> None:
        with output_lock(tmp_path / "train"):
            pass
        with output_lock(tmp_path / "train", seconds=0.0):
            pass

    def test_other_directories_are_free(self, tmp_path: Path) -> None:
        with output_lock(tmp_path / "train"), output_lock(tmp_path / "extract", seconds=0.0):
            pass

    def test_kill_9_frees_the_lock(self, tmp_path: Path) -> None:
        code = "import sys, time; from pathlib import Path; from stages.process import output_lock\n"
        code += "with output_lock(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)\n"
        holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "train")], env=environment(), stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DraftlineError), output_lock(tmp_path / "train", seconds=0.0):
            pass
        holder.kill()
        holder.communicate()
        with output_lock(tmp_path / "train", seconds=0.0):
            pass


class TestParents:
    def start_under(self, here: Path, name: str) -> tuple[subprocess.Popen[str], list[int]]:
        """A program called `name` that starts a stage through a shell; returns it and the pids of the stage and its child."""
        (here / "stage.py").write_text(RUN.format(body=SLEEPER), encoding="utf-8")
        (here / name).write_text(f"import subprocess\nsubprocess.run('{sys.executable} stage.py; true', shell=True)\n", encoding="utf-8")
        starter = subprocess.Popen([sys.executable, name, "repro"], cwd=here, env=environment(), stdout=subprocess.PIPE, text=True)
        assert starter.stdout is not None
        return starter, [int(pid) for pid in starter.stdout.readline().split()]

    def test_a_stage_and_its_children_end_when_dvc_is_killed(self, here: Path) -> None:
        """The shell between them survives `kill -9` of dvc: an orphan would overwrite what the next run writes."""
        starter, pids = self.start_under(here, "dvc")
        assert len(pids) == 2
        starter.send_signal(signal.SIGKILL)
        wait_until_gone(pids)
        starter.communicate()

    def test_a_stage_without_dvc_ends_with_its_parent(self, here: Path) -> None:
        starter, pids = self.start_under(here, "something")
        shell = psutil.Process(pids[0]).parent()
        assert shell is not None
        shell.kill()
        wait_until_gone(pids)
        starter.communicate()

    def test_the_lock_is_free_again_after_that(self, here: Path) -> None:
        starter, pids = self.start_under(here, "dvc")
        starter.send_signal(signal.SIGKILL)
        done = run_stage(here, "print('mine')")
        assert (done.returncode, done.stdout) == (0, "mine\n")
        wait_until_gone(pids)
        starter.communicate()

    def test_a_stage_whose_dvc_died_before_it_looked_does_nothing(self, here: Path) -> None:
        """The window is the time that imports take: an orphan must not wait for the lock and then overwrite."""
        wait = "import os, time\nwhile os.getppid() == int(os.environ['STARTER']): time.sleep(0.05)\n"
        (here / "stage.py").write_text(wait + RUN.format(body="(output / 'mine').touch()"), encoding="utf-8")
        starter = (
            "import os, subprocess, sys\nsubprocess.Popen([sys.executable, 'stage.py'], env={**os.environ, 'STARTER': str(os.getpid()), 'DVC_STAGE': 'lock'})\n"
        )
        with (here / "log").open("w") as log:
            subprocess.run([sys.executable, "-c", starter], cwd=here, env=environment(), stderr=log, timeout=60, check=True)
        deadline = time.monotonic() + 30
        while not (here / "log").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        if not (here / "log").read_text() and (here / "outputs" / "lock" / "mine").exists():
            pytest.skip("orphans are adopted by a Python program here, which might be dvc")
        assert (here / "log").read_text() == "draftline lock: the dvc that started this stage has ended; nothing was done\n"
        assert not (here / "outputs").exists()
