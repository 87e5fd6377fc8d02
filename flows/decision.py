"""What a change of a verifier asks for: a decision by what the registry says, without side effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flows.promotion import best_for
from flows.registry import DrafterVersion, VerifierVersion
from stages.pairing.identity import VerifierIdentity, describe_differences, differences


@dataclass(frozen=True)
class Attempts:
    """Retrain runs for one identity: those that have failed, those that have completed, and whether one is on its way."""

    failed: int = 0
    completed: int = 0
    running: bool = False


@dataclass(frozen=True)
class Action:
    """`nothing`, `promote` (the drafter `version`) or `retrain` (attempt number `attempt`), and why."""

    kind: Literal["nothing", "promote", "retrain"]
    reason: str
    version: int | None = None
    attempt: int | None = None


def decide(
    serving: VerifierVersion,
    champion: DrafterVersion | None,
    drafters: list[DrafterVersion],
    champions_verifier: VerifierIdentity | None,
    attempts: Attempts,
    max_attempts: int,
) -> Action:
    """What to do for the verifier that is to be served.

    Args:
        drafters: all versions of its drafter.
        champions_verifier: the identity that the champion was made for, where it is known; for the reason's words.
        attempts: retrain runs for the serving identity so far.
    """
    if champion is not None and champion.verifier == serving.digest:
        return Action("nothing", f"champion {champion.name} version {champion.version} belongs to verifier {serving.digest[:12]}, which is serving")
    changed = what_changed(champion, champions_verifier, serving)
    known = best_for(drafters, serving.digest)
    if known is not None:
        return Action("promote", f"{changed}; {known.name} version {known.version} was made for it", version=known.version)
    if attempts.running:
        return Action("nothing", f"{changed}; a retrain run is on its way")
    if attempts.failed >= max_attempts:
        return Action("nothing", f"{changed}; {attempts.failed} retrain runs for it have failed, max_attempts = {max_attempts}")
    if attempts.completed > max_attempts:
        return Action("nothing", f"{changed}; {attempts.completed} retrain runs for it have completed and none of their drafters can be used")
    # Runs that have completed count: their drafters were deleted since, or are damaged.
    return Action("retrain", changed, attempt=attempts.failed + attempts.completed + 1)


def what_changed(champion: DrafterVersion | None, before: VerifierIdentity | None, serving: VerifierVersion) -> str:
    """Field by field, where both identities are known."""
    if champion is None:
        return f"verifier {serving.digest[:12]} has no champion"
    label = f"champion version {champion.version} belongs to verifier {champion.verifier[:12]}, serving is {serving.digest[:12]}"
    if before is None:
        return label
    return f"{label}: {describe_differences(differences(before, serving.identity), 'champion', 'serving')}"
