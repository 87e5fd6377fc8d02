"""Keys and values per position for rows of different lengths, rewound by forgetting a length.

Slot = position: row `b` holds positions `0 … lengths[b] - 1` in its first slots. New tokens are written behind a row's
length, over whatever a rejected draft left there; a mask hides every slot that a query may not see. So a rewind moves no memory.

Letters: `B` rows, `Q` new tokens per row, `S` slots, `m` key-value heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Slots:
    """Where the next tokens go, shared by all layers of a cache: rows `first … first + len(starts) - 1`, `width` tokens from each start on."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.first, self.width = 0, 0
        self.starts: list[int] = [0] * rows
        self._index: dict[int, Tensor] = {}

    @property
    def uniform(self) -> bool:
        """Do all rows start at the same position?"""
        return min(self.starts) == max(self.starts)

    @property
    def end(self) -> int:
        """Slots that the longest row uses after the write."""
        return max(self.starts) + self.width

    def aim(self, starts: Sequence[int], width: int, first: int = 0) -> None:
        """The next write: `width` tokens for each of `len(starts)` rows."""
        self.starts, self.width, self.first = list(starts), width, first
        self._index = {}
        if self.end > self.capacity:
            raise IndexError(f"a row of {self.end} tokens in a cache of {self.capacity}")

    def flat_index(self, heads: int, device: torch.device) -> Tensor:
        """`[B·m·Q]` rows of a `[rows·m·S, d]` view that the write goes to; made once per write, not once per layer."""
        found = self._index.get(heads)
        if found is None:
            starts = torch.tensor(self.starts, device=device)[:, None, None]
            rows = torch.arange(self.first, self.first + len(self.starts), device=device)[:, None, None]
            head = torch.arange(heads, device=device)[None, :, None]
            token = torch.arange(self.width, device=device)[None, None, :]
            found = self._index[heads] = (((rows * heads + head) * self.capacity) + starts + token).reshape(-1)
        return found


class KeyValues:
    """Keys and values of one layer: `[B, m, S, d]` each, allocated at the first write."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write `[B, m, Q, d]` where the slots aim; returns all slots of these rows up to the longest row's end: `[B, m, end, d]`."""
        slots = self.slots
        if self.keys is None or self.values is None:
            # Zeros, not garbage: a hidden slot gets weight 0, and 0 · NaN is NaN.
            self.keys, self.values = (x.new_zeros(slots.rows, x.shape[1], slots.capacity, x.shape[-1]) for x in (keys, values))
        rows = slice(slots.first, slots.first + len(slots.starts))
        for buffer, new in ((self.keys, keys), (self.values, values)):
            if slots.uniform:
                buffer[rows, :, slots.starts[0] : slots.end] = new
            else:
                heads, size = new.shape[1], new.shape[-1]
                buffer.view(-1, size).index_copy_(0, slots.flat_index(heads, new.device), new.reshape(-1, size))
        return self.keys[rows, :, : slots.end], self.values[rows, :, : slots.end]

    def keep(self, index: Tensor) -> None:
        """Go on with these rows alone."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[index], self.values[index]


def visible(starts: Tensor, width: int, end: int) -> Tensor:
    """Causal mask for ragged rows, true where a query may look: `[B, 1, Q, S]` for new tokens at positions `starts[b] …`, `S` = `end`."""
    queries = starts[:, None] + torch.arange(width, device=starts.device)
    return (torch.arange(end, device=starts.device) <= queries[:, :, None])[:, None]


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """`KeyValues` in the shape that transformers' attention layers call."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.store = KeyValues(slots)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.store.write(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.slots.starts[0] + query_length, 0

    def get_seq_length(self) -> int:
        return self.store.slots.starts[0]

    def get_max_length(self) -> int:
        return self.store.slots.capacity


class RaggedCache(Cache):  # type: ignore[misc]
    """A cache of transformers with one length per row.

    Attributes:
        lengths: tokens that each row holds; `aim`, a forward of the model, then `set_lengths`.
    """

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self.slots = Slots(rows, capacity)
        super().__init__(layers=[_Layer(self.slots) for _ in range(layers)])
        self.lengths = [0] * rows

    def keys_values(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """What a row holds in a layer: `[m, length, d]` each."""
        store: KeyValues = self.layers[layer].store
        assert store.keys is not None
        assert store.values is not None
        return store.keys[row, :, : self.lengths[row]], store.values[row, :, : self.lengths[row]]

    def keep(self, index: Tensor) -> None:
        """Go on with these rows alone."""
        for layer in self.layers:
            layer.store.keep(index)
        self.lengths = [self.lengths[row] for row in index.tolist()]
        self.slots.rows = len(self.lengths)
