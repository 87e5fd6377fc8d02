"""Numbers as text: Markdown tables and their cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = Sequence[str]


def table(header: Row, rows: Sequence[Row]) -> list[str]:
    """A Markdown table whose columns also line up as plain text; the first column is text, the others numbers."""
    # Two at least: the rule needs a dash and a colon.
    widths = [max(2, *(len(row[column]) for row in (header, *rows))) for column in range(len(header))]

    def line(row: Row) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "| " + " | ".join(cells) + " |"

    rule = "| " + " | ".join("-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths)) + " |"
    return [line(header), rule, *(line(row) for row in rows)]


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def interval(entry: Mapping[str, float]) -> str:
    """A difference with its interval."""
    return f"{entry['estimate']:+.2f} [{entry['low']:+.2f}, {entry['high']:+.2f}]"


def relative(entry: Mapping[str, float]) -> str:
    """A relative difference with its interval."""
    return f"{100 * entry['estimate']:+.1f} % [{100 * entry['low']:+.1f}, {100 * entry['high']:+.1f}]"


def spread(entry: Mapping[str, float]) -> str:
    """A ratio: median, least and greatest."""
    return f"× {entry['median']:.2f} ({entry['min']:.2f} to {entry['max']:.2f})"
