"""How a step's samples are divided among ranks, and a rank's share among its parts: none left out, about equal work.

A function of the samples alone, so that each rank finds its own share without asking the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

SLOT_COST = 4
"""Tokens of context that cost about as much as one draft slot, whose share is mostly the vocabulary's."""


def divided(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Places of `costs` in `parts` lists, the most expensive list first: each place, longest first, goes to the cheapest list so far."""
    ahead = [(0.0, part) for part in range(parts)]
    places: list[list[int]] = [[] for _ in range(parts)]
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        load, part = heapq.heappop(ahead)
        places[part].append(place)
        heapq.heappush(ahead, (load + costs[place], part))
    order = [part for _, part in sorted(ahead, key=lambda entry: (-entry[0], entry[1]))]
    return [sorted(places[part]) for part in order]


def share(costs: Sequence[float], items: Sequence[int], rank: int, ranks: int, accumulation: int) -> list[list[int]]:
    """Those of `items` that `rank` takes, in at most `accumulation` parts: as many for all ranks, of which none is empty on all.

    What the ranks do at the same time costs about the same: they wait for each other after each part.
    """
    parts = divided(costs, ranks * min(accumulation, math.ceil(len(items) / ranks)))
    rows = [parts[first : first + ranks] for first in range(0, len(parts), ranks)]
    # There and back, or rank 0 had the most expensive part of each row.
    own = [row[rank if number % 2 == 0 else ranks - 1 - rank] for number, row in enumerate(rows)]
    return [[items[place] for place in part] for part in own]
