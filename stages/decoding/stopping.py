"""Where an output ends: end tokens, stop strings across tokens, a limit of tokens; all of them also inside a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stages.decoding.proposer import DecodingError

Decode = Callable[[list[int]], str]
"""Token ids to text."""


@dataclass(frozen=True)
class Prompt:
    """One request, as token ids.

    Attributes:
        stop_token_ids: end the output like the model's own EOS ids. stop_strings: end it with the token that completes one of them.
        ignore_eos: the model's own EOS ids end nothing.
    """

    id: str
    token_ids: list[int]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


def check_prompts(prompts: Sequence[Prompt], vocab_size: int, max_length: int, can_decode: bool) -> None:
    """Refuse what cannot be decoded, before anything is.

    Raises:
        DecodingError: an empty or too long prompt, an unknown token, no token to decode, stop strings without a tokenizer.
    """
    for prompt in prompts:
        if not prompt.token_ids:
            raise DecodingError(f"prompt {prompt.id}: it has no tokens")
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocab_size:
            raise DecodingError(f"prompt {prompt.id}: token ids must lie in 0 to {vocab_size - 1}")
        if len(prompt.token_ids) >= max_length:
            raise DecodingError(f"prompt {prompt.id}: {len(prompt.token_ids)} tokens; the verifier's {max_length} positions hold one token less")
        if prompt.max_tokens < 1:
            raise DecodingError(f"prompt {prompt.id}: max_tokens = {prompt.max_tokens}; at least 1")
        if prompt.stop_strings and (not can_decode or not all(prompt.stop_strings)):
            raise DecodingError(f"prompt {prompt.id}: stop strings must not be empty, and need the verifier's tokenizer")


class Stopper:
    """When one output ends."""

    def __init__(self, prompt: Prompt, eos_ids: Sequence[int], max_length: int, decode: Decode | None) -> None:
        """
        Args:
            eos_ids: the model's own. max_length: longest sequence, prompt included.
            decode: needed for stop strings.
        """
        self.end_ids = frozenset(prompt.stop_token_ids) | (frozenset() if prompt.ignore_eos else frozenset(eos_ids))
        self.limit = min(prompt.max_tokens, max_length - len(prompt.token_ids))
        self.strings = prompt.stop_strings
        self._decode = decode

    def cut(self, output: list[int], new: list[int]) -> tuple[int, str | None]:
        """How many of `new` tokens still belong to the output after `output`.

        Returns:
            The count, the token that ends it included, and why it ended: "stop", "length" or None where it goes on.
        """
        new = new[: self.limit - len(output)]
        count, reason = len(new), None
        if not self.end_ids.isdisjoint(new):
            count = next(place for place, token in enumerate(new) if token in self.end_ids) + 1
            reason = "stop"
        if self.strings and self._decode is not None:
            completed = self._string_end(output, new[:count])
            if completed is not None:
                count, reason = completed, "stop"
        if reason is None and len(output) + count >= self.limit:
            reason = "length"
        return count, reason

    def _string_end(self, output: list[int], new: list[int]) -> int | None:
        """After how many of `new` tokens a stop string stands complete in the text."""
        assert self._decode is not None
        if not self._holds(output + new):
            return None
        return next(count for count in range(1, len(new) + 1) if self._holds(output + new[:count]))

    def _holds(self, tokens: list[int]) -> bool:
        assert self._decode is not None
        text = self._decode(tokens)
        return any(string in text for string in self.strings)


def visible_text(text: str, stop_strings: Sequence[str]) -> str:
    """What a user sees of an output: the text before the first stop string."""
    ends = [place for place in (text.find(string) for string in stop_strings) if place >= 0]
    return text[: min(ends)] if ends else text


def eos_ids(model: Any) -> tuple[int, ...]:
    """All end-of-sequence ids of a model of transformers: those of its generation config, else those of its config."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()
