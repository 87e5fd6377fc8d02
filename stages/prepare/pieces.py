"""Texts to token ids, a part at a time: what was met before is not tokenised again.

A chat's rendered text is mostly what was rendered before: the system's message, the headers of the roles, the turns so
far, and words. A tokenizer first takes its added tokens out of a text, then cuts what is left between them into words,
each by itself, and its model sees single words. Where every step is known to work like this, tokenising the parts gives
the ids of the whole (`separable`, `cuts_at_words`). Any other tokenizer is given whole texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}
PRE_TOKENIZERS = {"ByteLevel", "Digits", "Split"}
"""Steps that look at nothing but the part they are given. (Others treat the beginning of a text in their own way.)"""
SPLITS_AT_WORDS = {
    # Llama 3, and Qwen 2 and later, which take digits singly
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Patterns that, like GPT-2's own in `ByteLevel`, always begin a word at ` x` after a printable character."""
WORD = re.compile(r"(?s:.)(?:[^ ]+|(?<![!-~]) | (?![A-Za-z]))*")
"""From one place where such a word begins to the next: a space with a printable ASCII character before it and a letter after it."""
PIECES, WORDS = 4096, 1 << 16
"""Parts that are remembered: those between added tokens, and words."""

Encode = Callable[[str], list[int]]


def _steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's normalizer or pre-tokenizer, sequences resolved."""

    def flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if state["type"] == "Sequence":
            for step in (*state.get("normalizers", []), *state.get("pretokenizers", [])):
                yield from flat(step)
        else:
            yield state

    return list(flat(json.loads(component.__getstate__()))) if component is not None else []


def separable(backend: Any) -> bool:
    """Are the ids of a text those of the parts between its added tokens, and the tokens' own?

    Args:
        backend: a `tokenizers.Tokenizer`.
    """
    from tokenizers.models import BPE

    added = backend.get_added_tokens_decoder().values()
    plain = all(token.content and not (token.lstrip or token.rstrip or token.single_word) for token in added)
    words = _steps(backend.pre_tokenizer)
    known = {step["type"] for step in _steps(backend.normalizer)} <= NORMALIZERS and {step["type"] for step in words} <= PRE_TOKENIZERS
    return plain and known and bool(words) and not backend.encode_special_tokens and isinstance(backend.model, BPE) and not backend.model.dropout


def cuts_at_words(backend: Any) -> bool:
    """Does a `separable` tokenizer begin a new word wherever `WORD` does?"""
    for step in _steps(backend.pre_tokenizer):
        if step["type"] == "ByteLevel":
            return bool(step["use_regex"])
        if step["type"] == "Split":
            return step["pattern"].get("Regex") in SPLITS_AT_WORDS and step["behavior"] == "Isolated" and not step["invert"]
    return False


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

    if not separable(backend):
        return whole
    return by_pieces(backend, by_words(whole) if cuts_at_words(backend) else whole)


def by_words(whole: Encode) -> Encode:
    """`whole`, one word at a time."""
    word = lru_cache(maxsize=WORDS)(whole)

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for part in WORD.findall(text):
            ids += word(part)
        return ids

    return encode


def by_pieces(backend: Any, whole: Encode) -> Encode:
    """`whole`, one part between two added tokens at a time."""
    added = {token.content: number for number, token in backend.get_added_tokens_decoder().items() if not token.normalized}
    piece = lru_cache(maxsize=PIECES)(whole)
    if not added:
        return piece
    # The tokenizer takes the leftmost match, and of those the longest.
    marks = re.compile("(" + "|".join(re.escape(content) for content in sorted(added, key=len, reverse=True)) + ")")

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(marks.split(text)):
            if place % 2:
                ids.append(added[part])
            elif part:
                ids += piece(part)
        return ids

    return encode
