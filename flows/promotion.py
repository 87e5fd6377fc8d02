"""Which drafter may be champion: decisions without side effects, and the one place that moves aliases.

A champion is what is served. So a promotion looks at everything again: files, lock, gate, and how the drafter compares with
the champion of the same verifier. Refusing changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from flows.errors import FlowError
from flows.registry import CANDIDATE, CHAMPION, PREVIOUS, DrafterVersion, Registry, VerifierVersion

ALIASES = (CANDIDATE, CHAMPION, PREVIOUS)


@dataclass(frozen=True)
class Verdict:
    """Whether a drafter may become champion, and why (not)."""

    promote: bool
    reason: str


def judge(candidate: DrafterVersion, champion: DrafterVersion | None, serving: VerifierVersion, min_ratio: float) -> Verdict:
    """Decide by what the registry says; the files are looked at separately (`Registry.verify`).

    Args:
        champion: the present one, if any; one of another verifier sets no mark to reach.
        min_ratio: acceptance length that a candidate needs, as a share of the champion's.
    """
    label = f"{candidate.name} version {candidate.version}"
    if candidate.verifier != serving.digest:
        return Verdict(False, f"{label} belongs to verifier {candidate.verifier[:12]}, serving is {serving.digest[:12]}")
    if candidate.gate != "pass":
        return Verdict(False, f"{label}: gate = {candidate.gate!r}")
    if champion is not None and champion.version == candidate.version:
        return Verdict(False, f"{label} is champion already")
    if champion is not None and champion.verifier == serving.digest:
        needed = min_ratio * champion.acceptance_length
        if candidate.acceptance_length < needed:
            return Verdict(
                False,
                f"{label}: acceptance length {candidate.acceptance_length:.3f}, needed are {needed:.3f} "
                f"(promotion.min_ratio = {min_ratio:g} of version {champion.version}'s {champion.acceptance_length:.3f})",
            )
    return Verdict(True, f"{label}: lock and gate hold, acceptance length {candidate.acceptance_length:.3f}")


def best_for(drafters: list[DrafterVersion], digest: str) -> DrafterVersion | None:
    """The drafter to serve with a verifier that is (again) the one: the newest champion there was, else the best that passed the gate."""
    fitting = [drafter for drafter in drafters if drafter.verifier == digest and drafter.gate == "pass"]
    return max(
        fitting, key=lambda drafter: (CHAMPION in drafter.aliases, PREVIOUS in drafter.aliases, drafter.acceptance_length, drafter.version), default=None
    )


def require_alias(alias: str) -> str:
    """An alias of ours. Raises FlowError: MLflow takes `Champion` for another alias than `champion`, and nothing would serve it."""
    if alias not in ALIASES:
        raise FlowError(f"alias {alias!r}: allowed are {', '.join(ALIASES)} (lower case)")
    return alias


def make_champion(registry: Registry, drafter: DrafterVersion, serving: VerifierVersion) -> None:
    """Verify a drafter's files and lock, then move the aliases: the old champion becomes `previous`.

    `previous` moves first: killed in between, both aliases name the old champion, which is what is served.

    Raises:
        FlowError: altered or missing files, or another verifier's drafter; nothing has changed.
    """
    registry.verify(drafter, serving.identity)
    champion = registry.drafter(serving.name, CHAMPION)
    if champion is not None and champion.version != drafter.version:
        registry.set_alias(drafter.name, PREVIOUS, champion.version)
    registry.set_alias(drafter.name, CHAMPION, drafter.version)


def roll_back(registry: Registry, serving: VerifierVersion) -> DrafterVersion:
    """Make `previous` the champion again, and the champion `previous`.

    Raises:
        FlowError: there is no previous one, or it may not be served with this verifier.
    """
    previous = registry.drafter(serving.name, PREVIOUS)
    if previous is None:
        raise FlowError(f"drafter.{serving.name}: no version has the alias {PREVIOUS!r}: nothing to roll back to")
    champion = registry.drafter(serving.name, CHAMPION)
    if champion is not None and champion.version == previous.version:
        raise FlowError(f"{previous.name}: {PREVIOUS!r} and {CHAMPION!r} are both version {previous.version}: nothing to roll back to")
    if previous.verifier != serving.digest:
        raise FlowError(f"{previous.name} version {previous.version} belongs to verifier {previous.verifier[:12]}, serving is {serving.digest[:12]}")
    make_champion(registry, previous, serving)
    return previous
