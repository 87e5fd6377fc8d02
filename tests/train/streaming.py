"""Streams for real: workspaces of one tiny verifier, an extracting server, Mooncake's master, and trainings that are watched."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
from ruamel.yaml import YAML

from stages.extract.__main__ import run as run_extract
from stages.hidden_states.envelope import NOBODY
from stages.hidden_states.server import master_command
from stages.params import Params, StageParams, read_params
from stages.process import end_process_tree
from stages.servers import free_port, start, stop, wait_until_healthy
from stages.tracking import connect
from tests.extract.workspace import make_workspace
from tests.paths import REPOSITORY

SAMPLES, STEPS, PER_STEP = 40, 30, 2
TIMEOUT_SECONDS, TTL_SECONDS, BUDGET_BYTES = 3.0, 10.0, 1 << 20
STOP_SECONDS = 60.0
EXTRACTION: dict[str, Any] = {
    "max_num_seqs": 1,
    "ahead_samples": 8,
    "timeout_seconds": TIMEOUT_SECONDS,
    "ttl_seconds": TTL_SECONDS,
    "budget_bytes": BUDGET_BYTES,
}
DRAFTER = {"draft_vocab_size": 128, "intermediate_size": 64, "markov_rank": 8, "num_layers": 1, "dtype": "float32"}
TRAIN = {
    "steps": STEPS,
    "sequences_per_step": PER_STEP,
    "anchors_per_sequence": 8,
    "precision": "fp32",
    "threads": 1,
    "learning_rate": 1e-3,
    "checkpoint_every": 1,
    "validation_every": 20,
}
ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY)}


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.02)


def set_params(folder: Path, **sections: dict[str, Any]) -> None:
    yaml = YAML()
    params = yaml.load((folder / "params.yaml").read_text(encoding="utf-8"))
    for section, values in sections.items():
        params[section].update(json.loads(json.dumps(values)))
    with (folder / "params.yaml").open("w", encoding="utf-8") as stream:
        yaml.dump(params, stream)


def make_template(folder: Path, verifier: Path) -> Path:
    """A workspace with nothing extracted yet; others are copies of it."""
    make_workspace(folder, verifier, SAMPLES, **EXTRACTION)
    set_params(folder, drafter=DRAFTER, train=TRAIN)
    with chdir(folder):
        connect("sqlite:///mlflow.db")  # its tables are made once, and not in each copy
    return folder


def extracted(folder: Path) -> None:
    """Run the extract stage in this process: for modes online and hybrid, where it starts no engine."""
    with chdir(folder):
        run_extract(cast(Params, StageParams(read_params(), "extract")), Path("outputs/extract"))


def copy_workspace(template: Path, folder: Path, **extraction: Any) -> Path:
    """A workspace that streams: its plan is made, nothing is trained."""
    shutil.copytree(template, folder, symlinks=True)
    set_params(folder, extraction={"mode": "online", **extraction})
    extracted(folder)
    return folder


def offline_weights(template: Path, folder: Path) -> str:
    """What a training that reads dumped states ends in."""
    shutil.copytree(template, folder, symlinks=True)
    for stage in ("stages.extract", "stages.train"):
        status, output = run_stage(folder, stage)
        assert status == 0, output
    return weights(folder)


def run_stage(folder: Path, stage: str, *arguments: str, seconds: float = 120.0) -> tuple[int, str]:
    """Exit status of `python -m <stage>`, and what it printed."""
    with Process(folder, stage, *arguments) as process:
        return process.finish(seconds)


class Process:
    """A Python module running in a workspace; whatever happens it ends with the block."""

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        self.folder = folder
        self.log = folder / f"{module}.log"
        with self.log.open("wb") as stream:
            command = [sys.executable, "-m", module, *arguments]
            self.process = subprocess.Popen(command, cwd=folder, env=os.environ | ENVIRONMENT, stdout=stream, stderr=subprocess.STDOUT)

    def finish(self, seconds: float) -> tuple[int, str]:
        status = self.process.wait(seconds)
        # As a terminal would show it: progress bars move the cursor.
        return status, re.sub(r"\x1b\[A|\r", "\n", self.log.read_text(encoding="utf-8"))

    def interrupt(self) -> None:
        """Ctrl-C: a terminal tells all of its processes."""
        parent = psutil.Process(self.process.pid)
        for process in (*parent.children(recursive=True), parent):
            process.send_signal(signal.SIGINT)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        end_process_tree(self.process.pid)
        self.process.wait()


def training(folder: Path, *wounds: str) -> Process:
    """The training stage; `wounds`: see `tests/train/wounded.py`."""
    return Process(folder, "tests.train.wounded", *wounds)


def train(folder: Path, *wounds: str) -> tuple[int, str]:
    with training(folder, *wounds) as process:
        return process.finish(STOP_SECONDS)


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints of the unfinished training in `folder`."""
    return sorted(int(path.stem.removeprefix("step-")) for path in (folder / "outputs" / "train").glob("work/*/step-*.pt"))


def reach(process: Process, step: int, seconds: float = 60.0) -> None:
    """Wait until a training has made a checkpoint of `step` or a later one."""

    def reached() -> bool:
        assert process.process.poll() is None, process.finish(1)[1]
        return max(checkpoints(process.folder), default=0) >= step

    wait_for(f"step {step}", reached, seconds)


def weights(folder: Path) -> str:
    """Digest of the trained drafter."""
    return hashlib.sha256((folder / "outputs" / "train" / "drafter" / "model.safetensors").read_bytes()).hexdigest()


