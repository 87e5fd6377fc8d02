"""An engine's process: look at everything that it is about to serve, then become vLLM.

    python -m flows.serving.engine .run/engines/<engine>.json

supervisord runs this at every start of an engine, also after a crash or a reboot: whatever has happened to the files since the
plan was made, a drafter that does not belong to the verifier beside it is not served.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from flows.errors import FlowError
from stages.artifacts import digest_json, read_json, read_manifest
from stages.errors import DraftlineError
from stages.pairing.identity import compute_identity
from stages.pairing.lock import require_pair

REFUSED = 2
"""Exit status of an engine that may not be served: supervisord does not try again."""


def require_servable(plan: dict[str, Any]) -> None:
    """Hold the files, and the command that loads them, against the plan.

    Raises:
        DraftlineError: altered or missing files, another verifier, another drafter, or a command that loads others than were looked at.
    """
    directory = Path(plan["verifier"]["directory"])
    identity = compute_identity(directory, Path(plan["digests"]))
    if identity.digest != plan["verifier"]["digest"]:
        raise FlowError(f"{directory}: verifier {identity.digest[:12]}, planned is {plan['verifier']['digest'][:12]}")
    argv: list[str] = plan["argv"]
    if str(directory) not in argv:
        raise FlowError(f"{plan['name']}: its command does not serve {directory}")
    loaded = json.loads(argv[argv.index("--speculative-config") + 1])["model"] if "--speculative-config" in argv else None
    drafter = plan["drafter"]
    if loaded != (drafter["directory"] if drafter is not None else None):
        raise FlowError(f"{plan['name']}: its command drafts with {loaded}, planned is {drafter['directory'] if drafter is not None else 'no drafter'}")
    if drafter is not None:
        content = digest_json(read_manifest(Path(drafter["directory"]))["files"])
        if content != drafter["content"]:
            raise FlowError(f"{drafter['directory']}: content {content[:12]}, planned is {drafter['content'][:12]}")
        require_pair(Path(drafter["directory"]), identity)


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m flows.serving.engine <plan.json>", file=sys.stderr)
        return REFUSED
    try:
        plan: dict[str, Any] = read_json(Path(argv[0]))
        require_servable(plan)
    except DraftlineError as error:
        print(f"draftline engine: {error}", file=sys.stderr)
        return REFUSED
    environment = {**os.environ, **plan["env"]}
    # "python" and "vllm" of a command are those of this environment, activated or not.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    os.execvpe(plan["argv"][0], plan["argv"], environment)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
