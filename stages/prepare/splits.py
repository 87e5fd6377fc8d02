"""Which split a prompt belongs to, decided from content.

The unit of the split is the prompt: rows that ask the same never lie in two splits, whatever their answers are.
"""

from __future__ import annotations

from math import floor

import numpy as np
from numpy.typing import NDArray

from stages.dataset import SPLITS

SMALL_KIND = 3
"""Kinds with fewer prompts cannot stand in all three splits; they are split together."""


def _count(fraction: float, size: int) -> int:
    """Prompts of a share: rounded, but at least one."""
    return max(1, floor(fraction * size + 0.5)) if fraction > 0 else 0


def assign(kinds: NDArray[np.integer], validation_fraction: float, evaluation_fraction: float) -> NDArray[np.int8]:
    """Per prompt its split, as a place in `SPLITS`.

    Exact counts per kind: each share rounded and at least one prompt, as long as one is left for training. Kinds with
    fewer than three prompts are counted together; where those cannot fill every share either, they all train.
    Within a kind evaluation takes prompts from the front, validation from the back, so that a change of one share does
    not move the other.

    Args:
        kinds: number of each prompt's kind, prompts in the order of their ranks.
    """
    small = np.bincount(kinds, minlength=1) < SMALL_KIND
    groups = np.where(small[kinds], -1, kinds)
    by_group = np.argsort(groups, kind="stable")
    splits = np.full(len(kinds), SPLITS.index("train"), dtype=np.int8)
    shares = (validation_fraction > 0) + (evaluation_fraction > 0)
    for prompts in np.split(by_group, np.flatnonzero(np.diff(groups[by_group])) + 1):
        if len(prompts) <= shares:
            continue
        evaluation, validation = _count(evaluation_fraction, len(prompts)), _count(validation_fraction, len(prompts))
        while evaluation + validation >= len(prompts):
            if evaluation >= validation:
                evaluation -= 1
            else:
                validation -= 1
        splits[prompts[:evaluation]] = SPLITS.index("evaluation")
        splits[prompts[len(prompts) - validation :]] = SPLITS.index("validation")
    return splits