class Server:
    """`python -m stages.extract.serve` in a workspace, on a port of its own."""

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder.parent / f"{folder.name}.log"
        self.family: list[psutil.Process] = []

    def start(self) -> None:
        with chdir(self.folder):
            self.process = start([sys.executable, "-m", "stages.extract.serve", "--port", str(self.port)], ENVIRONMENT, self.log)
        wait_until_healthy(self.process, self.url, 240.0, self.log)
        self.family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def engine_core(self) -> psutil.Process:
        return next(process for process in self.family if "EngineCore" in " ".join(process.cmdline()))

    def signal(self, number: signal.Signals) -> None:
        for process in self.family:
            process.send_signal(number)

    def stop(self) -> None:
        """End what is left of it."""
        if hasattr(self, "process"):
            stop(self.process)
        for process in self.family:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def complete(self, tokens: list[int], **body: Any) -> dict[str, Any]:
        """Ask for one sample; the handle of its states."""
        request = {"model": "verifier", "prompt": [tokens], "max_tokens": 1, "temperature": 0.0, **body}
        answer = httpx.post(f"{self.url}/v1/completions", json=request, timeout=TIMEOUT_SECONDS, trust_env=False)
        answer.raise_for_status()
        return cast(dict[str, Any], answer.json()["kv_transfer_params"]["hidden_states"])


class Master:
    """A real `mooncake_master` whose address stays the same when it starts again."""

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path) -> None:
        self.port, self.metrics = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.log = folder / "master.log"

    def start(self) -> None:
        self.process = start(master_command(self.port, self.metrics), {"GLOG_minloglevel": "1"}, self.log)
        wait_for("mooncake_master", self.answers, 10.0)

    def get(self, path: str) -> str:
        return httpx.get(f"http://127.0.0.1:{self.metrics}/{path}", timeout=5.0, trust_env=False).text

    def answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return bool(self.get("health"))
        return False

    def stop(self) -> None:
        if hasattr(self, "process"):
            stop(self.process)


class Site:
    """What trainings share: a server, and the store between them."""

    def __init__(self, template: Path, folder: Path, spool: Path | None = None) -> None:
        """`spool`: the store is this directory; None: Mooncake."""
        self.template, self.spool = template, spool
        self.master = None if spool is not None else Master(folder)
        where = {"transport": "file", "spool": str(spool)} if self.master is None else {"transport": "mooncake", "master": self.master.address}
        self.server = Server(copy_workspace(template, folder / "server", **where))
        self.extraction = {**where, "servers": [self.server.url]}

    def workspace(self, folder: Path, **extraction: Any) -> Path:
        """A workspace whose training streams from here."""
        return copy_workspace(self.template, folder, **{**self.extraction, **extraction})

    def held(self) -> list[str]:
        """Names of the objects that trainings have left in the store."""
        if self.spool is not None:
            names = [path.name for path in self.spool.iterdir() if path.name != ".lock"]
        else:
            assert self.master is not None
            names = self.master.get("get_all_keys").split()
        return sorted(name for name in names if not name.startswith(NOBODY))

    def held_bytes(self) -> int:
        if self.spool is not None:
            total = 0
            for path in self.spool.iterdir():
                with suppress(FileNotFoundError):
                    total += path.stat().st_size
            return total
        assert self.master is not None
        metric = next(line for line in self.master.get("metrics").splitlines() if line.startswith("master_allocated_bytes "))
        return int(float(metric.split()[1]))

    def start(self) -> None:
        if self.master is not None:
            self.master.start()
        self.server.start()

    def stop(self) -> None:
        self.server.stop()
        if self.master is not None:
            self.master.stop()


class Proxy(ThreadingHTTPServer):
    """Between a training and its server: hands requests on to `target`, and answers on as `rewrite` leaves them."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        self.target = target
        self.rewrite: Callable[[bytes], bytes] = lambda answer: answer
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
        answer = httpx.request(self.command, self.server.target + self.path, content=body, headers=headers, timeout=60.0, trust_env=False)
        content = self.server.rewrite(answer.content)
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(OSError):  # the training has ended
            self.wfile.write(content)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Nothing."""


HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend front
  bind 127.0.0.1:{port}
  stick-table type string len 64 size 16 expire 10m store http_req_cnt
  http-request track-sc0 path
  http-request return status 500 content-type text/plain string injected if {{ path /v1/completions }} {{ sc_http_req_cnt(0) le {count} }}
  default_backend engine
backend engine
  server engine {target}
"""


@contextmanager
def failing_first(count: int, url: str, folder: Path) -> Iterator[str]:
    """A real HAProxy before `url` that answers the first `count` requests for samples with HTTP 500; its own URL."""
    port = free_port()
    config = folder / "haproxy.cfg"
    config.write_text(HAPROXY.format(port=port, count=count, target=url.removeprefix("http://")), encoding="utf-8")
    process = start(["haproxy", "-db", "-f", str(config)], {}, folder / "haproxy.log")
    try:
        wait_for("haproxy", lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 10.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


@contextmanager
def repeated(action: Callable[[], object]) -> Iterator[None]:
    """Do `action` again and again while the block lasts."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            action()
            time.sleep(0.005)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def open_site(template: Path, folder: Path, spool: Path | None = None) -> Iterator[Site]:
    site = Site(template, folder, spool)
    try:
        site.start()
        yield site
    finally:
        site.stop()
