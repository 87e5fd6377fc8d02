"""Serve the registered drafter with its verifier (`make serve`).

    python -m stages.deploy.serve                 until Ctrl-C
    python -m stages.deploy.serve --once          end after the first answer

Starts what outputs/deploy/plan.json says, waits for its health, asks one question and prints the answer and the
engine's acceptance counters. The server and all its processes end with this one, however it ends.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stages.artifacts import read_json
from stages.errors import DraftlineError
from stages.pairing.identity import compute_identity
from stages.pairing.lock import require_pair
from stages.pairing.store import DIGEST_CACHE
from stages.process import OUTPUTS, die_with_parent, refused_path
from stages.servers import ServerError, cause, start, stop, wait_until_healthy
from stages.serving.fetch import fetch
from stages.serving.plan import installed_engine
from stages.serving.server import acceptance, base_url, chat, require_free_port

PLAN = OUTPUTS / "deploy" / "plan.json"
LOG = OUTPUTS / "deploy" / "serve" / "server.log"
QUESTION = "Write a short story about a lighthouse keeper who finds a letter in a bottle."
ANSWER_TOKENS = 128
KEYS = {"argv", "engine", "env", "host", "max_model_len", "model", "port", "registered", "startup_seconds", "verifier"}
"""Of a plan, those that serving needs."""


def ready_plan(path: Path = PLAN) -> dict[str, Any]:
    """The plan, after everything it relies on was looked at: engine, registered files, verifier, pair, port.

    Raises:
        DraftlineError: one of them is not what it was when the plan was made.
    """
    plan: dict[str, Any] = read_json(path)
    if not isinstance(plan, dict) or (missing := sorted(KEYS - set(plan))):
        raise DraftlineError(f"{path}: not a serving plan{f' (no {missing[0]})' if isinstance(plan, dict) else ''}; run dvc repro -f -s deploy")
    engine = installed_engine()
    if engine != plan["engine"]:
        raise DraftlineError(f"{path}: made for {plan['engine']}, installed is {engine}; run dvc repro -f -s deploy")
    checkpoint = fetch(plan["registered"])
    directory = Path(plan["verifier"]["directory"])
    _require_argv(path, plan["argv"], directory, None if plan.get("speculation") == [] else checkpoint)
    require_pair(checkpoint, compute_identity(directory, DIGEST_CACHE))
    require_free_port(plan)
    return plan


def _require_argv(path: Path, argv: list[str], verifier: Path, checkpoint: Path | None) -> None:
    """What is started must be what is checked; without a checkpoint nothing drafts. Raises DraftlineError."""
    if str(verifier) not in argv:
        raise DraftlineError(f"{path}: argv does not serve {verifier}, the plan's verifier; run dvc repro -f -s deploy")
    try:
        drafter = json.loads(argv[argv.index("--speculative-config") + 1])["model"]
    except (ValueError, IndexError, KeyError, TypeError):
        drafter = None
    if drafter != (None if checkpoint is None else str(checkpoint)):
        raise DraftlineError(f"{path}: argv drafts with {drafter}, to draft with is {checkpoint}; run dvc repro -f -s deploy")


def _introduce(plan: dict[str, Any], url: str) -> None:
    """Ask one question and print what came of it."""
    registered = plan["registered"]
    print(f"{plan['model']} with {registered['name']} version {registered['version']} at {url}/v1 (log: {LOG})")
    started = time.perf_counter()
    answer, tokens = chat(url, plan["model"], QUESTION, min(ANSWER_TOKENS, plan["max_model_len"] // 2))
    seconds = time.perf_counter() - started
    print(f"\n> {QUESTION}\n{answer}\n")
    print(f"{tokens} tokens in {seconds:.1f} s; {acceptance(url)}", flush=True)


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the command in order."""


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def serve(plan: dict[str, Any], once: bool) -> None:
    """Run the plan's server until it is interrupted (or has answered, with `once`)."""
    url = base_url(plan)
    die_with_parent()
    # Held back until there is something to end: an interrupt inside `start` would leave a server that nobody knows.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    for number in ENDING:
        signal.signal(number, _interrupt)
    print(f"starting the server at {url} (log: {LOG})", flush=True)
    process = start(plan["argv"], plan["env"], LOG)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        wait_until_healthy(process, url, plan["startup_seconds"], LOG)
        _introduce(plan, url)
        if not once:
            print("serving; Ctrl-C ends it", flush=True)
            _watch(process)
    except KeyboardInterrupt:
        print("ending the server", file=sys.stderr)
    finally:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        stop(process)


def _watch(process: subprocess.Popen[bytes]) -> None:
    status = process.wait()
    raise ServerError(f"the server ended with status {status}: {cause(LOG)} (log: {LOG})")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.deploy.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="end after the first answer")
    options = parser.parse_args(argv)
    # Until the server is started there is nothing to clean up, and libraries that are being imported swallow a KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        serve(ready_plan(), options.once)
    except DraftlineError as error:
        print(f"draftline serve: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        text = refused_path(error)
        if text is None:
            raise
        print(f"draftline serve: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
