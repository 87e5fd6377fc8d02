"""Which positions a step drafts from, and which of a block's slots count.

An anchor is a position whose next token is supervised (the last prompt token included: it drafts the answer's start).
Slot k predicts position p + 1 + k; it counts while it stays inside the sequence and inside the same supervised run,
because past the end of an answer the next tokens are the user's, which no decoder drafts.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def generator(*key: object) -> np.random.Generator:
    """A random stream that depends on `key` alone, so that a resumed run draws what an uninterrupted one draws."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def run_lengths(loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`[T]`: supervised tokens from each position on, without a gap."""
    out = np.zeros(len(loss_mask), dtype=np.int64)
    length = 0
    for position in range(len(loss_mask) - 1, -1, -1):
        length = length + 1 if loss_mask[position] else 0
        out[position] = length
    return out


def candidates(loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions whose next token is supervised."""
    return np.flatnonzero(loss_mask[1:]).astype(np.int64)


def choose(loss_mask: NDArray[np.bool_], count: int, draft_tokens: int, random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Up to `count` distinct anchors, ascending, and how many slots of each count (1 to `draft_tokens`)."""
    positions = candidates(loss_mask)
    if len(positions) > count:
        positions = np.sort(random.choice(positions, size=count, replace=False))
    return positions, np.minimum(run_lengths(loss_mask)[positions + 1], draft_tokens)
