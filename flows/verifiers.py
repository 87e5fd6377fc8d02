"""Register a verifier, and say which version is to be served.

    python -m flows.verifiers add smollm2-135m                              what params.yaml names
    python -m flows.verifiers add smollm2-135m --quantization w8a8          the same with another quantization
    python -m flows.verifiers add smollm2-135m --source hf:org/name@rev --no-serve
    python -m flows.verifiers list

`add` brings the model here, takes its identity, registers a version of `verifier.<name>` for it unless there is one, moves the alias
`serving` to it, emits the event that `watch-verifier` waits for, and does at once what that will find to do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.context import registry, repository, tracking_uri
from flows.parameters import Overrides, write_run_params
from flows.registry import SERVING, VerifierVersion
from flows.stage_run import run_stage
from flows.workspace import claimed, ensure
from stages.errors import DraftlineError
from stages.pairing.identity import IDENTITY_FILE, read_identity
from stages.params import PARAMS_FILE, read_params

if TYPE_CHECKING:
    from flows.runs import Unready

REGISTERED = "draftline.verifier.registered"
SUFFIX = ".identity"
"""The identity is taken in a workspace of its own: a retrain run may hold the verifier's for hours."""


def add(name: str, source: str | None, quantization: str | None, serve: bool) -> tuple[VerifierVersion, bool]:
    """Register the verifier `name` (see the module); the version, and whether it is new.

    Raises:
        DraftlineError: it cannot be brought here, or the registry cannot be reached; no alias has moved.
    """
    root = repository()
    base = read_params(root / PARAMS_FILE)
    known = registry()
    with claimed(root, name + SUFFIX, "wait", 600.0):
        folder = ensure(root, name + SUFFIX)
        wanted = {"name": name, "source": _absolute(root, source or base.verifier.source), "quantization": quantization or base.verifier.quantization}
        overrides = Overrides.model_validate({"verifier": wanted, "mlflow": {"tracking_uri": tracking_uri(base)}})
        params = write_run_params(root / PARAMS_FILE, folder / PARAMS_FILE, overrides)
        run_stage(folder, "verifier", lambda line: print(line, file=sys.stderr))
        identity = read_identity(folder / IDENTITY_FILE)
    version, new = known.register_verifier(name, identity, params.verifier.source, params.verifier.quantization)
    if serve:
        known.set_alias(f"verifier.{name}", SERVING, version.version)
    return version, new


def _absolute(root: Path, source: str) -> str:
    """A directory's path as every workspace can use it."""
    return source if ":" in source else str((root / source).absolute())


def announce(name: str, payload: dict[str, Any]) -> Unready | None:
    """Tell Prefect that there is something new about a verifier; why nothing will come of it for now, if so.

    Raises:
        FlowError: Prefect does not answer. (The schedule will notice, once it does.)
    """
    from prefect.events import emit_event

    from flows.runs import unready

    why = unready()
    emit_event(REGISTERED, resource={"prefect.resource.id": f"draftline.verifier.{name}"}, payload=payload)
    return why


def _told(version: VerifierVersion) -> str | None:
    """Tell Prefect, and start what follows; why nothing will come of it for now, if so."""
    try:
        why = announce(version.name, {"version": version.version})
        from flows.runs import PROMOTE, RETRAIN, unready
        from flows.watch_verifier import look

        asked = unready((RETRAIN, PROMOTE))
        if asked is None or not asked.lost:
            # The event's own run would find the same, once its process has started: what is asked for twice is made once.
            look(registry(), version.name)
        return str(why) if why is not None else None
    except DraftlineError as error:
        return str(error)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.verifiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="register a verifier")
    adding.add_argument("name")
    adding.add_argument("--source", help="as verifier.source of params.yaml")
    adding.add_argument("--quantization", help="as verifier.quantization of params.yaml")
    adding.add_argument("--no-serve", dest="serve", action="store_false", help="leave the alias `serving` where it is")
    commands.add_parser("list", help="what is registered")
    options = parser.parse_args(argv)
    try:
        if options.command == "list":
            known = registry()
            for name in known.verifiers():
                serving = known.serving_verifier(name)
                print(
                    f"{name}: "
                    + (f"version {serving.version}, {serving.digest[:12]}, {serving.source} ({serving.quantization})" if serving else "none is serving")
                )
            return 0
        version, new = add(options.name, options.source, options.quantization, options.serve)
        print(f"verifier.{version.name} version {version.version}{'' if new else ' (known already)'}: {version.digest[:12]}")
        if options.serve and (why := _told(version)) is not None:
            print(f"draftline verifiers: registered, but flows do not run: {why}", file=sys.stderr)
    except DraftlineError as error:
        print(f"draftline verifiers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
