"""What registration, promotion and the last screen of a run ask of one drafter's evaluation, drawn from all that was measured."""

from __future__ import annotations

from typing import Any

from stages.evaluate.subjects import GUARDED, UNGUARDED


def find_cell(report: dict[str, Any], drafter: str, temperature: float = 0.0) -> dict[str, Any]:
    """The drafter's cell at its trained K."""
    return next(cell for cell in report["cells"] if cell["drafter"] == drafter and cell["temperature"] == temperature and cell["headline"])


def find_lead(report: dict[str, Any], first: str, second: str, temperature: float = 0.0) -> dict[str, Any]:
    """Lead of `first` over `second`: {"macro", "per_kind", "relative"}, each an interval; None as `relative` where `second` is ahead."""
    for lead in report["leads"]:
        if lead["temperature"] == temperature and {lead["first"], lead["second"]} == {first, second}:
            sign = 1 if lead["first"] == first else -1
            return {
                "macro": turned(lead["macro"], sign),
                "per_kind": {kind: turned(interval, sign) for kind, interval in lead["per_kind"].items()},
                "relative": lead["relative"] if sign == 1 else None,
            }
    raise KeyError(f"no lead of {first} over {second} at temperature {temperature}")


def turned(interval: dict[str, float], sign: int) -> dict[str, float]:
    """The interval of the difference, or of the difference the other way round."""
    if sign == 1:
        return dict(interval)
    return {"estimate": -interval["estimate"], "low": -interval["high"], "high": -interval["low"]}


def headline(report: dict[str, Any], drafter: str) -> dict[str, Any]:
    """The whole report with the drafter's greedy numbers at its trained K on top: what is registered and promoted."""
    cell = find_cell(report, drafter)
    lookup = {"guarded": find_cell(report, GUARDED), "unguarded": find_cell(report, UNGUARDED)}
    speed = next(
        entry for entry in report["speed"]["measured"] if (entry["drafter"], entry["draft_tokens"], entry["batch_size"]) == (drafter, cell["draft_tokens"], 1)
    )
    keys = ("acceptance_length", "per_position", "counters")
    return {
        "verdict": report["verdicts"][drafter]["verdict"],
        "reason": report["verdicts"][drafter]["reason"],
        "draft_tokens": cell["draft_tokens"],
        "acceptance_length": cell["acceptance_length"],
        "per_position": cell["per_position"],
        "prompt_lookup": {name: {key: found[key] for key in keys} for name, found in lookup.items()},
        "lead_over_prompt_lookup": find_lead(report, drafter, GUARDED),
        **report,
        "speed": {**report["speed"], **{key: speed[key] for key in ("baseline", "drafted", "ratio", "repeats")}},
    }
