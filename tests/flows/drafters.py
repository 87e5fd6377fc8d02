"""Drafters in a registry, without training one."""

from __future__ import annotations

from pathlib import Path

from stages.artifacts import read_json, write_json, write_manifest
from stages.pairing.identity import compute_identity
from stages.register.registry import Candidate, register
from tests.gate.pair import write_drafter


def add_drafter(uri: str, verifier: Path, checkpoint: Path, number: int, name: str = "tiny") -> int:
    """Register a drafter of a verifier; another `number`, another content."""
    identity = compute_identity(verifier)
    write_drafter(checkpoint, verifier, identity)
    write_json(checkpoint / "number.json", {"number": number})
    files = write_manifest(checkpoint, identity.digest)["files"]
    lock = read_json(checkpoint / "verifier_lock.json")
    candidate = Candidate(checkpoint, files, identity.digest, lock, "pass", {"macro": 1.5, "per_kind": {}, "per_position": {}}, "0" * 64)
    return int(register(uri, "draftline", f"drafter.{name}", candidate).version)
