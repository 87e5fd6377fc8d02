"""How each algorithm's slots are made of a batch: normed hidden states, and the Markov head's share where there is one.

All take the same slots: slot k of an anchor at position p says token p + 1 + k, given the data's tokens up to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.drafters.draft_model import DraftModel
from stages.drafters.eagle3 import Eagle3
from stages.drafters.model import Drafter
from stages.train.data import Batch

TrainedDrafter = Drafter | Eagle3 | DraftModel


class Slots(NamedTuple):
    """Of a batch's counted slots `N`: normed `hidden` `[N, H]`, Markov `features` `[N, R]`, its `w2` `[D, R]` and `confidence` logits `[N]`, or None."""

    hidden: Tensor
    features: Tensor | None = None
    w2: Tensor | None = None
    confidence: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """How one algorithm is trained.

    Attributes:
        slots: drafter and batch → its slots; runs under autocast.
        first_anchor: earliest position that can be an anchor.
        chained: whether later slots of an anchor hang on what the drafter made of earlier ones. If not, a slot is the same whichever
            anchor it follows, and training takes anchors of one slot.
    """

    slots: Callable[[Any, Batch], Slots]
    first_anchor: int = 0
    chained: bool = True


def _block(drafter: Drafter, batch: Batch) -> Slots:
    hidden = drafter.hidden(batch.blocks)
    embedded = features = None
    if drafter.markov_head is not None:
        embedded = drafter.markov_head.markov_w1(batch.previous)
        features = drafter.markov_head.features(embedded, hidden)
    slots = batch.slots
    w2 = drafter.markov_head.markov_w2.weight if drafter.markov_head is not None else None
    confidence = drafter.confidence(hidden[slots], embedded[slots] if embedded is not None else None)
    return Slots(hidden[slots], features[slots] if features is not None else None, w2, confidence)


def _eagle3(drafter: Eagle3, batch: Batch) -> Slots:
    """Training-time test: K steps on the layer's own outputs."""
    following = torch.cat([tokens[1 : s.context[1] - s.context[0] + 1] for tokens, s in zip(batch.tokens, batch.blocks.segments, strict=True)])
    return Slots(drafter.unrolled(batch.blocks, following, batch.previous)[batch.slots])


def _draft_model(drafter: DraftModel, batch: Batch) -> Slots:
    blocks = batch.blocks
    anchors = [blocks.anchor_positions[s.anchors[0] : s.anchors[1]] for s in blocks.segments]
    return Slots(drafter.supervised(batch.tokens, anchors, batch.slots.shape[1])[batch.slots])


OBJECTIVES: dict[str, Objective] = {
    "dspark": Objective(_block),
    "dflash": Objective(_block),
    # An anchor at position 0 has no hidden state before it to draft from.
    "eagle3": Objective(_eagle3, first_anchor=1),
    "draft_model": Objective(_draft_model, chained=False),
}


def batch_shape(drafter: TrainedDrafter, anchors_per_sequence: int) -> tuple[int, int]:
    """Anchors of a sequence and slots of an anchor in training: as many slots for every algorithm."""
    slots = drafter.config.draft_tokens
    return (anchors_per_sequence, slots) if OBJECTIVES[drafter.config.algorithm].chained else (anchors_per_sequence * slots, 1)
