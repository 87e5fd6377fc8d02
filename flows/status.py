"""What every verifier is at: which version is to be served, which drafters there are for it, what is stale and why.

python -m flows.status
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from flows.context import registry, repository
from flows.decision import what_changed
from flows.errors import FlowError
from flows.promotion import ALIASES
from flows.registry import CHAMPION, DrafterVersion, Registry
from flows.runs import last_run, unready
from flows.serving.pays import served_params, speculation
from flows.serving.places import Places
from flows.serving.state import read_state
from stages.errors import DraftlineError


def lines(known: Registry, name: str, asked: bool) -> Iterator[str]:
    """The state of one verifier, a line each; `asked`: whether Prefect can be."""
    places = Places(repository())
    serving = known.serving_verifier(name)
    yield f"{name}"
    if serving is None:
        yield "  verifier   no version has the alias 'serving'"
    else:
        yield f"  verifier   version {serving.version}, {serving.digest[:12]}, {serving.source} ({serving.quantization})"
    found = {alias: known.drafter(name, alias) for alias in ALIASES}
    champion = found[CHAMPION]
    if serving is not None:
        yield f"  to serve   {_to_serve(places, name, champion if champion is not None and champion.verifier == serving.digest else None)}"
    live = read_state(places, name)
    yield f"  served     {f'{live.target}, on {live.host}:{live.port} by {live.engine}' if live is not None else '-'}"
    for alias, drafter in found.items():
        yield f"  {alias:<10} {_label(drafter)}"
    yield f"  last run   {_last_run(name) if asked else 'unknown'}"
    if live is not None and live.refused is not None:
        yield f"  refused    {live.refused.reason}"
    if serving is not None and (champion is None or champion.verifier != serving.digest):
        before = known.verifier_of(name, champion.verifier) if champion is not None else None
        yield f"  stale      {what_changed(champion, before.identity if before is not None else None, serving)}"


def _to_serve(places: Places, name: str, champion: DrafterVersion | None) -> str:
    """What `serve` brings about, and why it leaves a champion out."""
    if champion is None:
        return "the verifier alone"
    pays = speculation(served_params(places, name), champion)
    return f"the verifier alone: {pays.note}" if pays.alone else f"the pair of {_label(champion)} and this verifier"


def _label(drafter: DrafterVersion | None) -> str:
    if drafter is None:
        return "-"
    return f"version {drafter.version}, for {drafter.verifier[:12]}, gate {drafter.gate}, acceptance length {drafter.acceptance_length:.2f}"


def _last_run(name: str) -> str:
    run = last_run(name)
    if run is None:
        return "none was made by watch-verifier"
    when = run.start_time or run.expected_start_time
    return f"{run.name}: {run.state_name}" + (f", {when:%Y-%m-%d %H:%M} UTC" if when is not None else "")


def _prefect() -> tuple[bool, str | None]:
    """Whether Prefect answers, and why flows do not run, if so."""
    try:
        found = unready()
        return True, str(found) if found is not None else None
    except FlowError as error:
        return False, str(error)


def main() -> int:
    try:
        known = registry()
        names = list(known.verifiers())
        answers, why = _prefect()
        for name in names:
            print("\n".join(lines(known, name, answers)))
        if not names:
            print("no verifier is registered (python -m flows.verifiers add)")
        if why is not None:
            print(f"flows do not run: {why}")
    except DraftlineError as error:
        print(f"draftline status: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
