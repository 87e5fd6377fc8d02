"""Which slots are trained: every one that a decoder could draft, none beyond the end of an answer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stages.train.anchors import candidates, choose, generator, run_lengths

masks = st.lists(st.booleans(), min_size=2, max_size=60).map(lambda bits: np.array(bits))


@given(masks, st.integers(1, 20), st.integers(1, 8), st.integers(0, 5))
def test_every_counted_slot_is_supervised_and_in_one_run(mask: np.ndarray, count: int, k: int, seed: int) -> None:
    anchors, slots = choose(mask, count, k, generator(seed))
    assert len(anchors) == min(count, len(candidates(mask)))
    assert (np.diff(anchors) > 0).all()
    for anchor, counted in zip(anchors, slots, strict=True):
        assert 1 <= counted <= k
        assert mask[anchor + 1 : anchor + 1 + counted].all()
        assert anchor + counted < len(mask)
        following = anchor + 1 + counted
        assert counted == k or following == len(mask) or not mask[following]


def test_the_position_before_the_answer_is_an_anchor() -> None:
    """The last prompt token drafts the answer's start; a one-token answer has exactly that slot."""
    mask = np.array([0, 0, 0, 1, 0], dtype=bool)
    anchors, slots = choose(mask, 8, 7, generator("x"))
    assert anchors.tolist() == [2]
    assert slots.tolist() == [1]


@given(masks)
def test_run_lengths_count_to_the_gap(mask: np.ndarray) -> None:
    for position, length in enumerate(run_lengths(mask)):
        assert mask[position : position + length].all()
        assert position + length == len(mask) or not mask[position + length]


def test_the_stream_depends_on_its_key_alone() -> None:
    assert generator("a", 1).integers(1 << 30, size=4).tolist() == generator("a", 1).integers(1 << 30, size=4).tolist()
    assert generator("a", 1).integers(1 << 30, size=4).tolist() != generator("a", 2).integers(1 << 30, size=4).tolist()
