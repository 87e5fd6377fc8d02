"""The producing end of a transport: publishes samples within a budget, and frees what nobody came for.

It is the reaper too: an object unread for `ttl_seconds` is removed when, and only when, its room is needed. Until then, at
the budget, publishing waits; the writer's queue fills and the engine stands still. After `wait_seconds` the sample is
refused in so many words: whoever asked for it has given up on this attempt by then, and will ask again.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from stages.hidden_states.envelope import DATA, MANIFEST, Manifest, Origin, Producer, Refusal, pack, to_bytes
from stages.hidden_states.stores import Held, Store, StoreError, StoreFullError

POLL_SECONDS = 0.01


def usable_bytes(budget: int) -> int:
    """What of a budget samples may fill: the rest is for marks, so that a full store can still say that it is full."""
    return budget - min(1 << 16, budget // 16)


def budget_for(needed: int) -> int:
    """The smallest budget of which samples may fill `needed` bytes."""
    return needed + min(1 << 16, max(0, needed - 1) // 15)


@dataclass(frozen=True)
class Limits:
    """`budget_bytes`: of all objects held (None: no limit); `ttl_seconds`, `wait_seconds`: see the module."""

    budget_bytes: int | None = None
    ttl_seconds: float = float("inf")
    wait_seconds: float = 0.0


class Publisher:
    """A `Sink` (see `writer.py`) over a store. Called from one thread."""

    def __init__(self, store: Store, origin: Origin, limits: Limits) -> None:
        self.store = store
        self.origin = origin
        self.limits = limits
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.published = self.evicted = self.refused = 0

    @property
    def _producer(self) -> Producer:
        return Producer(name=self.name, published=self.published, evicted=self.evicted, refused=self.refused)

    def put(self, key: str, states: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Publish a sample: data first, manifest last.

        Raises:
            StoreFullError: no room for `wait_seconds`.
            StoreError: the store cannot be reached.
        """
        self.published += 1
        parts, manifest = pack(key, states, token_ids, self.origin, self._producer)
        raw = to_bytes(manifest)
        deadline = time.monotonic() + self.limits.wait_seconds
        while True:
            full = self._try_put(key, parts, raw)
            if full is None:
                return
            if time.monotonic() >= deadline:
                self.published -= 1
                raise full
            time.sleep(POLL_SECONDS)

    def _try_put(self, key: str, parts: list[torch.Tensor], raw: torch.Tensor) -> StoreFullError | None:
        """Publish if there is room now; else what is in the way."""
        needed = sum(len(part) for part in parts) + len(raw)
        with self.store.exclusive():
            if full := self._make_room(needed):
                return full
            try:
                self.store.write(f"{key}{DATA}", parts)
                self.store.write(f"{key}{MANIFEST}", [raw])
            except StoreError as error:
                with suppress(StoreError):
                    self.store.remove(f"{key}{DATA}")
                if not isinstance(error, StoreFullError):
                    raise
                # The store's own limit lies below the budget (a full file system): expired objects are in the way here too.
                self._reap(self.store.held(), needed)
                return error
        return None

    def _make_room(self, needed: int) -> StoreFullError | None:
        budget = self.limits.budget_bytes
        if budget is None:
            return None
        held = self.store.held()
        used = sum(item.bytes for item in held.values())
        room = usable_bytes(budget)
        if used + needed > room:
            used -= self._reap(held, used + needed - room)
        if used + needed <= room:
            return None
        return StoreFullError(
            f"the store is full: {used} bytes of {len(held)} objects that nobody has read yet, {needed} more do not fit extraction.budget_bytes = {budget}"
            + (f", the oldest may be removed in {self.limits.ttl_seconds - max(item.age for item in held.values()):.0f} s" if held else "")
        )

    def _reap(self, held: dict[str, Held], needed: int) -> int:
        """Remove expired objects, the oldest first, until `needed` bytes are free; returns the bytes freed."""
        freed = 0
        for name, item in sorted(held.items(), key=lambda entry: -entry[1].age):
            if freed >= needed or item.age < self.limits.ttl_seconds:
                break
            if name.endswith(MANIFEST) and f"{name.removesuffix(MANIFEST)}{DATA}" in held:
                continue  # goes with its data
            self.store.remove(name)
            freed += item.bytes
            if name.endswith(DATA):
                self.evicted += 1
                key = name.removesuffix(DATA)
                if (manifest := held.get(f"{key}{MANIFEST}")) is not None:
                    freed += manifest.bytes
                # A late reader learns that it is gone, instead of waiting for it.
                freed -= self._mark(key, Refusal(reason=f"unread for {item.age:.0f} s, removed to make room", again=True))
        return freed

    def refuse(self, key: str, reason: str, number: int | None = None, again: bool = False) -> None:
        """Publish that there will be no such sample."""
        self.refused += 1
        self._mark(key, Refusal(reason=reason, number=number, again=again))

    def _mark(self, key: str, refusal: Refusal) -> int:
        """Put a refusal in the place of a manifest; returns its bytes. Best effort: a reader that finds neither gives up after its own time."""
        raw = to_bytes(Manifest(key=key, producer=self._producer, refusal=refusal))
        with suppress(StoreError):
            self.store.remove(f"{key}{MANIFEST}")
            budget = self.limits.budget_bytes
            if budget is None or sum(item.bytes for item in self.store.held().values()) + len(raw) <= budget:
                try:
                    self.store.write(f"{key}{MANIFEST}", [raw])
                    return len(raw)
                except StoreFullError:
                    self.store.write(f"{key}{MANIFEST}", [])  # a name takes no room
        return 0

    def close(self) -> None:
        self.store.close()
