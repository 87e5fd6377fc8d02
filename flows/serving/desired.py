"""What is to be served, by what the registry says and by what its files are; and the steps from what is."""

from __future__ import annotations

from dataclasses import dataclass

from flows.errors import FlowError
from flows.registry import CHAMPION, DrafterVersion, Registry, VerifierVersion
from flows.serving.state import Target


@dataclass(frozen=True)
class Desired:
    """The verifier that is to be served, its champion where it has a usable one, and why it has none."""

    verifier: VerifierVersion
    drafter: DrafterVersion | None
    reason: str

    @property
    def target(self) -> Target:
        if self.drafter is None:
            return Target(self.verifier.digest, self.verifier.version)
        return Target(self.verifier.digest, self.verifier.version, self.drafter.content, self.drafter.version)


def desired(known: Registry, name: str) -> Desired | None:
    """What is to be served for a verifier; None: no version has the alias `serving`, so nothing is to change.

    A champion of another verifier, without its gate, or with missing or altered files is none: the verifier alone is slower, never wrong.

    Raises:
        TrackingError: the registry cannot be asked, which says nothing about the champion.
    """
    verifier = known.serving_verifier(name)
    if verifier is None:
        return None
    champion = known.drafter(name, CHAMPION)
    if champion is None:
        return Desired(verifier, None, "there is no champion")
    if champion.verifier != verifier.digest:
        return Desired(verifier, None, f"champion version {champion.version} belongs to verifier {champion.verifier[:12]}")
    try:
        known.verify(champion, verifier.identity)
    except FlowError as error:
        return Desired(verifier, None, str(error))
    return Desired(verifier, champion, "")


def steps(live: Target | None, wanted: Target, renew: bool = False) -> list[Target]:
    """What is served one after the other, from what is live (None: nothing, or an engine that is down) to what is wanted.

    A new verifier is served alone first: users get it as soon as it can answer, and the pair's answers are then held against it.
    """
    if live is not None and live.same(wanted) and not renew:
        return []
    if wanted.content is not None and (live is None or live.digest != wanted.digest):
        return [wanted.alone(), wanted]
    return [wanted]
