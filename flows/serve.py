"""Serve what the registry says: per verifier the champion's pair, or the verifier alone. Told by events, and by the schedule in any case.

    prefect deployment run 'serve/default' --watch

Whatever told it, it reads the registry anew. Engines and proxy are supervisord's: they outlive this run, the worker and Prefect.
"""

from __future__ import annotations

from prefect import flow, get_run_logger
from prefect.events import emit_event

from flows.context import BASE_PORT, SERVE_PORT, port, registry, repository
from flows.errors import FlowError
from flows.serving.places import Places
from flows.serving.reconcile import Reconciler
from stages.errors import DraftlineError

FAILED = "draftline.serving.failed"


@flow(name="serve")
def serve(verifier: str | None = None, renew: bool = False) -> dict[str, str]:
    """Look at one verifier, or at all registered ones.

    Args:
        verifier: short name; None: all.
        renew: start engines anew (params.yaml has changed, say), and try a pair again that was refused.
    Returns:
        What is served for each.
    Raises:
        FlowError: something could not be served as it should; what was served before still is.
    """
    logger = get_run_logger()
    known = registry()
    names = list(known.verifiers())
    if verifier is not None and verifier not in names:
        raise FlowError(f"verifier.{verifier} is not registered; known: {', '.join(sorted(names)) or 'none'}")
    reconciler = Reconciler(known, Places(repository()), port(SERVE_PORT, BASE_PORT), say=logger.info)
    done, failed = {}, []
    for name in [verifier] if verifier is not None else names:
        try:
            done[name] = reconciler.reconcile(name, renew)
        except DraftlineError as error:
            # One that cannot be served must not keep the others from it.
            failed.append(f"{name}: {error}")
            logger.error("%s: %s", name, error)
            emit_event(FAILED, resource={"prefect.resource.id": f"draftline.verifier.{name}"}, payload={"reason": str(error)})
            continue
        logger.info("%s: %s", name, done[name])
    if failed:
        raise FlowError("; ".join(failed))
    return done
