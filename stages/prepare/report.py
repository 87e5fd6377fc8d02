"""What a data set holds, in numbers: for the manifest and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.prepare.index import Numbers
from stages.prepare.rows import Tally


@dataclass(frozen=True)
class Columns:
    """One entry per sample of a split: number of its kind and of its prompt, its tokens, those that are supervised."""

    kind: Numbers
    prompt: Numbers
    tokens: Numbers
    supervised: Numbers


def _sizes(prompts: int, samples: int, tokens: int, supervised: int) -> dict[str, int]:
    return {"prompts": int(prompts), "samples": int(samples), "tokens": int(tokens), "supervised_tokens": int(supervised)}


def split_summary(columns: Columns, kinds: Sequence[str], counts: dict[str, int]) -> dict[str, Any]:
    """The split's sizes, as a whole and per kind, and `counts`.

    Args:
        kinds: names, by number.
    """
    asked = np.unique(columns.kind.astype(np.int64) << 32 | columns.prompt) >> 32
    per_kind = (
        np.bincount(asked, minlength=len(kinds)),
        np.bincount(columns.kind, minlength=len(kinds)),
        *(np.bincount(columns.kind, weights=values, minlength=len(kinds)) for values in (columns.tokens, columns.supervised)),
    )
    present = sorted((name, number) for number, name in enumerate(kinds) if per_kind[1][number])
    return {
        **_sizes(len(np.unique(columns.prompt)), len(columns.kind), columns.tokens.sum(), columns.supervised.sum()),
        **counts,
        "kinds": {name: _sizes(*(values[number] for values in per_kind)) for name, number in present},
    }


def rows_summary(tally: Tally) -> dict[str, Any]:
    return {
        "read": tally.read,
        "broken_lines": tally.broken_lines,
        "duplicates": tally.duplicates,
        "beyond_limit": tally.beyond_limit,
        "dropped": dict(sorted(tally.dropped.items())),
        "examples": dict(sorted(tally.examples.items())),
    }


def describe(report: dict[str, Any]) -> str:
    """The report in a few lines for the terminal."""
    rows = report["rows"]
    lines = [f"{rows['read']} rows read, {rows['duplicates']} duplicates, {rows['broken_lines']} broken lines, {rows['beyond_limit']} beyond the limit"]
    lines += [f"dropped {count} × {reason} (first: {rows['examples'][reason]})" for reason, count in rows["dropped"].items()]
    for split, entry in report["splits"].items():
        kinds = ", ".join(f"{kind} {sizes['samples']}" for kind, sizes in entry["kinds"].items())
        lines.append(
            f"{split}: {entry['samples']} samples, {entry['tokens']} tokens, {entry['supervised_tokens']} supervised, "
            f"{entry['truncated_answers']} answers cut at max_tokens ({kinds})"
        )
    return "\n".join(lines)
