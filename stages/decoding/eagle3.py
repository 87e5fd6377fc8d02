"""EAGLE-3 as proposer: token by token on its own cached keys and values.

What `stages.drafters.eagle3.greedy_chains` computes from all hidden states anew, this computes round by round. Row j holds the
verifier's states of position j and the embedding of token j + 1, so the row of the newest state waits for the anchor. The rows of
drafts lie behind it, where the next round's true rows overwrite them.

Letters: `B` rows, `N` new positions per row, `K` drafts, `D` draft vocabulary, `H` hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.decoding.blocks import per_row
from stages.decoding.kv_cache import KeyValues, Slots, visible
from stages.decoding.proposer import Batch, DecodingError, Draws, Observed, Proposal, Sampling
from stages.decoding.sampling import distribution, draw
from stages.drafters.eagle3 import Eagle3


class Eagle3Proposer:
    """A trained `Eagle3`. `draft_tokens` may be more than it was trained to unroll: a chain has no end of its own."""

    name = "eagle3"
    head_seconds = 0.0

    def __init__(self, drafter: Eagle3, draft_tokens: int | None = None) -> None:
        """
        Args:
            draft_tokens: `K`; None: what it was trained for.
        Raises:
            DecodingError: `K` below 1.
        """
        if draft_tokens is not None and draft_tokens < 1:
            raise DecodingError(f"{draft_tokens} draft tokens: EAGLE-3 drafts at least 1")
        self.drafter = drafter
        self.config = drafter.config
        self.draft_tokens = draft_tokens or drafter.config.draft_tokens
        self._sampling = Sampling()
        self._generator: torch.Generator | None = None
        self._begin(0, 0)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self.config.layer_ids)

    def _begin(self, rows: int, capacity: int) -> None:
        self._slots = Slots(rows, capacity)
        self._store = KeyValues(self._slots)
        self._lengths = [0] * rows
        self._pending: list[Observed] = []
        # Fused states of each row's newest position, `[B, H]`.
        self._newest = torch.zeros(rows, self.config.hidden_size)

    def begin(self, rows: int, capacity: int, sampling: Sampling, generator: torch.Generator | None) -> None:
        """See `Proposer`. Padding of a round's reading reaches up to a block behind the longest row."""
        self._begin(rows, capacity + self.draft_tokens + 1)
        self._sampling, self._generator = sampling, generator

    def observe(self, observed: Observed) -> None:
        self._lengths = (observed.starts + observed.counts).tolist()
        self._pending.append(observed)
        if not bool(observed.starts.any()):
            self._read()

    @torch.inference_mode()
    def _read(self) -> None:
        """Write the rows of what was observed since the last draft, but for the newest position's of each."""
        layer = self.drafter.layer
        for observed in self._pending:
            assert observed.states is not None
            width = int(observed.counts.max())
            fused = self.drafter.fc(observed.states[:, :width].to(self.drafter.fc.weight.dtype))
            newest = fused[torch.arange(len(fused)), observed.counts - 1]
            # Row by row one position behind: states of the position before, token of this one.
            hidden = torch.cat([self._newest[:, None].to(fused.dtype), fused[:, :-1]], dim=1)
            tokens, first = observed.tokens[:, :width], observed.starts - 1
            self._newest = newest
            if not bool(observed.starts.any()):
                # Nothing stands before a prompt's first token.
                hidden, tokens, first = hidden[:, 1:], tokens[:, 1:], observed.starts
            if tokens.shape[1] == 0:
                continue
            x, _ = layer.join(self.drafter.embedding[tokens].to(hidden.dtype).flatten(0, 1), hidden.flatten(0, 1))
            self._write(x, first, tokens.shape[1])
        self._pending = []

    def _write(self, x: Tensor, first: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the inputs `x` `[B·width, 2H]` at positions `first` `[B]` …; all of the rows' slots, `[B, m, S, d]` each."""
        self._slots.aim(first.tolist(), width)
        rope = self.drafter.rope((first[:, None] + torch.arange(width, device=x.device)).flatten())
        keys, values = self.drafter.layer.self_attn.keys_values(x, rope)
        return self._store.write(per_row(keys, width), per_row(values, width))

    def _step(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """One row of each sequence: tokens `[B]` and hidden states `[B, H]` at positions `[B]` → the layer's output `[B, H]`."""
        layer = self.drafter.layer
        x, residual = layer.join(self.drafter.embedding[tokens].to(hidden.dtype), hidden)
        keys, values = self._write(x, positions, 1)
        queries = per_row(layer.self_attn.queries(x, self.drafter.rope(positions)), 1)
        mask = None if self._slots.uniform else visible(positions, 1, self._slots.end)
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
        return layer.finish(residual, mixed.transpose(1, 2).flatten(1))

    @torch.inference_mode()
    def propose(self, batch: Batch, limit: int) -> Proposal:
        self._read()
        positions = batch.lengths - 2
        # The last draft's row lies at the position before it; a row that has left the drafter's positions is the verifier's alone.
        lengths = torch.where(positions + limit <= self.config.max_position_embeddings, limit, 0)
        previous, hidden = batch.anchors(), self._newest
        if not bool(lengths.any()):
            return Proposal(previous[:, None].expand(-1, limit), lengths)
        tokens: list[Tensor] = []
        probabilities: list[Tensor] = []
        drafted: list[Tensor] = []
        for step in range(limit):
            hidden = self._step(previous, hidden, positions + step)
            normed = self.drafter.norm(hidden)
            logits = normed @ self.drafter.head.to(normed.dtype).T
            if self._sampling.greedy:
                columns = logits.argmax(dim=-1)
            else:
                q = distribution(logits, self._sampling)
                chosen = draw(q.probabilities, self._generator)
                columns = q.tokens(chosen)
                drafted.append(q.probabilities.gather(1, chosen[:, None])[:, 0])
                probabilities.append(q.dense(logits.shape[1]))
            previous = self.drafter.draft_ids[columns]
            tokens.append(previous)
        draws = None
        if not self._sampling.greedy:
            ids = self.drafter.draft_ids if self.config.reduced_vocabulary else None
            draws = Draws(torch.stack(probabilities, dim=1), ids, torch.stack(drafted, dim=1))
        return Proposal(torch.stack(tokens, dim=1), lengths, draws)

    def keep(self, index: Tensor) -> None:
        self._store.keep(index)
        rows = index.tolist()
        self._slots.rows = len(rows)
        self._lengths = [self._lengths[row] for row in rows]
        self._newest = self._newest[index]
        self._pending = [
            Observed(seen.tokens[index], seen.starts[index], seen.counts[index], None if seen.states is None else seen.states[index]) for seen in self._pending
        ]

    def positions(self) -> Tensor | None:
        return torch.tensor(self._lengths)

    def counters(self) -> dict[str, int]:
        return {}
