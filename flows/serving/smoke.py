"""Does a pair answer like its verifier alone? A last look before it is served, on a few prompts, one request at a time.

The gate has proven it on many more. Here as there a first difference between two tokens that the verifier holds for nearly equally
likely is rounding, which depends on how many tokens a matrix product has; any other difference is a wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.serving.server import ask

PROMPTS = (
    "Name three fruits and the colour of each.",
    "Write a Python function that returns the sum of two numbers.",
    "What is 17 + 25? Explain each step.",
    "Tell me a very short story about a river.",
)
MAX_TOKENS = 48
ALTERNATIVES = 5


@dataclass(frozen=True)
class Token:
    """A token of an answer: its text, and the likeliest ones of its place with their log probabilities."""

    text: str
    likeliest: dict[str, float]


@dataclass(frozen=True)
class Answer:
    """What the verifier alone says to a prompt."""

    text: str
    tokens: tuple[Token, ...]


def _text(response: dict[str, Any]) -> str:
    return str(response["choices"][0]["message"]["content"] or "")


def reference(url: str, model: str, max_tokens: int) -> list[Answer]:
    """The answers of the verifier alone, with what they nearly were. Raises ServerError."""
    answers = []
    for prompt in PROMPTS:
        response = ask(url, model, prompt, max_tokens, logprobs=True, top_logprobs=ALTERNATIVES)
        content = (response["choices"][0].get("logprobs") or {}).get("content") or []
        tokens = tuple(Token(entry["token"], {other["token"]: other["logprob"] for other in entry["top_logprobs"]}) for entry in content)
        answers.append(Answer(_text(response), tokens))
    return answers


def first_difference(url: str, model: str, max_tokens: int, expected: list[Answer], near_tie: float) -> str | None:
    """Where a pair answers otherwise, in words; None: nowhere. Raises ServerError."""
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        text = _text(ask(url, model, prompt, max_tokens))
        if text != answer.text and not is_near_tie(answer, text, near_tie):
            return f"asked {prompt!r} the verifier alone says {_shown(answer.text)}, the pair says {_shown(text)}"
    return None


def is_near_tie(answer: Answer, text: str, near_tie: float) -> bool:
    """Whether `text` leaves the answer where the verifier holds both ways for nearly equally likely.

    Args:
        near_tie: a difference of log probabilities below this, in nats.
    """
    for token in answer.tokens:
        if token.text and text.startswith(token.text):
            text = text[len(token.text) :]
            continue
        best = token.likeliest.get(token.text)
        others = [logprob for other, logprob in token.likeliest.items() if other and other != token.text and text.startswith(other)]
        return best is not None and bool(others) and best - max(others) < near_tie
    return False


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
