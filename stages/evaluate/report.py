"""The evaluation's report for people: Markdown tables of the numbers in `report.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = Sequence[str]


def table(header: Row, rows: Sequence[Row]) -> list[str]:
    """A Markdown table whose columns also line up as plain text; the first column is text, the others numbers."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Row) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "| " + " | ".join(cells) + " |"

    rule = "| " + " | ".join("-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths)) + " |"
    return [line(header), rule, *(line(row) for row in rows)]


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def length_rows(report: dict[str, Any]) -> list[Row]:
    """Acceptance length per kind: drafter, prompt lookup, and the lead with its interval."""
    lookup, lead = report["prompt_lookup"]["acceptance_length"], report["lead_over_prompt_lookup"]
    rows: list[Row] = [
        (
            kind,
            str(entry["prompts"]),
            f"{entry['tokens']} / {entry['passes']}",
            f"{entry['value']:.2f}",
            f"{lookup['per_kind'][kind]['value']:.2f}",
            interval(lead["per_kind"][kind]),
        )
        for kind, entry in report["acceptance_length"]["per_kind"].items()
    ]
    rows.append(("macro average", "", "", f"{report['acceptance_length']['macro']:.2f}", f"{lookup['macro']:.2f}", interval(lead["macro"])))
    return rows


def interval(entry: dict[str, float]) -> str:
    return f"{entry['estimate']:+.2f} [{entry['low']:+.2f}, {entry['high']:+.2f}]"


def position_rows(report: dict[str, Any]) -> list[Row]:
    """Acceptance at each position: rate with its counts, survival, and each kind's rate."""
    tables = report["per_position"]
    return [
        (
            str(row["position"]),
            f"{row['accepted']} / {row['reached']}",
            percent(row["rate"]),
            percent(row["cumulative"]),
            *(percent(kind[index]["rate"]) for kind in tables["per_kind"].values()),
        )
        for index, row in enumerate(tables["all"])
    ]


def speed_rows(report: dict[str, Any]) -> list[Row]:
    """Tokens per second of each paired repeat, then the medians."""
    measured = report["speed"]
    rows: list[Row] = [
        (
            str(index),
            *(f"{repeat[name]['tokens']} / {repeat[name]['seconds']:.2f} s" for name in ("baseline", "drafted")),
            f"{repeat['ratio']:.2f}",
        )
        for index, repeat in enumerate(measured["repeats"], start=1)
    ]
    rows.append(("median, tokens/s", f"{measured['baseline']['median']:.1f}", f"{measured['drafted']['median']:.1f}", f"{measured['ratio']['median']:.2f}"))
    return rows


def markdown(report: dict[str, Any]) -> str:
    """The whole report."""
    kinds = list(report["per_position"]["per_kind"])
    lines = [
        "# Evaluation of the drafter",
        "",
        f"Greedy decoding through vLLM in {report['dtype']}, {report['draft_tokens']} draft tokens per round, "
        f"{report['prompts']} held-out prompts, up to {report['max_tokens']} tokens each.",
        "",
        "## Acceptance length",
        "",
        "Tokens committed per verifier pass, the verifier's own token included (1 = no speculation). Prompt lookup drafts as",
        f"many tokens, from n-grams of {report['prompt_lookup']['ngram_min']} to {report['prompt_lookup']['ngram_max']} tokens, on the same prompts. "
        "The lead is the difference with a 95 % paired bootstrap interval over the prompts.",
        "",
        *table(("kind", "prompts", "tokens / passes", "drafter", "prompt lookup", "lead"), length_rows(report)),
        "",
        "![Acceptance length per kind](plots/acceptance_length.png)",
        "",
        "## Acceptance per position",
        "",
        "Rate: of the rounds that accepted every draft before this position, how many accepted this one too. Survival: the",
        "product of the rates so far. The columns on the right are the rates per kind.",
        "",
        *table(("position", "accepted / reached", "rate", "survival", *kinds), position_rows(report)),
        "",
        "![Acceptance per position](plots/acceptance_per_position.png)",
        "",
        "## Speed",
        "",
        f"{report['speed']['prompts']} prompts, one at a time, up to {report['speed']['max_tokens']} tokens each (reading the prompt included), "
        "with and without the drafter in turn.",
        "",
        *table(("repeat", "verifier alone", "with the drafter", "ratio"), speed_rows(report)),
        "",
        "![Tokens per second](plots/speed.png)",
        "",
    ]
    return "\n".join(lines)
