"""The evaluation's figures, drawn from its report alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from stages.artifacts import atomic_path

DRAFTER, LOOKUP, PLAIN = "#1f6f8b", "#e09f3e", "#8d99ae"
KIND_COLOURS = ("#9e2a2b", "#e09f3e", "#4f772d", "#5e548e", "#c2698f", "#6c757d", "#bc6c25", "#2a9d8f")
STYLE = {
    "figure.dpi": 120,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
}


def draw_all(report: dict[str, Any], directory: Path) -> list[Path]:
    """Write the three PNGs of a report; returns their paths."""
    figures = {"acceptance_per_position": per_position, "acceptance_length": acceptance_length, "speed": speed}
    paths = []
    with mpl.rc_context(STYLE):
        for name, draw in figures.items():
            figure, axes = plt.subplots(figsize=(7.2, 4.2))
            draw(axes, report)
            path = directory / f"{name}.png"
            with atomic_path(path) as temporary:
                # No software version in the file: equal numbers give equal bytes.
                figure.savefig(temporary, format="png", metadata={"Software": None})
            plt.close(figure)
            paths.append(path)
    return paths


def per_position(axes: Axes, report: dict[str, Any]) -> None:
    """Share of the rounds that survive to each position: all prompts, each kind, and prompt lookup."""
    tables = report["per_position"]
    positions = [row["position"] for row in tables["all"]]
    for (kind, table), colour in zip(tables["per_kind"].items(), _colours(len(tables["per_kind"])), strict=True):
        axes.plot(positions, [row["cumulative"] for row in table], color=colour, linewidth=1, marker=".", markersize=4, alpha=0.8, label=kind)
    overall = [row["cumulative"] for row in tables["all"]]
    axes.plot(positions, overall, color=DRAFTER, linewidth=2.5, marker="o", label="all prompts")
    # Prompt lookup often has nothing to propose; those passes count here, as they do in its acceptance length.
    passes = sum(entry["passes"] for entry in report["prompt_lookup"]["acceptance_length"]["per_kind"].values())
    lookup = [row["accepted"] / max(1, passes) for row in report["prompt_lookup"]["per_position"]["all"]]
    axes.plot(positions, lookup, color="black", linewidth=1.5, linestyle="--", label="prompt lookup")
    axes.set(xlabel="position in the block", ylabel="accepted up to here", title="Acceptance per position: share of the verifier passes", xticks=positions)
    axes.set_ylim(0, max(0.05, 1.08 * max([*overall, *lookup, *(row["cumulative"] for table in tables["per_kind"].values() for row in table)])))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=9)


def acceptance_length(axes: Axes, report: dict[str, Any]) -> None:
    """Acceptance length per kind, the drafter beside prompt lookup on the same prompts."""
    ours, theirs = report["acceptance_length"], report["prompt_lookup"]["acceptance_length"]
    names = [*ours["per_kind"], "macro average"]
    width = 0.38
    top = 1.0
    for offset, length, colour, label in ((-0.5, ours, DRAFTER, "drafter"), (0.5, theirs, LOOKUP, "prompt lookup")):
        values = [*(entry["value"] for entry in length["per_kind"].values()), length["macro"]]
        bars = axes.bar([place + offset * width for place in range(len(names))], values, width * 0.95, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
        top = max(top, *values)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.axvline(len(names) - 1.5, color=PLAIN, linewidth=1, linestyle=":")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="tokens per verifier pass", title="Acceptance length (1 = no speculation)")
    # From zero: bars that start elsewhere lie about their ratio.
    axes.set_ylim(0, 1.22 * top)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, ncols=2, loc="upper left", fontsize=9)


def speed(axes: Axes, report: dict[str, Any]) -> None:
    """Every paired repeat as a line from the rate without to the rate with the drafter, and both medians."""
    measured = report["speed"]
    places = (0.0, 1.0)
    for repeat in measured["repeats"]:
        rates = [repeat[name]["tokens"] / repeat[name]["seconds"] for name in ("baseline", "drafted")]
        axes.plot(places, rates, color="black", marker="o", markersize=4, linewidth=1, alpha=0.7, zorder=3)
    medians = [measured["baseline"]["median"], measured["drafted"]["median"]]
    bars = axes.bar(places, medians, 0.5, color=[PLAIN, DRAFTER], alpha=0.9)
    axes.bar_label(bars, labels=[f"{value:.1f}" for value in medians], label_type="center", color="white", fontsize=13, fontweight="bold")
    axes.set_xticks(places, ["verifier alone", "with the drafter"])
    axes.set_xlim(-0.6, 1.6)
    axes.set_ylim(0, 1.15 * max(measured["baseline"]["max"], measured["drafted"]["max"]))
    ratio = measured["ratio"]
    axes.set(
        ylabel="tokens per second",
        title=f"Speed, one prompt at a time: × {ratio['median']:.2f} (median of {len(measured['repeats'])} pairs, {ratio['min']:.2f} to {ratio['max']:.2f})",
    )
    axes.grid(axis="y", alpha=0.3)


def _colours(count: int) -> list[str]:
    return [KIND_COLOURS[index % len(KIND_COLOURS)] for index in range(count)]
