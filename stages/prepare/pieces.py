"""Texts to token ids, piece by piece: what lies between two special tokens is tokenised once, however often it returns.

A chat's rendered text is mostly what was rendered before: the system's message, the headers of the roles, the turns so
far. A tokenizer first takes its added tokens out of a text and then tokenises what is left between them, each part by
itself. Where every step of it is known to see such a part alone (`separable`), tokenising the parts gives the ids of the
whole, and parts that were met before cost nothing. Any other tokenizer is given whole texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Sequence"}
PRE_TOKENIZERS = {"ByteLevel", "Digits", "Split", "Sequence"}
"""Steps that look at nothing but the part they are given. (Others treat the beginning of a text in their own way.)"""
PIECES = 4096
"""Parts that are remembered. A conversation needs its own turns and what it shares with others."""

Encode = Callable[[str], list[int]]


def _steps(component: Any) -> set[str]:
    """The types of a tokenizer's normalizer or pre-tokenizer, of all steps of a sequence."""

    def types(state: dict[str, Any]) -> set[str]:
        steps = [step for name in ("normalizers", "pretokenizers") for step in state.get(name, [])]
        return {str(state["type"])}.union(*(types(step) for step in steps))

    return types(json.loads(component.__getstate__())) if component is not None else set()


def separable(backend: Any) -> bool:
    """Are the ids of a text those of the parts between its added tokens, and the tokens' own?

    Args:
        backend: a `tokenizers.Tokenizer`.
    """
    from tokenizers.models import BPE

    plain = all(
        token.content and not (token.lstrip or token.rstrip or token.single_word or (token.special and token.normalized))
        for token in backend.get_added_tokens_decoder().values()
    )
    known = _steps(backend.normalizer) <= NORMALIZERS and _steps(backend.pre_tokenizer) <= PRE_TOKENIZERS and backend.pre_tokenizer is not None
    return plain and known and not backend.encode_special_tokens and isinstance(backend.model, BPE) and not backend.model.dropout


def direct_encoder(tokenizer: Any) -> Encode | None:
    """What `tokenizer.encode(text, add_special_tokens=False)` gives, without what it does on the way.

    Args:
        tokenizer: of transformers; None is returned for one that has an `encode` of its own.
    """
    from transformers import TokenizersBackend

    kind = type(tokenizer)
    if not isinstance(tokenizer, TokenizersBackend) or any(getattr(kind, name) is not getattr(TokenizersBackend, name) for name in ("encode", "_encode_plus")):
        return None
    tokenizer.encode("", add_special_tokens=False)  # sets up the backend: no truncation, no padding, how special tokens are read
    backend = tokenizer.backend_tokenizer

    def whole(text: str) -> list[int]:
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return by_pieces(backend, whole) if separable(backend) else whole


def by_pieces(backend: Any, whole: Encode) -> Encode:
    """`whole`, one part between two added tokens at a time."""
    added = {token.content: number for number, token in backend.get_added_tokens_decoder().items() if not token.normalized}
    if not added:
        return whole
    # The tokenizer takes the leftmost match, and of those the longest.
    marks = re.compile("(" + "|".join(re.escape(content) for content in sorted(added, key=len, reverse=True)) + ")")
    piece = lru_cache(maxsize=PIECES)(whole)

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(marks.split(text)):
            if place % 2:
                ids.append(added[part])
            elif part:
                ids += piece(part)
        return ids

    return encode
