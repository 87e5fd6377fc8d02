"""Protects: no prompt on two sides of a split, for every size and ratio."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts import sha256_bytes
from stages.dataset import SPLITS
from stages.prepare.splits import assign

fractions = st.floats(0, 0.999, allow_nan=False)


def split(kinds: dict[str, str], validation: float, evaluation: float) -> dict[str, str]:
    """Prompt → split, for prompts with their kinds."""
    prompts = sorted(kinds, key=lambda prompt: sha256_bytes(prompt.encode()))
    names = list(dict.fromkeys(kinds.values()))
    numbers = np.array([names.index(kinds[prompt]) for prompt in prompts], dtype=np.int32)
    return dict(zip(prompts, (SPLITS[place] for place in assign(numbers, validation, evaluation).tolist()), strict=True))


@given(st.dictionaries(st.text(max_size=4), st.sampled_from("abcdefgh"), max_size=80), fractions, fractions)
def test_splits_are_disjoint_and_complete_for_every_size_and_ratio(kinds: dict[str, str], validation: float, evaluation: float) -> None:
    if validation + evaluation >= 1:
        validation, evaluation = validation / 2, evaluation / 2
    splits = split(kinds, validation, evaluation)
    assert set(splits) == set(kinds), "every prompt is in exactly one split"
    counts = Counter(splits.values())
    assert set(counts) <= {"train", "validation", "evaluation"}
    if kinds:
        assert counts["train"] >= 1
    enough = len(kinds) > (validation > 0) + (evaluation > 0)
    assert (counts["validation"] > 0) == (validation > 0 and enough)
    assert (counts["evaluation"] > 0) == (evaluation > 0 and enough)
    for kind, size in Counter(kinds.values()).items():
        own = Counter(splits[prompt] for prompt in kinds if kinds[prompt] == kind)
        if size >= 3:
            assert own["train"] >= 1
            assert (own["evaluation"] > 0) == (evaluation > 0), "each kind has held-out prompts"
            assert (own["validation"] > 0) == (validation > 0)
        if size >= 20 and validation + evaluation < 0.9:
            assert abs(own["evaluation"] - evaluation * size) <= 1
            assert abs(own["validation"] - validation * size) <= 1


@given(st.dictionaries(st.text(max_size=4), st.sampled_from("abc"), min_size=3, max_size=40), st.randoms(use_true_random=False))
def test_splits_depend_on_content_alone(kinds: dict[str, str], random: object) -> None:
    """Other numbers for the kinds change nothing; another evaluation share does not move what validates."""
    shuffled = list(kinds.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = split(kinds, 0.1, 0.2)
    assert split(dict(shuffled), 0.1, 0.2) == first
    wider = split(kinds, 0.1, 0.3)
    assert {prompt for prompt, place in first.items() if place == "evaluation"} <= {prompt for prompt, place in wider.items() if place == "evaluation"}


def test_a_row_more_moves_few_others() -> None:
    kinds = {f"prompt {number}": "k" for number in range(200)}
    before = split(kinds, 0.06, 0.1)
    after = split({**kinds, "one more": "k"}, 0.06, 0.1)
    assert sum(before[prompt] != after[prompt] for prompt in kinds) <= 2
