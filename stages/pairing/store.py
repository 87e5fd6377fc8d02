"""Where materialised verifiers are kept: `outputs/verifier/models/<first 16 digits of the identity's digest>`.

An entry is a directory, or a symlink to a model that lies elsewhere. Entries of earlier identities stay, so that
changing a verifier back costs nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from stages.artifacts import fsync_path
from stages.errors import ArtifactError, PairError
from stages.pairing.identity import VerifierIdentity, compute_identity, describe_differences, differences
from stages.process import OUTPUTS

MODELS = OUTPUTS / "verifier" / "models"
DIGEST_CACHE = OUTPUTS / "verifier" / "work" / "digests.json"


def store_path(identity: VerifierIdentity) -> Path:
    """Where the verifier of this identity is kept, whether or not it is there."""
    return (MODELS / identity.digest[:16]).absolute()


def verifier_directory(identity: VerifierIdentity) -> Path:
    """Absolute path of the materialised verifier (a symlink where the model lies elsewhere).

    Raises:
        ArtifactError: not materialised on this machine.
    """
    path = store_path(identity)
    if path.is_symlink() and not path.is_dir():
        raise ArtifactError(f"{path}: the model it pointed to ({os.readlink(path)}) is gone; run dvc repro verifier")
    if not path.is_dir():
        raise ArtifactError(f"{path}: the verifier is not materialised on this machine; run dvc repro verifier")
    return path


def revalidate(identity: VerifierIdentity) -> Path:
    """`verifier_directory`, after holding what lies there against `identity` (by file signatures where they are known).

    Raises:
        ArtifactError: not materialised here, or incomplete.
        PairError: the content on disk is another verifier.
    """
    directory = verifier_directory(identity)
    found = differences(identity, compute_identity(directory, DIGEST_CACHE))
    if found:
        raise PairError(f"{directory}: not the verifier it was materialised as (run dvc repro verifier): {describe_differences(found, 'recorded', 'on disk')}")
    return directory


def publish_directory(source: Path, identity: VerifierIdentity) -> Path:
    """Move a finished directory (same file system) to its place in the store."""
    final = store_path(identity)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.is_symlink():
        final.unlink()
    elif final.exists():
        # Renamed away first: a crash leaves no entry, never a mixture.
        old = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
        final.replace(old / "old")
        shutil.rmtree(old)
    source.replace(final)
    fsync_path(final.parent)
    return final


def publish_link(target: Path, identity: VerifierIdentity) -> Path:
    """Point the store's entry to a model that lies elsewhere."""
    final = store_path(identity)
    if final.is_symlink() and os.readlink(final) == str(target):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.is_dir() and not final.is_symlink():
        if target.resolve() == final.resolve() or _intact(final, identity):
            return final  # the same content, already in the store
        shutil.rmtree(final)
    temporary = final.with_name(f".{final.name}.link.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(final)
    fsync_path(final.parent)
    return final


def _intact(directory: Path, identity: VerifierIdentity) -> bool:
    try:
        return compute_identity(directory, DIGEST_CACHE) == identity
    except ArtifactError:
        return False
