"""What is evaluated: drafters from checkpoints, and prompt lookup with and without its guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.artifacts import digest_json, read_json, read_manifest
from stages.decoding.blocks import BlockProposer
from stages.decoding.draft_model import load_draft_model
from stages.decoding.eagle3 import Eagle3Proposer
from stages.decoding.ngram import LoopGuard, NgramProposer
from stages.decoding.proposer import Proposer
from stages.decoding.speculative import spec_config
from stages.drafters.calibration import CALIBRATION_FILE, read_calibration
from stages.drafters.checkpoint import load_drafter
from stages.drafters.eagle3 import Eagle3
from stages.drafters.model import Drafter as BlockDrafter
from stages.errors import DraftlineError
from stages.pairing.frozen import load_frozen
from stages.pairing.identity import VerifierIdentity
from stages.pairing.lock import require_pair
from stages.pairing.shapes import algorithm_of

GUARDED, UNGUARDED = "guarded prompt lookup", "prompt lookup"


@dataclass(frozen=True)
class Drafter:
    """A checkpoint.

    Attributes:
        algorithm: its kind. content: digest of its files. engine: vLLM's speculative config for it. trained: the most tokens it drafts per round there.
    """

    name: str
    checkpoint: Path
    algorithm: str
    content: str
    engine: dict[str, Any]

    @property
    def trained(self) -> int:
        tokens: int = self.engine["num_speculative_tokens"]
        return tokens

    def speculative(self, draft_tokens: int) -> dict[str, Any]:
        """vLLM's speculative config with K = `draft_tokens`."""
        return {**self.engine, "num_speculative_tokens": draft_tokens}

    def calibration(self) -> dict[str, Any]:
        """Way of decoding → how right its confidence head was on held-out blocks, before and after; empty without a calibrated head."""
        if not (self.checkpoint / CALIBRATION_FILE).is_file():
            return {}
        modes = read_calibration(self.checkpoint).model_dump(mode="json")["modes"]
        return {mode: {key: found[key] for key in ("fitted_on", "held_out")} for mode, found in modes.items()}


def read_drafter(name: str, checkpoint: Path, identity: VerifierIdentity) -> Drafter:
    """The drafter in `checkpoint`.

    Raises:
        ArtifactError: an altered or missing file. PairError: it belongs to another verifier.
    """
    if name in (GUARDED, UNGUARDED):
        raise DraftlineError(f"drafter {name!r}: this name is taken")
    manifest = read_manifest(checkpoint, identity.digest)
    require_pair(checkpoint, identity)
    config = read_json(checkpoint / "config.json")
    return Drafter(name, checkpoint, algorithm_of(config), digest_json(manifest["files"]), spec_config(checkpoint, config))


def choose_draft_tokens(trained: int, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Which K are measured, the trained one the last, and which are left out because they are above it."""
    return sorted({trained, *(k for k in wanted if k <= trained)}), sorted({k for k in wanted if k > trained})


def load_proposer(drafter: Drafter, verifier: Path, dtype: torch.dtype) -> Proposer:
    """The drafter for our own loop."""
    return PROPOSERS[drafter.algorithm](drafter, verifier, dtype)


def _block(drafter: Drafter, verifier: Path, dtype: torch.dtype) -> Proposer:
    model = load_drafter(drafter.checkpoint, load_frozen(verifier, dtype), dtype)
    assert isinstance(model, BlockDrafter)
    return BlockProposer(model)


def _eagle3(drafter: Drafter, verifier: Path, dtype: torch.dtype) -> Proposer:
    model = load_drafter(drafter.checkpoint, load_frozen(verifier, dtype), dtype)
    assert isinstance(model, Eagle3)
    return Eagle3Proposer(model)


def _ngram(drafter: Drafter, verifier: Path, dtype: torch.dtype) -> Proposer:
    return NgramProposer(drafter.trained, drafter.engine["prompt_lookup_min"], drafter.engine["prompt_lookup_max"])


PROPOSERS: dict[str, Callable[[Drafter, Path, torch.dtype], Proposer]] = {
    "dspark": _block,
    "dflash": _block,
    "eagle3": _eagle3,
    "draft_model": lambda drafter, verifier, dtype: load_draft_model(verifier, drafter.checkpoint, dtype, drafter.trained),
    "ngram": _ngram,
}
"""By the kind of the checkpoint."""


def lookup_proposer(name: str, draft_tokens: int, shortest: int, longest: int) -> Proposer:
    """Prompt lookup, `GUARDED` or `UNGUARDED`."""
    return NgramProposer(draft_tokens, shortest, longest, LoopGuard() if name == GUARDED else None)
