"""Prompt lookup finds what vLLM's finds; its guard drops what would extend a loop, and says how much."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.decoding.ngram import LoopGuard, NgramProposer, before_loop, lookup
from stages.decoding.proposer import Batch, DecodingError

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=24)


def batch_of(texts: list[list[int]]) -> Batch:
    lengths = torch.tensor([len(text) for text in texts])
    tokens = torch.randint(0, 4, (len(texts), int(lengths.max()) + 5), generator=torch.Generator().manual_seed(0))
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    return Batch(tokens, lengths)


def by_search(text: list[int], shortest: int, longest: int, limit: int) -> list[int]:
    """The definition: the longest n-gram that ends the text and stands earlier, at its first place."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - size):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + limit]
    return []


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=4), shortest=st.integers(1, 3), more=st.integers(0, 2), limit=st.integers(1, 5))
def test_lookup_finds_the_longest_ngram_at_its_first_place(texts: list[list[int]], shortest: int, more: int, limit: int) -> None:
    """What lies behind a row's length, and other rows, have no part in it."""
    drafts, counts = lookup(batch_of(texts), shortest, shortest + more, limit)
    found = [row[:count] for row, count in zip(drafts.tolist(), counts.tolist(), strict=True)]
    assert found == [by_search(text, shortest, shortest + more, limit) for text in texts]


@pytest.mark.integration
@settings(max_examples=300, deadline=None)
@given(text=TEXT, shortest=st.integers(1, 3), more=st.integers(0, 2), limit=st.integers(1, 5))
def test_lookup_finds_what_vllm_finds(text: list[int], shortest: int, more: int, limit: int) -> None:
    import numpy as np
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as theirs

    found: Any = theirs(np.array(text, dtype=np.int32), shortest, shortest + more, 1000, limit)
    drafts, counts = lookup(batch_of([text]), shortest, shortest + more, limit)
    assert drafts[0, : int(counts)].tolist() == found.tolist()


def loops(text: list[int], guard: LoopGuard) -> bool:
    """The definition of a loop at the end of a text."""
    for period in range(1, guard.longest_period + 1):
        size = max(guard.repeats * period, guard.tokens)
        tail = text[-size:]
        if len(tail) == size and all(tail[place] == tail[place - period] for place in range(period, size)):
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=3),
    draft=st.lists(st.integers(0, 1), min_size=4, max_size=4),
    repeats=st.integers(2, 4),
    period=st.integers(1, 5),
    least=st.integers(2, 8),
)
def test_the_guard_lets_a_draft_go_on_until_it_extends_a_loop(texts: list[list[int]], draft: list[int], repeats: int, period: int, least: int) -> None:
    guard = LoopGuard(repeats, period, least)
    drafts = torch.tensor([draft] * len(texts))
    kept = before_loop(batch_of(texts), drafts, torch.tensor([4, 3, 2][: len(texts)]), guard)
    for text, count, most in zip(texts, kept.tolist(), [4, 3, 2], strict=False):
        wanted = next((done for done in range(most) if loops(text + draft[: done + 1], guard)), most)
        assert count == wanted


def test_the_guard_counts_what_it_drops() -> None:
    looping, fine = [9, 5, 6, 7, 5, 6, 7, 5, 6], [1, 2, 3, 1]
    guarded, free = NgramProposer(4, 1, 3, LoopGuard(repeats=3, longest_period=4, tokens=8)), NgramProposer(4, 1, 3)
    batch = batch_of([looping, fine])
    assert free.propose(batch, 4).lengths.tolist() == [3, 3]
    assert guarded.propose(batch, 4).lengths.tolist() == [0, 3]
    assert guarded.counters() == {"guarded_drafts": 1, "guarded_tokens": 3}
    assert free.counters() == {}


def test_a_guard_that_guards_nothing_is_refused() -> None:
    with pytest.raises(DecodingError, match="allowed are repeats >= 2"):
        LoopGuard(repeats=1)
