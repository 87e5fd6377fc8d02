"""What every verifier is at: which version is to be served, which drafters there are for it, what is stale and why.

python -m flows.status
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import httpx

from flows.context import registry, repository
from flows.decision import what_changed
from flows.promotion import ALIASES
from flows.registry import CHAMPION, DrafterVersion, Registry
from flows.runs import last_run
from flows.serving.places import Places
from flows.serving.state import read_state
from stages.errors import DraftlineError


def lines(known: Registry, name: str) -> Iterator[str]:
    """The state of one verifier, a line each."""
    serving = known.serving_verifier(name)
    yield f"{name}"
    if serving is None:
        yield "  verifier   no version has the alias 'serving'"
    else:
        yield f"  verifier   version {serving.version}, {serving.digest[:12]}, {serving.source} ({serving.quantization})"
    found = {alias: known.drafter(name, alias) for alias in ALIASES}
    champion = found[CHAMPION]
    if serving is not None:
        fits = champion is not None and champion.verifier == serving.digest
        yield f"  to serve   {f'the pair of {_label(champion)} and this verifier' if fits else 'the verifier alone'}"
    live = read_state(Places(repository()), name)
    yield f"  served     {f'{live.target}, on {live.host}:{live.port} by {live.engine}' if live is not None else '-'}"
    for alias, drafter in found.items():
        yield f"  {alias:<10} {_label(drafter)}"
    yield f"  last run   {_last_run(name)}"
    if live is not None and live.refused is not None:
        yield f"  refused    {live.refused.reason}"
    if serving is not None and (champion is None or champion.verifier != serving.digest):
        before = known.verifier_of(name, champion.verifier) if champion is not None else None
        yield f"  stale      {what_changed(champion, before.identity if before is not None else None, serving)}"


def _label(drafter: DrafterVersion | None) -> str:
    if drafter is None:
        return "-"
    return f"version {drafter.version}, for {drafter.verifier[:12]}, gate {drafter.gate}, acceptance length {drafter.acceptance_length:.2f}"


def _last_run(name: str) -> str:
    try:
        run = last_run(name)
    except (httpx.HTTPError, OSError, RuntimeError) as error:
        return f"unknown: Prefect does not answer ({' '.join(str(error).split())})"
    if run is None:
        return "none was made by watch-verifier"
    when = run.start_time or run.expected_start_time
    return f"{run.name}: {run.state_name}" + (f", {when:%Y-%m-%d %H:%M} UTC" if when is not None else "")


def main() -> int:
    try:
        known = registry()
        names = list(known.verifiers())
        for name in names:
            print("\n".join(lines(known, name)))
        if not names:
            print("no verifier is registered (python -m flows.verifiers add)")
    except DraftlineError as error:
        print(f"draftline status: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
