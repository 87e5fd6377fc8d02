"""The local servers behind `make up` and `make down`: started by supervisord, waited for, and told of the deployments.

python -m flows.local up
python -m flows.local down
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from flows.context import BASE_PORT, ROOT, SERVE_PORT, TRACKING, port, repository, require_free_port
from flows.errors import FlowError
from flows.serving.supervisor import Supervisor
from stages.errors import DraftlineError
from stages.params import PARAMS_FILE, read_params
from stages.servers import cause, get
from stages.tracking import probe

POOL = "draftline"
HOST = "127.0.0.1"
BACKEND = "MLFLOW_BACKEND"
HEALTHY_SECONDS = 300.0
"""A new database's migrations take a busy machine minutes; a server that ends is told at once."""
STOP_SECONDS = 60.0


def settings(root: Path) -> dict[str, str]:
    """Environment of the servers and of what talks to them; ports and MLflow's database can be set from outside.

    Raises:
        FlowError: what was set is no port.
    """
    mlflow_port, prefect_port = port("MLFLOW_PORT", 5000), port("PREFECT_PORT", 4200)
    return {
        ROOT: str(root),
        "MLFLOW_PORT": str(mlflow_port),
        "PREFECT_PORT": str(prefect_port),
        BACKEND: os.environ.get(BACKEND) or f"sqlite:///{root / '.run' / 'mlflow.db'}",
        TRACKING: f"http://127.0.0.1:{mlflow_port}",
        "PREFECT_API_URL": f"http://127.0.0.1:{prefect_port}/api",
        "PREFECT_HOME": str(root / ".run" / "prefect"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": str(root),
    }


def _supervisor(command: str, root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    configuration = root / "infra" / "local" / "supervisord.conf"
    return subprocess.run([command, "-c", str(configuration), *words], cwd=root, env=os.environ | settings(root), capture_output=True, text=True, check=False)


def running(root: Path) -> bool:
    """Whether the supervisor of this repository runs."""
    return (root / ".run" / "supervisor.sock").exists() and _supervisor("supervisorctl", root, "pid").returncode == 0


def up(root: Path) -> None:
    """Start all servers, wait until they answer, make pool and deployments.

    Raises:
        FlowError: a port is in use, or a server does not come up.
        TrackingError: MLflow's database cannot be opened.
    """
    values = settings(root)
    if not running(root):
        (root / ".run" / "logs").mkdir(parents=True, exist_ok=True)
        _require_free_ports({name: int(values[name]) for name in ("MLFLOW_PORT", "PREFECT_PORT")} | {SERVE_PORT: port(SERVE_PORT, BASE_PORT)})
        # A server would try for a quarter of an hour to open one that cannot be.
        probe(values[BACKEND], BACKEND)
        done = _supervisor("supervisord", root)
        if done.returncode != 0:
            raise FlowError(f"supervisord did not start: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    supervisor = Supervisor(root / ".run" / "supervisor.sock")
    for name in ("mlflow", "prefect", "worker"):
        # One that was stopped, or has been given up on.
        supervisor.start(name)
    for what, url in (("mlflow", f"{values[TRACKING]}/health"), ("prefect", f"{values['PREFECT_API_URL']}/health")):
        print(f"waiting for {what} ...", flush=True)
        _wait(supervisor, what, url, root)
    print("deploying the flows ...", flush=True)
    _prefect(root, "work-pool", "create", POOL, "--type", "process", "--overwrite")
    _prefect(root, "deploy", "--all")


def _require_free_ports(ports: dict[str, int]) -> None:
    for number, name in {number: name for name, number in ports.items()}.items():
        others = [other for other in ports if other != name and ports[other] == number]
        if others:
            raise FlowError(f"{name} = {number}: {others[0]} is the same; set another")
        require_free_port(HOST, number, name)


def _wait(supervisor: Supervisor, what: str, url: str, root: Path) -> None:
    """Return once a server answers. Raises FlowError: it has ended (supervisord would start it again and again), or does not in time."""
    deadline = time.monotonic() + HEALTHY_SECONDS
    started = 0
    while True:
        try:
            get(url, 5.0)
            return
        except OSError:
            program = supervisor.program(what)
            logs = sorted((root / ".run" / "logs").glob(f"{what}-stdout*.log"), key=lambda log: log.stat().st_mtime)
            said = f": {cause(logs[-1])}" if logs else ""
            if program is None or program.dead or (started and program.started != started):
                raise FlowError(f"{what} ended before it was ready{said} (log: {root / '.run' / 'logs'})") from None
            started = program.started
            if time.monotonic() > deadline:
                raise FlowError(f"{what} does not answer at {url} after {HEALTHY_SECONDS:.0f} s (log: {root / '.run' / 'logs'})") from None
            time.sleep(0.5)


def _prefect(root: Path, *words: str) -> None:
    command = ["prefect", "--no-prompt", *words]
    done = subprocess.run(command, cwd=root, env=os.environ | settings(root), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        # Its sentences are folded into lines, between frames.
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip() and line[0] not in "╭│╰"]
        raise FlowError(f"prefect {' '.join(words)}: {' '.join(said)[-300:]}")


def down(root: Path) -> None:
    """End all servers and what they have started. Raises FlowError: they do not end."""
    if not running(root):
        return
    supervisor = psutil.Process(int((root / ".run" / "supervisord.pid").read_text()))
    _supervisor("supervisorctl", root, "shutdown")
    try:
        supervisor.wait(STOP_SECONDS)
    except psutil.TimeoutExpired:
        raise FlowError(f"the servers have not ended within {STOP_SECONDS:.0f} s; log: {root / '.run' / 'logs'}") from None


def summary(root: Path) -> str:
    """Where everything is, and what to do next."""
    values = settings(root)
    return f"""
MLflow    {values[TRACKING]}
Prefect   {values["PREFECT_API_URL"].removesuffix("/api")}
users     {HOST}:{port(SERVE_PORT, BASE_PORT)}, once a verifier is served
logs      {root / ".run" / "logs"}

A shell that talks to them needs:
  export {TRACKING}={values[TRACKING]} PREFECT_API_URL={values["PREFECT_API_URL"]}
Next, register a verifier (params.yaml names one):
  python -m flows.verifiers add {read_params(root / PARAMS_FILE).verifier.name}
`make down` ends everything."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["up", "down"])
    options = parser.parse_args(argv)
    root = repository()
    try:
        if options.command == "up":
            up(root)
            print(summary(root))
        else:
            down(root)
    except DraftlineError as error:
        print(f"draftline {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
