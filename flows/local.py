"""The local servers behind `make up` and `make down`: started by supervisord, waited for, and told of the deployments.

python -m flows.local up
python -m flows.local down
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from flows.context import ROOT, TRACKING, repository
from flows.errors import FlowError
from stages.errors import DraftlineError

POOL = "draftline"
HEALTHY_SECONDS = 120.0
STOP_SECONDS = 60.0


def settings(root: Path) -> dict[str, str]:
    """Environment of the servers and of what talks to them; ports and MLflow's database can be set from outside."""
    mlflow_port = os.environ.get("MLFLOW_PORT", "5000")
    prefect_port = os.environ.get("PREFECT_PORT", "4200")
    return {
        ROOT: str(root),
        "MLFLOW_PORT": mlflow_port,
        "PREFECT_PORT": prefect_port,
        "MLFLOW_BACKEND": os.environ.get("MLFLOW_BACKEND", f"sqlite:///{root / '.run' / 'mlflow.db'}"),
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
    """
    values = settings(root)
    if not running(root):
        for name in ("MLFLOW_PORT", "PREFECT_PORT"):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", int(values[name])))
                except OSError as error:
                    raise FlowError(f"{name} = {values[name]}: 127.0.0.1:{values[name]}: {error.strerror}; set another, or end what listens there") from None
        (root / ".run" / "logs").mkdir(parents=True, exist_ok=True)
        done = _supervisor("supervisord", root)
        if done.returncode != 0:
            raise FlowError(f"supervisord did not start: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    for what, url in (("mlflow", f"{values[TRACKING]}/health"), ("prefect", f"{values['PREFECT_API_URL']}/health")):
        _wait(what, url, root)
    _prefect(root, "work-pool", "create", POOL, "--type", "process", "--overwrite")
    _prefect(root, "deploy", "--all", "--no-prompt")


def _wait(what: str, url: str, root: Path) -> None:
    deadline = time.monotonic() + HEALTHY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise FlowError(f"{what} does not answer at {url} after {HEALTHY_SECONDS:.0f} s; log: {root / '.run' / 'logs'}") from None
            time.sleep(0.5)


def _prefect(root: Path, *words: str) -> None:
    done = subprocess.run(["prefect", *words], cwd=root, env=os.environ | settings(root), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FlowError(f"prefect {' '.join(words)}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["up", "down"])
    options = parser.parse_args(argv)
    root = repository()
    try:
        if options.command == "up":
            up(root)
            values = settings(root)
            print(f"MLflow {values[TRACKING]}, Prefect {values['PREFECT_API_URL'].removesuffix('/api')}; logs in .run/logs; `make down` ends them")
            print("in a shell that talks to them:")
            print(f"export {TRACKING}={values[TRACKING]} PREFECT_API_URL={values['PREFECT_API_URL']}")
        else:
            down(root)
    except DraftlineError as error:
        print(f"draftline {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
