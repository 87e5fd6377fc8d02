"""Our trainer against the `speculators` package's, same model, same hidden states, the same wall clock.

    pytest -m benchmark --timeout=0 -s tests/benchmarks/test_against_reference.py      (about 15 minutes on two cores)
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stages.evaluate.statistics import paired_difference
from tests.benchmarks.reference import train_reference
from tests.benchmarks.variants import decode, need_outputs, table, train_variant

LEAD = 0.2


@pytest.mark.benchmark
def test_ours_leads_the_reference_trainer(tmp_path: Path) -> None:
    """At equal wall clock our drafter commits at least `LEAD` more tokens per verifier pass, macro-averaged."""
    pytest.importorskip("speculators", reason="test-only dependency")
    params = need_outputs()
    start = time.monotonic()
    checkpoint = train_variant(tmp_path / "ours", params)
    seconds = time.monotonic() - start
    reference, steps = train_reference(tmp_path / "reference", params, seconds)
    ours, theirs = decode(checkpoint, params), decode(reference, params)
    difference = paired_difference(ours, theirs)
    print(f"\n{seconds:.0f} s each: {params.train.steps} steps against {steps}")
    print(table(("draftline", "reference"), ours, theirs, difference))
    assert difference.macro.estimate >= LEAD
