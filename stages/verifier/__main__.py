"""Materialise the verifier and write its content identity.    python -m stages.verifier

Runs at every `dvc repro`: everything downstream hangs on this answer. Where nothing changed it takes a fraction of a
second, because what a source was materialised as is remembered and held against the disk by file signatures. Heavy
libraries are imported only where something has to be made.

`outputs/verifier/models/` holds the models (see `stages/pairing/store.py`), `outputs/verifier/work/` what is remembered
and what is half made; both survive from run to run.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from stages.artifacts import digest_json, write_json
from stages.errors import ArtifactError
from stages.pairing.identity import VerifierIdentity, compute_identity
from stages.pairing.store import DIGEST_CACHE, MODELS, publish_directory, publish_link
from stages.pairing.weights import json_object
from stages.params import Params
from stages.process import stage_main
from stages.verifier.gguf import FORMAT as GGUF_FORMAT
from stages.verifier.sources import check_loadable, materialise, pinned
from stages.verifier.w8a8 import FORMAT as W8A8_FORMAT
from stages.verifier.w8a8 import quantise_directory


class Memory:
    """What was made before: recipe → the store's entry. Only saves time; a lost or damaged file costs one more making."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            self.made: dict[str, str] = dict(stored["made"])
            self.loadable: list[str] = list(stored["loadable"])
        except (OSError, ValueError, KeyError, TypeError):
            self.made, self.loadable = {}, []

    def save(self) -> None:
        write_json(self.path, {"made": self.made, "loadable": self.loadable})

    def recall(self, recipe: str) -> VerifierIdentity | None:
        """The identity of what `recipe` made, if it is still there and still that."""
        entry = self.made.get(recipe)
        if entry is None:
            return None
        try:
            identity = compute_identity(MODELS / entry, DIGEST_CACHE)
        except ArtifactError:
            return None
        return identity if identity.digest.startswith(entry) else None


def run(params: Params, output: Path) -> None:
    settings, work = params.verifier, output / "work"
    memory = Memory(work / "made.json")
    identity = _base(settings.source, params.mlflow.tracking_uri, memory, work)
    accepted = f"{identity.digest}:{settings.trust_remote_code}"
    if accepted not in memory.loadable:
        check_loadable(settings.source, json_object(MODELS / identity.digest[:16] / "config.json"), settings.trust_remote_code)
        memory.loadable.append(accepted)
    if settings.quantization == "w8a8":
        identity = _quantised(identity, memory, work)
    memory.save()
    # Of a run that was killed: this one holds the stage's lock, so nobody else writes there.
    for leftover in [*(entry for entry in work.iterdir() if entry.is_dir()), *MODELS.glob(".*.tmp")]:
        shutil.rmtree(leftover, ignore_errors=True)
    write_json(output / "identity.json", identity.model_dump(mode="json"))
    print(f"verifier {settings.name}: {identity.digest[:16]} ({identity.quantization['method']}, {identity.num_layers} layers)", file=sys.stderr)


def _base(source: str, tracking_uri: str, memory: Memory, work: Path) -> VerifierIdentity:
    """The model as its source has it, in the store."""
    fixed = pinned(source, tracking_uri)
    recipe = None if fixed is None else digest_json({"source": fixed, "gguf": GGUF_FORMAT})
    if recipe is not None and (known := memory.recall(recipe)):
        return known
    return _make(recipe, memory, work, lambda directory: materialise(fixed or source, directory, tracking_uri))


def _quantised(base: VerifierIdentity, memory: Memory, work: Path) -> VerifierIdentity:
    """The W8A8 copy of a model of the store, in the store."""
    recipe = digest_json({"base": base.digest, "w8a8": W8A8_FORMAT})
    if known := memory.recall(recipe):
        return known
    return _make(recipe, memory, work, lambda directory: quantise_directory(MODELS / base.digest[:16], directory, base))


def _make(recipe: str | None, memory: Memory, work: Path, make: Callable[[Path], Path]) -> VerifierIdentity:
    """Make a model in `work`, compute its identity, move it to its place in the store (or link to where it lies)."""
    directory = work / (recipe or "unpinned")[:16] / "model"
    made = make(directory)
    identity = compute_identity(made, DIGEST_CACHE)
    if made == directory:
        publish_directory(made, identity)
    else:
        publish_link(made, identity)
    if recipe is not None:
        memory.made[recipe] = identity.digest[:16]
    return identity


if __name__ == "__main__":
    raise SystemExit(stage_main("verifier", run))
