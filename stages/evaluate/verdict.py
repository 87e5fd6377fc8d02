"""Is the drafter worth serving? Two gains in tokens per second decide, with limits from params.yaml.

drop   it gains less than `drop_gain` over guarded prompt lookup: what needs no training does nearly as well
ship   it gains at least `ship_gain` over the verifier alone
tune   neither: better than prompt lookup, not yet fast enough
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Verdict = Literal["ship", "tune", "drop"]


def gain(spread: Mapping[str, float]) -> dict[str, float]:
    """Ratios of rates (`median`, `min`, `max`) as gains: 0.4 is 40 % more tokens per second."""
    return {name: spread[name] - 1.0 for name in ("median", "min", "max")}


def in_percent(value: Mapping[str, float]) -> str:
    return f"{100 * value['median']:+.0f} % ({100 * value['min']:+.0f} to {100 * value['max']:+.0f} %)"


def judge(over_alone: Mapping[str, float], over_lookup: Mapping[str, float], ship_gain: float, drop_gain: float) -> dict[str, Any]:
    """The verdict and what led to it.

    Args:
        over_alone, over_lookup: ratios of tokens per second over the paired runs, {"median", "min", "max"}; the median decides.
    Returns:
        {"verdict", "reason", "gain_over_alone", "gain_over_lookup", "ship_gain", "drop_gain"}, gains as `gain` gives them.
    """
    alone, lookup = gain(over_alone), gain(over_lookup)
    fast = over_alone["median"] >= 1.0 + ship_gain
    verdict: Verdict = "drop" if over_lookup["median"] < 1.0 + drop_gain else "ship" if fast else "tune"
    against_lookup = f"{in_percent(lookup)} over guarded prompt lookup, {'below' if verdict == 'drop' else 'at least'} {100 * drop_gain:.0f} %"
    against_alone = f"{in_percent(alone)} over the verifier alone, {'at least' if fast else 'below'} {100 * ship_gain:.0f} %"
    return {
        "verdict": verdict,
        "reason": f"{against_lookup}; {against_alone}",
        "gain_over_alone": alone,
        "gain_over_lookup": lookup,
        "ship_gain": ship_gain,
        "drop_gain": drop_gain,
    }
