"""Which rows are the same, which rows a limit takes, and which split a row belongs to.

Everything is decided from content. A row's *prompt key* is the digest of what the verifier is asked (all messages but
the assistant's), its *content key* that of the whole conversation; both ignore white space at the ends of messages.
The unit of the split is the prompt: rows that ask the same never lie in two splits, whatever their answers are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import floor

from stages.artifacts import digest_json, sha256_bytes
from stages.prepare.rows import Row, Tally

SMALL_KIND = 3
"""Kinds with fewer prompts cannot stand in all three splits; they are split together."""


def _spoken(row: Row, roles_left_out: tuple[str, ...]) -> list[object]:
    return [
        {**message, "content": message["content"].strip() if isinstance(message["content"], str) else None}
        for message in row.messages
        if message["role"] not in roles_left_out or "tool_calls" in message
    ]


def prompt_key(row: Row) -> str:
    """Digest of what the verifier is asked."""
    return digest_json([_spoken(row, ("assistant",)), row.tools])


def content_key(row: Row) -> str:
    """Digest of the whole conversation."""
    return digest_json([_spoken(row, ()), row.tools])


@dataclass(frozen=True)
class KeyedRow:
    """A row, its prompt key, and its rank: a digest of seed and prompt key that orders rows by nothing else."""

    row: Row
    prompt: str
    rank: str


def without_duplicates(rows: Iterable[Row], seed: int, seen: set[str] | None = None, held_out: set[str] | None = None) -> tuple[list[KeyedRow], int]:
    """The first row of each content, in order, and the number of rows left out.

    Args:
        seen: content keys met before; updated.
        held_out: prompt keys that no row may have (those of the evaluation files).
    """
    seen = set() if seen is None else seen
    kept, duplicates = [], 0
    for row in rows:
        prompt, content = prompt_key(row), content_key(row)
        if content in seen or (held_out is not None and prompt in held_out):
            duplicates += 1
            continue
        seen.add(content)
        kept.append(KeyedRow(row, prompt, sha256_bytes(f"{seed}:{prompt}".encode())))
    return kept, duplicates


def with_unique_ids(rows: list[KeyedRow]) -> list[KeyedRow]:
    """Rows whose id an earlier, different row has get `~<digest of the content>` after it."""
    taken: set[str] = set()
    out = []
    for keyed in rows:
        identifier = keyed.row.id
        if identifier in taken:
            identifier = f"{identifier}~{content_key(keyed.row)[:12]}"
        taken.add(identifier)
        out.append(replace(keyed, row=replace(keyed.row, id=identifier)))
    return out


def take(rows: list[KeyedRow], limit: int | None, tally: Tally) -> list[KeyedRow]:
    """At most `limit` rows, evenly over files and, within a file, over kinds; a larger limit takes the same and more."""
    if limit is None or limit >= len(rows):
        return rows
    files: dict[int, dict[str, list[KeyedRow]]] = {}
    for keyed in sorted(rows, key=lambda keyed: keyed.rank):
        files.setdefault(keyed.row.file, {}).setdefault(keyed.row.kind, []).append(keyed)
    in_turn = _alternate([_alternate([kinds[kind] for kind in sorted(kinds)]) for _, kinds in sorted(files.items())])
    taken = {id(keyed) for keyed in in_turn[:limit]}
    for keyed in rows:
        if id(keyed) not in taken:
            tally.beyond_limit += 1
    return [keyed for keyed in rows if id(keyed) in taken]


def _alternate(groups: list[list[KeyedRow]]) -> list[KeyedRow]:
    return [keyed for turn in zip_longest(*groups) for keyed in turn if keyed is not None]


def _count(fraction: float, size: int) -> int:
    """Prompts of a share: rounded, but at least one."""
    return max(1, floor(fraction * size + 0.5)) if fraction > 0 else 0


def assign(kinds: Mapping[str, str], ranks: Mapping[str, str], validation_fraction: float, evaluation_fraction: float) -> dict[str, str]:
    """Prompt key → "train", "validation" or "evaluation".

    Exact counts per kind: each share rounded and at least one prompt, as long as one is left for training. Kinds with
    fewer than three prompts are counted together; where those cannot fill every share either, they all train.
    Within a kind the prompts are ordered by rank: evaluation from the front, validation from the back, so that a
    change of one share does not move the other.

    Args:
        kinds: prompt key → kind.
        ranks: prompt key → rank.
    """
    groups: dict[str | None, list[str]] = {}
    for prompt, kind in kinds.items():
        groups.setdefault(kind, []).append(prompt)
    small = [kind for kind, prompts in groups.items() if len(prompts) < SMALL_KIND]
    together = [prompt for kind in small for prompt in groups.pop(kind)]
    if together:
        groups[None] = together
    splits = dict.fromkeys(kinds, "train")
    shares = (validation_fraction > 0) + (evaluation_fraction > 0)
    for prompts in groups.values():
        if len(prompts) <= shares:
            continue
        prompts.sort(key=lambda prompt: (ranks[prompt], prompt))
        evaluation, validation = _count(evaluation_fraction, len(prompts)), _count(validation_fraction, len(prompts))
        while evaluation + validation >= len(prompts):
            if evaluation >= validation:
                evaluation -= 1
            else:
                validation -= 1
        splits.update(dict.fromkeys(prompts[:evaluation], "evaluation"))
        splits.update(dict.fromkeys(prompts[len(prompts) - validation :], "validation"))
    return splits
