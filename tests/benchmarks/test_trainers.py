"""Does the Markov head pay, and does our trainer? The demo's drafter against two others on its own data.

cd <where `make demo` ran>; pytest -m benchmark --timeout=0 -s tests/benchmarks/test_trainers.py
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.evaluate.statistics import PromptCount, paired_difference
from stages.params import Params
from tests.benchmarks.reference import Recipe, train_reference
from tests.benchmarks.variants import decode, need_outputs, table, train_variant

pytestmark = pytest.mark.benchmark

NO_HEADS = {"algorithm": "dflash", "markov_rank": 0, "confidence_head": False, "confidence_head_with_markov": False}


@dataclass(frozen=True)
class Ours:
    """The demo's drafter, trained once more: what its held-out prompts took, and the wall clock of its training."""

    params: Params
    counts: list[PromptCount]
    seconds: float


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    params = need_outputs()
    start = time.monotonic()
    checkpoint = train_variant(tmp_path_factory.mktemp("dspark"), params)
    seconds = time.monotonic() - start
    return Ours(params, decode(checkpoint, params), seconds)


def test_dspark_leads_dflash(ours: Ours, tmp_path: Path) -> None:
    """Same data, anchors and steps: the macro-averaged lead's interval excludes 0, and no kind is significantly worse."""
    dflash = decode(train_variant(tmp_path, ours.params, **NO_HEADS), ours.params)
    difference = paired_difference(ours.counts, dflash)
    print("\n" + table(("dspark", "dflash"), ours.counts, dflash, difference))
    assert difference.macro.low > 0
    assert all(interval.high > 0 for interval in difference.per_kind.values())


@pytest.mark.parametrize(
    ("recipe", "lead"),
    [(Recipe("muon", whole_vocabulary=True), 0.2), (Recipe("muon", whole_vocabulary=False), 0.0), (Recipe("adamw", whole_vocabulary=False), 0.0)],
    ids=str,
)
def test_ours_leads_the_reference_trainer(recipe: Recipe, lead: float, ours: Ours, tmp_path: Path) -> None:
    """Same hidden states, equal wall clock: `lead` more tokens per verifier pass than the reference as it comes; where it takes our vocabulary too, more."""
    pytest.importorskip("speculators", reason="test-only dependency")
    checkpoint, steps = train_reference(tmp_path, ours.params, ours.seconds, recipe)
    theirs = decode(checkpoint, ours.params)
    difference = paired_difference(ours.counts, theirs)
    print(f"\n{ours.seconds:.0f} s each: {ours.params.train.steps} steps against {steps} ({recipe})")
    print(table(("draftline", "reference"), ours.counts, theirs, difference))
    assert difference.macro.estimate >= lead
    assert difference.macro.low > 0
