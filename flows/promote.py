"""Make a candidate the champion, if it has earned it; or take the last promotion back.

prefect deployment run 'promote/default' --param verifier=smollm2-135m --watch
prefect deployment run 'promote/default' --param verifier=smollm2-135m --param rollback=true --watch
"""

from __future__ import annotations

from prefect import flow, get_run_logger
from prefect.events import emit_event
from prefect.flow_runs import pause_flow_run

from flows.context import registry, repository
from flows.errors import FlowError
from flows.promotion import judge, make_champion, require_alias, roll_back
from flows.registry import CANDIDATE, CHAMPION, DrafterVersion, Registry
from stages.params import PARAMS_FILE, read_params

PROMOTED = "draftline.drafter.promoted"
APPROVAL_SECONDS = 7 * 24 * 3600


def wanted(known: Registry, verifier: str, alias: str, version: int | None) -> DrafterVersion:
    """The version that is to be promoted. Raises FlowError: there is none."""
    if version is None:
        found = known.drafter(verifier, alias)
        if found is None:
            raise FlowError(f"drafter.{verifier}: no version has the alias {alias!r}")
        return found
    for drafter in known.drafters(verifier):
        if drafter.version == version:
            return drafter
    raise FlowError(f"drafter.{verifier}: there is no version {version}, or its registration is not finished")


@flow(name="promote")
def promote(verifier: str, alias: str = CANDIDATE, version: int | None = None, rollback: bool = False) -> int:
    """Move the alias `champion`.

    Args:
        verifier: short name.
        alias: which version is to become champion.
        version: the same by its number, in the place of `alias`.
        rollback: `previous` instead, without comparing acceptance.
    Returns:
        The champion's version number.
    Raises:
        FlowError: it may not be promoted; nothing has changed.
    """
    logger = get_run_logger()
    require_alias(alias)
    known = registry()
    serving = known.serving_verifier(verifier)
    if serving is None:
        raise FlowError(f"verifier.{verifier}: no version has the alias 'serving': register one (python -m flows.verifiers)")
    if rollback:
        back = roll_back(known, serving)
        emit_event(PROMOTED, resource={"prefect.resource.id": f"draftline.verifier.{verifier}"}, payload={"version": back.version})
        return back.version
    policy = read_params(repository() / PARAMS_FILE).promotion
    candidate = wanted(known, verifier, alias, version)
    verdict = judge(candidate, known.drafter(verifier, CHAMPION), serving, policy.min_ratio)
    if not verdict.promote:
        raise FlowError(verdict.reason)
    logger.info(verdict.reason)
    if policy.approval == "manual":
        logger.info("waiting for a person: resume this run in Prefect to promote, cancel it to refuse")
        pause_flow_run(timeout=APPROVAL_SECONDS)
        # Whatever happened while it waited counts.
        verdict = judge(candidate, known.drafter(verifier, CHAMPION), serving, policy.min_ratio)
        if not verdict.promote or known.serving_verifier(verifier) != serving:
            raise FlowError(f"{verdict.reason} (it changed while the approval was waited for)")
    make_champion(known, candidate, serving)
    emit_event(PROMOTED, resource={"prefect.resource.id": f"draftline.verifier.{verifier}"}, payload={"version": candidate.version})
    return candidate.version
