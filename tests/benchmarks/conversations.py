"""Short conversations, as many as wanted, each different, the same on every run.

python -m tests.benchmarks.conversations 500000 chats.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.paths import REPOSITORY

PROMPTS = REPOSITORY / "data" / "prompts"
ASKED, ANSWERED = (8, 30), (15, 60)
"""Words of a question and of an answer, fewest and most."""
SECOND_TURN = 0.2
"""Share of the conversations that have two turns."""


def words() -> list[str]:
    """What the repository's own prompts are written with, as often as they use it."""
    texts = [turn for file in sorted(PROMPTS.glob("*.jsonl")) for line in file.read_text(encoding="utf-8").splitlines() for turn in json.loads(line)["turns"]]
    return [word for text in texts for word in text.split()]


def conversations(count: int) -> Iterator[dict[str, Any]]:
    """`count` rows with their answers: two or four messages, five kinds."""
    draw, vocabulary = random.Random(0), words()

    def text(length: tuple[int, int]) -> str:
        return " ".join(draw.choices(vocabulary, k=draw.randint(*length)))

    for number in range(count):
        messages = []
        for turn in range(1 + (draw.random() < SECOND_TURN)):
            question = f"{text(ASKED)} ({number})?" if turn == 0 else f"{text(ASKED)}?"
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": f"{text(ANSWERED)}."}]
        yield {"id": f"kind{number % 5}-{number}", "messages": messages}


def write_conversations(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for row in conversations(count):
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_conversations(Path(sys.argv[2]), int(sys.argv[1]))
