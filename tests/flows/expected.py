"""What the registry should say, and what follows from it: a second account, simpler than the flows' own, that a walk holds them against."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Drafter:
    """What was registered, and what has become of it."""

    verifier: str
    content: str
    gated: bool
    acceptance: float
    fit: bool
    """Whether its engine starts, and answers as the verifier alone does."""
    whole: bool = True


@dataclass
class Wanted:
    """Who is to answer (`<verifier>/<drafter, or alone>`), and whether nothing stands in the way."""

    who: str
    sure: bool


@dataclass
class Expected:
    """Verifiers by their digests, drafters by their versions, and where the aliases point."""

    digests: list[str]
    min_ratio: float
    drafters: dict[int, Drafter] = field(default_factory=dict)
    serving: int | None = None
    champion: int | None = None
    previous: int | None = None
    servable: dict[str, str] = field(default_factory=dict)
    """Of each content that was ever registered: the verifier that it may be served with, "" for none."""

    def add(self, version: int, drafter: Drafter) -> None:
        self.drafters[version] = drafter
        self.servable[drafter.content[:16]] = drafter.verifier[:16] if drafter.gated and drafter.fit else ""

    def delete(self, version: int) -> None:
        """A version takes its aliases with it."""
        del self.drafters[version]
        self.champion = None if self.champion == version else self.champion
        self.previous = None if self.previous == version else self.previous

    def promoted(self, version: int) -> None:
        if self.champion not in (None, version):
            self.previous = self.champion
        self.champion = version

    def usable(self, version: int | None) -> bool:
        """Locked to the verifier that is to be served, gated, and whole."""
        if version is None or self.serving is None:
            return False
        drafter = self.drafters[version]
        return drafter.verifier == self.digests[self.serving] and drafter.gated and drafter.whole

    def may_be_champion(self, version: int) -> bool:
        if not self.usable(version) or version == self.champion:
            return False
        champion = self.drafters[self.champion] if self.champion is not None else None
        marks = champion is not None and champion.verifier == self.drafters[version].verifier
        return not marks or champion is None or self.drafters[version].acceptance >= self.min_ratio * champion.acceptance

    def may_roll_back(self) -> bool:
        return self.previous != self.champion and self.usable(self.previous)

    def found_by_watch(self) -> int | None:
        """The version that `watch-verifier` has promoted; None: it has nothing to do, or nothing to do it with."""
        if self.serving is None or (self.champion is not None and self.drafters[self.champion].verifier == self.digests[self.serving]):
            return None
        usable = [version for version in self.drafters if self.usable(version)]
        return max(usable, key=lambda version: (version == self.previous, self.drafters[version].acceptance, version), default=None)

    def wanted(self) -> Wanted | None:
        """None: whoever answers now."""
        if self.serving is None:
            return None
        verifier = self.digests[self.serving][:16]
        if self.champion is None or not self.usable(self.champion):
            return Wanted(f"{verifier}/alone", True)
        champion = self.drafters[self.champion]
        return Wanted(f"{verifier}/{champion.content[:16]}", champion.fit)

    def allows(self, who: str) -> bool:
        """Whether it may be served at all: a verifier alone, or a pair that was locked and gated."""
        verifier, drafter = who.split("/")
        known = any(digest.startswith(verifier) for digest in self.digests)
        return known and (drafter == "alone" or self.servable.get(drafter) == verifier)
