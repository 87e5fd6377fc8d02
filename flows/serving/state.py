"""What is live, per verifier: the one record that the proxy's configuration is made from and that a killed run is taken up by."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flows.errors import FlowError
from flows.serving.places import Places
from stages.artifacts import read_json, write_json
from stages.errors import ArtifactError


@dataclass(frozen=True)
class Target:
    """A verifier, alone or with a drafter; the digests say what it is, the version numbers what people call it."""

    digest: str
    verifier_version: int
    content: str | None = None
    drafter_version: int | None = None

    def same(self, other: Target) -> bool:
        """The same verifier with the same drafter, whatever their numbers."""
        return (self.digest, self.content) == (other.digest, other.content)

    def alone(self) -> Target:
        return replace(self, content=None, drafter_version=None)

    def __str__(self) -> str:
        drafter = f"with drafter version {self.drafter_version}" if self.content is not None else "alone"
        return f"verifier version {self.verifier_version} ({self.digest[:12]}) {drafter}"


@dataclass(frozen=True)
class Refused:
    """A pair whose answers were not the verifier's: not tried again until something about it changes."""

    digest: str
    content: str
    reason: str

    def means(self, target: Target) -> bool:
        return (self.digest, self.content) == (target.digest, target.content)


@dataclass(frozen=True)
class State:
    """What one verifier's users reach.

    Attributes:
        host, port: where the proxy listens.
        engine: name of the supervisord program; engine_port: its port on 127.0.0.1.
        target: what it serves.
    """

    verifier: str
    host: str
    port: int
    engine: str
    engine_port: int
    target: Target
    refused: Refused | None = None


def _path(places: Places, verifier: str) -> Path:
    return places.states / f"{verifier}.json"


def read_state(places: Places, verifier: str) -> State | None:
    """What is live for a verifier; None: nothing yet. Raises FlowError: the file is not a state."""
    path = _path(places, verifier)
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = read_json(path)
        refused = Refused(**content["refused"]) if content["refused"] else None
        return State(**{**content, "target": Target(**content["target"]), "refused": refused})
    except (ArtifactError, KeyError, TypeError) as error:
        raise FlowError(f"{path}: not a state of serving ({error}); remove it, and the engine is started anew") from None


def write_state(places: Places, state: State) -> None:
    write_json(_path(places, state.verifier), asdict(state))


def all_states(places: Places) -> list[State]:
    """The states of all verifiers, by name."""
    names = sorted(path.stem for path in places.states.glob("*.json") if not path.name.startswith("."))
    return [state for name in names if (state := read_state(places, name)) is not None]


def remove_state(places: Places, verifier: str) -> None:
    _path(places, verifier).unlink(missing_ok=True)
