"""Where serving keeps its things: below `.run/` of the repository, never in a workspace, whose outputs a failing stage has already deleted.

.run/engines/<engine>.conf, .json    a supervisord program, and its plan
.run/models/<digest>/                verifiers        .run/served/<verifier>/<content>/   drafters, from the registry
.run/serving/<verifier>.json         what is live     .run/haproxy.cfg                    made from all of those
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    """The paths below one repository."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / ".run"

    @property
    def engines(self) -> Path:
        return self.run / "engines"

    @property
    def models(self) -> Path:
        return self.run / "models"

    @property
    def digests(self) -> Path:
        """Digests of the verifiers' large files, by their signatures."""
        return self.run / "models" / ".digests.json"

    @property
    def served(self) -> Path:
        return self.run / "served"

    @property
    def states(self) -> Path:
        return self.run / "serving"

    @property
    def logs(self) -> Path:
        return self.run / "logs"

    @property
    def proxy_config(self) -> Path:
        return self.run / "haproxy.cfg"

    @property
    def proxy_socket(self) -> Path:
        return self.run / "haproxy.sock"

    @property
    def supervisor_socket(self) -> Path:
        return self.run / "supervisor.sock"
