"""Measurements on disk as they are made: a comparison that was interrupted goes on where it stopped.

One file per measurement, named by the digest of everything it depends on. The pipeline's stage keeps none (`directory` None): DVC
knows when it has to run, and then it measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.artifacts import digest_json, read_json, write_json
from stages.decoding.engine import Completion, Round


@dataclass(frozen=True)
class Store:
    """Measurements in `directory`; `about`: what all of them depend on."""

    directory: Path | None
    about: dict[str, Any]

    def get(self, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        """The JSON value stored under `key`, else what `make` returns, stored."""
        if self.directory is None:
            return make()
        path = self.directory / f"{digest_json({**self.about, **key})[:32]}.json"
        if path.is_file():
            return read_json(path)["value"]
        value = make()
        write_json(path, {"key": key, "value": value})
        return value


def completions_to_json(completions: list[Completion]) -> list[dict[str, Any]]:
    return [asdict(completion) for completion in completions]


def completions_from_json(values: list[dict[str, Any]]) -> list[Completion]:
    return [Completion(**{**value, "rounds": [Round(**entry) for entry in value["rounds"]]}) for value in values]
