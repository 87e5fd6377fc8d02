"""DSpark and DFlash as proposers: a block of drafts from one forward, on cached keys and values of the context.

What `stages.drafters.draft.greedy_drafts` computes from all hidden states anew, this computes round by round: each context
position goes through `fc` and the layers' key and value projections once. The block's own keys and values are
written behind the context, where the next round's context overwrites them.

Letters as in stages/drafters/layers.py; `B` rows, `I` inputs of a block, `N` new context tokens per row, `K` drafts, `D` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.decoding.kv_cache import KeyValues, Slots
from stages.decoding.markov import Chain
from stages.decoding.proposer import Batch, DecodingError, Observed, Proposal, Sampling
from stages.decoding.timing import now
from stages.drafters.layers import Layer, rotate
from stages.drafters.model import Drafter


def per_row(x: Tensor, width: int) -> Tensor:
    """`[B·width, heads, d]` → `[B, heads, width, d]`."""
    return x.view(-1, width, *x.shape[1:]).transpose(1, 2)


def runs(pending: Sequence[Observed]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """What can be read in one go: starts `[B]`, and hidden states `[B, N, L·H]` one behind another. Only the last of them may be padded."""
    starts: Tensor | None = None
    parts: list[Tensor] = []
    for observed in pending:
        assert observed.states is not None
        width = int(observed.counts.max())
        starts = observed.starts if starts is None else starts
        parts.append(observed.states[:, :width])
        if int(observed.counts.min()) < width:
            yield starts, parts
            starts, parts = None, []
    if starts is not None:
        yield starts, parts


class BlockProposer:
    """A trained `Drafter`, one block per round. Always feeds the whole trained block and uses its first `K` drafts."""

    def __init__(self, drafter: Drafter, draft_tokens: int | None = None, candidates: int | None = None) -> None:
        """
        Args:
            draft_tokens: `K`; None: all of the trained block.
            candidates: draft among so many of the likeliest tokens before the Markov bias (`stages.decoding.markov`); None: all, exact.
        Raises:
            DecodingError: more drafts than the drafter was trained for.
        """
        config = drafter.config
        trained = config.draft_tokens
        if draft_tokens is not None and not 1 <= draft_tokens <= trained:
            raise DecodingError(f"{draft_tokens} draft tokens: the drafter was trained for 1 to {trained} (block_size {config.block_size})")
        self.drafter = drafter
        self.config = config
        self.layers = [cast(Layer, layer) for layer in drafter.layers]
        self.chain = Chain(drafter, candidates)
        self._draft_tokens = draft_tokens or trained
        self._seconds = 0.0
        self._begin(0, 0)
        self._sampling = Sampling()
        self._generator: torch.Generator | None = None

    @property
    def name(self) -> str:
        return self.config.exported_algorithm

    @property
    def draft_tokens(self) -> int:
        return self._draft_tokens

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self.config.layer_ids)

    @property
    def head_seconds(self) -> float:
        return self._seconds

    def _begin(self, rows: int, capacity: int) -> None:
        self._slots = Slots(rows, capacity)
        self._stores = [KeyValues(self._slots) for _ in self.layers]
        self._lengths = [0] * rows
        self._pending: list[Observed] = []

    def begin(self, rows: int, capacity: int, sampling: Sampling, generator: torch.Generator | None) -> None:
        """See `Proposer`. A block reaches one slot behind the last draft it is used for."""
        self._begin(rows, capacity + self.config.block_size)
        self._sampling, self._generator = sampling, generator

    def observe(self, observed: Observed) -> None:
        self._lengths = (observed.starts + observed.counts).tolist()
        self._pending.append(observed)
        if not bool(observed.starts.any()):
            self._read_context()

    @torch.inference_mode()
    def _read_context(self) -> None:
        """Project what was observed since the last block into every layer's keys and values."""
        drafter = self.drafter
        for starts, parts in runs(self._pending):
            states = torch.cat(parts, dim=1).to(drafter.fc.weight.dtype)
            width = states.shape[1]
            context = drafter.hidden_norm(drafter.fc(states)).flatten(0, 1)
            self._slots.aim(starts.tolist(), width)
            cos, sin = drafter._rope((starts[:, None] + torch.arange(width, device=states.device)).flatten())
            for layer, store in zip(self.layers, self._stores, strict=True):
                keys, values = layer.self_attn.keys_values(context, cos, sin)
                store.write(per_row(keys, width), per_row(values, width))
        self._pending = []

    def _hidden(self, anchors: Tensor, positions: Tensor) -> Tensor:
        """Normed output of the predicting slots, `[B, K, H]`, of blocks with `anchors` `[B]` at `positions` `[B]`."""
        drafter, config = self.drafter, self.config
        rows, width = len(anchors), config.block_size
        inputs = torch.full((rows, width), config.mask_token_id, device=anchors.device)
        inputs[:, 0] = anchors
        block = drafter.embedding[inputs].to(drafter.fc.weight.dtype)
        self._slots.aim(positions.tolist(), width)
        cos, sin = drafter._rope((positions[:, None] + torch.arange(width, device=anchors.device)).flatten())
        mask = None
        if not self._slots.uniform:
            # A block sees its whole row: the context before the anchor, and itself in both directions.
            mask = (torch.arange(self._slots.end, device=anchors.device) < positions[:, None] + width)[:, None, None]
        for layer, store in zip(self.layers, self._stores, strict=True):
            attention = layer.self_attn
            normed = layer.input_layernorm(block).flatten(0, 1)
            queries = rotate(attention.q_norm(attention.q_proj(normed).view(-1, attention.n, attention.d)), cos, sin)
            new_keys, new_values = attention.keys_values(normed, cos, sin)
            keys, values = store.write(per_row(new_keys, width), per_row(new_values, width))
            mixed = F.scaled_dot_product_attention(per_row(queries, width), keys, values, mask, enable_gqa=True)
            block = block + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            block = block + layer.mlp(layer.post_attention_layernorm(block))
        out: Tensor = drafter.norm(block if config.sample_from_anchor else block[:, 1:])
        return out

    @torch.inference_mode()
    def propose(self, batch: Batch, limit: int) -> Proposal:
        self._read_context()
        anchors, positions = batch.anchors(), batch.lengths - 1
        # A block must lie within the positions that the drafter knows; a row that has left them is the verifier's alone.
        fits = positions + self.config.block_size <= self.config.max_position_embeddings
        lengths = torch.where(fits, limit, 0)
        if not bool(fits.any()):
            return Proposal(anchors[:, None].expand(-1, limit), lengths)
        hidden = self._hidden(anchors, positions)[:, :limit]
        base = hidden @ self.drafter.head.to(hidden.dtype).T
        started = now(anchors.device)
        drafts = self.chain.draft(hidden, base, anchors, self._sampling, self._generator)
        self._seconds += now(anchors.device) - started if self.drafter.markov_head is not None else 0.0
        return Proposal(drafts.tokens, lengths, drafts.draws, drafts.confidence)

    def keep(self, index: Tensor) -> None:
        for store in self._stores:
            store.keep(index)
        rows = index.tolist()
        self._slots.rows = len(rows)
        self._lengths = [self._lengths[row] for row in rows]
        self._pending = [
            Observed(seen.tokens[index], seen.starts[index], seen.counts[index], None if seen.states is None else seen.states[index]) for seen in self._pending
        ]

    def positions(self) -> Tensor | None:
        return torch.tensor(self._lengths)

    def counters(self) -> dict[str, int]:
        return self.chain.counters()
