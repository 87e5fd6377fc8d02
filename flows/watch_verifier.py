"""Keep the champion in step with the verifier that is to be served. Told by an event, and by the schedule in any case.

    prefect deployment run 'watch-verifier/default' --watch

(`python -m flows.verifiers add` looks itself as well: a run of this flow first has to start a process.)

Whatever told it, it reads the registry anew and believes no payload. It may be told any number of times: a retrain run is made
once per identity and attempt (Prefect's idempotency key), also across restarts.
"""

from __future__ import annotations

from collections.abc import Callable

from prefect import flow, get_run_logger

from flows.context import registry
from flows.decision import Action, Attempts, decide
from flows.errors import FlowError
from flows.registry import CHAMPION, DrafterVersion, Registry, VerifierVersion
from flows.runs import retrain_attempts, start_promote, start_retrain
from stages.errors import DraftlineError

MAX_ATTEMPTS = 2


def look(known: Registry, name: str, max_attempts: int = MAX_ATTEMPTS, warn: Callable[[str], object] = print) -> Action | None:
    """Decide and act for one verifier; None where none is to be served. `warn` is told of drafters that cannot be promoted.

    Raises:
        DraftlineError: the registry or Prefect cannot be asked.
    """
    serving = known.serving_verifier(name)
    if serving is None:
        return None
    champion = known.drafter(name, CHAMPION)
    drafters = known.drafters(name)
    before = known.verifier_of(name, champion.verifier) if champion is not None else None
    while True:
        attempts = retrain_attempts(serving) if champion is None or champion.verifier != serving.digest else Attempts()
        action = decide(serving, champion, drafters, before.identity if before is not None else None, attempts, max_attempts)
        if action.kind != "promote":
            break
        drafter = next(drafter for drafter in drafters if drafter.version == action.version)
        if (why := _unusable(known, drafter, serving)) is None:
            start_promote(serving, drafter, champion)
            return action
        warn(why)
        drafters.remove(drafter)
    if action.kind == "retrain":
        assert action.attempt is not None
        start_retrain(serving, action.attempt, action.reason)
    return action


def _unusable(known: Registry, drafter: DrafterVersion, serving: VerifierVersion) -> str | None:
    """Why a drafter cannot be promoted, whatever its tags say."""
    try:
        known.verify(drafter, serving.identity)
    except FlowError as error:
        return str(error)
    return None


@flow(name="watch-verifier")
def watch_verifier(verifier: str | None = None, max_attempts: int = MAX_ATTEMPTS) -> dict[str, str]:
    """Look at one verifier, or at all registered ones.

    Args:
        verifier: short name; None: all.
        max_attempts: retrain runs that may fail for one identity before no more are started, and those that may be made anew for a
            drafter that was deleted or damaged.
    Returns:
        What was done for each, and why.
    """
    logger = get_run_logger()
    known = registry()
    done, failed = {}, []
    for name in [verifier] if verifier is not None else list(known.verifiers()):
        try:
            action = look(known, name, max_attempts, logger.warning)
        except DraftlineError as error:
            # One that cannot be decided must not keep the others from being looked at.
            failed.append(f"{name}: {error}")
            logger.error("%s: %s", name, error)
            continue
        done[name] = f"{action.kind}: {action.reason}" if action is not None else "nothing: no version has the alias 'serving'"
        logger.info("%s: %s", name, done[name])
    if failed:
        raise FlowError("; ".join(failed))
    return done
