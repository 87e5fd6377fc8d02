"""The evaluation's figures, drawn from its report alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from stages.artifacts import atomic_path
from stages.evaluate.report import headlines, temperatures

COLOURS = ("#1f6f8b", "#9e2a2b", "#4f772d", "#5e548e", "#bc6c25", "#2a9d8f", "#c2698f")
LOOKUP_COLOURS = ("#e09f3e", "#8d99ae")
PLAIN = "#8d99ae"
STYLES = ("-", "--", ":", "-.")
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

Report = dict[str, Any]


def draw_all(report: Report, directory: Path) -> list[Path]:
    """Write the PNGs of a report; returns their paths. Without a calibrated confidence head there is no figure of its calibration."""
    figures: dict[str, Callable[[Report], Figure]] = {
        "acceptance_per_position": per_position,
        "acceptance_length": acceptance_length,
        "sweep": sweep,
    }
    if report["speed"]["measured"]:
        figures["speed"] = speed
    if any(report["calibration"].values()):
        figures["calibration"] = calibration
    paths = []
    with mpl.rc_context(STYLE):
        for name, draw in figures.items():
            figure = draw(report)
            path = directory / f"{name}.png"
            with atomic_path(path) as temporary:
                # No software version in the file: equal numbers give equal bytes.
                figure.savefig(temporary, format="png", metadata={"Software": None})
            plt.close(figure)
            paths.append(path)
    return paths


def colours(report: Report) -> dict[str, str]:
    """One colour per drafter, the same in every figure; prompt lookup has its own."""
    drafters = list(report["drafters"])
    others = sorted({cell["drafter"] for cell in report["cells"]} - set(drafters))
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(drafters)} | dict(zip(others, LOOKUP_COLOURS, strict=False))


def panels(count: int, width: float = 5.4, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(max(7.2, width * count), height), squeeze=False)
    return figure, list(axes[0])


def per_position(report: Report) -> Figure:
    """Share of the verifier passes that accept up to each position, a panel per temperature: every drafter; of a single one each kind too."""
    shown = temperatures(report)
    figure, axes = panels(len(shown))
    colour = colours(report)
    top = 0.05
    for place, (axis, temperature) in enumerate(zip(axes, shown, strict=True)):
        cells = headlines(report, temperature)
        if len(report["drafters"]) == 1:
            for kind, rows in cells[0]["per_position"]["per_kind"].items():
                values = [row["cumulative"] for row in rows]
                top = max(top, *values)
                axis.plot(range(1, len(values) + 1), values, color=PLAIN, linewidth=1, marker=".", markersize=4, alpha=0.8)
                axis.annotate(kind, (1, values[0]), xytext=(-6, 0), textcoords="offset points", ha="right", va="center", fontsize=7, color="#555555")
        for cell in cells:
            # Prompt lookup often has nothing to propose; those passes count here, as they do in its acceptance length.
            passes = sum(entry["passes"] for entry in cell["acceptance_length"]["per_kind"].values())
            values = [row["accepted"] / max(1, passes) for row in cell["per_position"]["all"]]
            top = max(top, *values)
            axis.plot(
                range(1, len(values) + 1),
                values,
                color=colour[cell["drafter"]],
                linewidth=2.2,
                marker="o",
                markersize=5,
                linestyle="-" if cell["drafter"] in report["drafters"] else "--",
                label=cell["drafter"],
            )
        most = max(cell["draft_tokens"] for cell in cells)
        axis.set(xlabel="position in the block", title=f"Temperature {temperature:g}", xticks=range(1, most + 1))
        axis.set_xlim(0.2 if len(report["drafters"]) == 1 else 0.7, most + 0.3)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.grid(axis="y", alpha=0.3)
        if place == 0:
            axis.set_ylabel("passes that accept up to here")
            axis.legend(frameon=False, fontsize=9)
    for axis in axes:
        axis.set_ylim(0, 1.08 * top)
    return figure


def acceptance_length(report: Report) -> Figure:
    """Acceptance length per kind, all drafters side by side, a panel per temperature."""
    shown = temperatures(report)
    figure: Figure
    figure, axes = plt.subplots(len(shown), 1, figsize=(9.0, 3.6 * len(shown)), squeeze=False)
    colour = colours(report)
    for axis, temperature in zip(axes[:, 0], shown, strict=True):
        cells = headlines(report, temperature)
        names = [*cells[0]["acceptance_length"]["per_kind"], "macro average"]
        width = 0.84 / len(cells)
        top = 1.0
        for place, cell in enumerate(cells):
            length = cell["acceptance_length"]
            values = [*(entry["value"] for entry in length["per_kind"].values()), length["macro"]]
            offset = (place - (len(cells) - 1) / 2) * width
            bars = axis.bar([x + offset for x in range(len(names))], values, width * 0.94, color=colour[cell["drafter"]], label=cell["drafter"])
            axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2, rotation=90 if len(cells) > 3 else 0)
            top = max(top, *values)
        axis.axhline(1.0, color="black", linewidth=1)
        axis.axvline(len(names) - 1.5, color=PLAIN, linewidth=1, linestyle=":")
        axis.set_xticks(range(len(names)), names)
        axis.set(ylabel="tokens per verifier pass", title=f"Acceptance length, temperature {temperature:g} (1 = no speculation)")
        # From zero: bars that start elsewhere lie about their ratio.
        axis.set_ylim(0, 1.4 * top)
        axis.grid(axis="y", alpha=0.3)
        axis.legend(frameon=False, ncols=len(cells), loc="upper left", fontsize=8)
    return figure


def sweep(report: Report) -> Figure:
    """Left: acceptance length by K with its interval. Right: speed against the verifier alone by K, with the range of the pairs."""
    timed = bool(report["speed"]["measured"])
    figure, axes = panels(2 if timed else 1)
    left = axes[0]
    colour = colours(report)
    for style, temperature in zip(STYLES, temperatures(report), strict=False):
        for name in report["drafters"]:
            cells = [cell for cell in report["cells"] if cell["drafter"] == name and cell["temperature"] == temperature]
            values = [{"median": cell["interval"]["estimate"], "min": cell["interval"]["low"], "max": cell["interval"]["high"]} for cell in cells]
            _with_range(left, [cell["draft_tokens"] for cell in cells], values, colour[name], style, f"{name}, temperature {temperature:g}")
    if timed:
        for name in report["drafters"]:
            measured = [entry for entry in report["speed"]["measured"] if entry["drafter"] == name and entry["batch_size"] == 1]
            _with_range(axes[1], [entry["draft_tokens"] for entry in measured], [entry["ratio"] for entry in measured], colour[name], "-", name)
        axes[1].axhline(1.0, color="black", linewidth=1)
        axes[1].set(ylabel="× verifier alone", title="Speed, one prompt at a time", ylim=(0, max(1.2, 1.3 * axes[1].get_ylim()[1])))
    ticks = sorted({cell["draft_tokens"] for cell in report["cells"] if cell["drafter"] in report["drafters"]})
    left.set(ylabel="tokens per verifier pass", title="Acceptance length, macro average")
    for axis in axes:
        axis.grid(axis="y", alpha=0.3)
        axis.legend(frameon=False, fontsize=9, loc="upper left")
        axis.set(xlabel="drafts per round (K)", xticks=ticks, xlim=(min(ticks) - 0.6, max(ticks) + 0.6))
    # Room for the legend above the lines.
    low, high = min(1.0, left.get_ylim()[0]), left.get_ylim()[1]
    left.set_ylim(low, high + (high - low) * (0.08 + 0.07 * len(left.get_legend_handles_labels()[1])))
    return figure


def speed(report: Report) -> Figure:
    """Left: tokens per second by batch size, with and without the drafters. Right: their ratio. Trained K; bars: the range of the pairs."""
    figure, (left, right) = panels(2)
    colour = colours(report)
    trained = {cell["drafter"]: cell["draft_tokens"] for cell in report["cells"] if cell["headline"]}
    sizes = sorted({entry["batch_size"] for entry in report["speed"]["measured"]})
    for place, name in enumerate(report["drafters"]):
        measured = [entry for entry in report["speed"]["measured"] if entry["drafter"] == name and entry["draft_tokens"] == trained[name]]
        batches = [entry["batch_size"] for entry in measured]
        _with_range(left, batches, [entry["drafted"] for entry in measured], colour[name], "-", name)
        label = "verifier alone" if place == 0 else None
        _with_range(left, batches, [entry["baseline"] for entry in measured], PLAIN, "--", label)
        _with_range(right, batches, [entry["ratio"] for entry in measured], colour[name], "-", name)
    left.set(ylabel="tokens per second", title="Speed, greedy")
    right.set(ylabel="× verifier alone", title="Against the verifier alone")
    right.axhline(1.0, color="black", linewidth=1)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.set_xlabel("prompts decoded together")
        axis.set_xlim(min(sizes) / 1.4, max(sizes) * 1.4)
        axis.grid(axis="y", alpha=0.3)
        axis.set_ylim(0, 1.12 * axis.get_ylim()[1])
    left.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def calibration(report: Report) -> Figure:
    """Error of the survival per position, before and after; then, for both, what was said against what came true, a line per position."""
    figure, (left, *others) = panels(3)
    colour = colours(report)
    for name, modes in report["calibration"].items():
        for style, (mode, found) in zip(STYLES, modes.items(), strict=False):
            rows = found["held_out"]
            positions = [row["position"] for row in rows]
            left.plot(
                positions, [row["ece_before"] for row in rows], color=colour[name], linestyle=style, marker="o", alpha=0.35, label=f"{name}, {mode}: before"
            )
            left.plot(
                positions, [row["ece_after"] for row in rows], color=colour[name], linestyle=style, marker="o", linewidth=2, label=f"{name}, {mode}: after"
            )
    left.axhline(0.02, color="black", linewidth=1, linestyle=":")
    left.set(xlabel="position in the block", ylabel="expected calibration error", title="Error of the prefix survival")
    left.set_ylim(bottom=0)
    left.grid(axis="y", alpha=0.3)
    left.legend(frameon=False, fontsize=8)
    name, modes = next((name, modes) for name, modes in report["calibration"].items() if modes)
    mode, found = next(iter(modes.items()))
    for axis, when in zip(others, ("before", "after"), strict=True):
        _reliability(axis, found["held_out"], when)
        axis.set(xlabel="survival predicted", ylabel="survival seen", title=f"Reliability {when} calibration: {name}, {mode}", xlim=(0, 1), ylim=(0, 1))
    return figure


def _reliability(axis: Axes, rows: list[dict[str, Any]], when: str) -> None:
    """Bins of every position, larger where they hold more, on the line of perfect calibration."""
    axis.plot((0, 1), (0, 1), color="black", linewidth=1)
    shades = plt.get_cmap("viridis")
    for place, row in enumerate(rows):
        bins = row[f"reliability_{when}"]
        total = max(1, sum(entry["count"] for entry in bins))
        sizes = [12 + 240 * entry["count"] / total for entry in bins]
        shade = shades(0.9 * place / max(1, len(rows) - 1))
        points = [entry["predicted"] for entry in bins], [entry["survived"] for entry in bins]
        axis.plot(*points, color=shade, linewidth=1, alpha=0.6)
        axis.scatter(*points, s=sizes, color=shade, alpha=0.8, label=f"position {row['position']}", edgecolors="white", linewidths=0.5)
    legend = axis.legend(frameon=False, fontsize=8)
    for handle in legend.legend_handles:
        if handle is not None and hasattr(handle, "set_sizes"):
            handle.set_sizes([30])


def _with_range(axis: Axes, places: list[int], spreads: list[dict[str, float]], colour: str, style: str, label: str | None) -> None:
    """Medians with bars from the least to the greatest."""
    medians = [entry["median"] for entry in spreads]
    below = [entry["median"] - entry["min"] for entry in spreads]
    above = [entry["max"] - entry["median"] for entry in spreads]
    axis.errorbar(places, medians, yerr=(below, above), color=colour, linestyle=style, marker="o", capsize=3, label=label)
