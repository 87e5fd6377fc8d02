"""Does the Markov head pay? DSpark against DFlash: same data, anchors, steps and held-out prompts.

    pytest -m benchmark --timeout=0 -s tests/benchmarks/test_dspark_against_dflash.py      (about 15 minutes on two cores)
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.evaluate.statistics import paired_difference
from tests.benchmarks.variants import decode, need_outputs, table, train_variant

NO_HEADS = {"algorithm": "dflash", "markov_rank": 0, "confidence_head": False, "confidence_head_with_markov": False}


@pytest.mark.benchmark
def test_dspark_leads_dflash(tmp_path: Path) -> None:
    """The macro-averaged lead is above 0 with an interval that excludes 0, and no kind is significantly worse."""
    params = need_outputs()
    dspark = decode(train_variant(tmp_path / "dspark", params), params)
    dflash = decode(train_variant(tmp_path / "dflash", params, **NO_HEADS), params)
    difference = paired_difference(dspark, dflash)
    print("\n" + table(("dspark", "dflash"), dspark, dflash, difference))
    assert difference.macro.low > 0
    assert all(interval.high > 0 for interval in difference.per_kind.values())
