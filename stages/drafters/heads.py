"""Markov and confidence heads of DSpark.

Tensor names follow the speculators checkpoint. `f` below is what `W2` projects to the logit bias of a slot:
`vanilla` f = e, `gated` f = σ(G[h; e]) ⊙ e, `rnn` f = tanh(o) with a state carried over the block, where
e = W1[previous token] and h the slot's backbone output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """Low-rank bias of a slot's logits by the token before it: `W2 · f(W1[x_{k-1}])`."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self, hidden: Tensor) -> Tensor:
        """`[N, R]` zeros, the state before the first slot, for `hidden` `[N, …]`."""
        return hidden.new_zeros(hidden.shape[0], self.rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One slot.

        Args:
            previous: `[N]` ids of the tokens before the slot, verifier vocabulary.
            hidden: `[N, H]`. state: `[N, R]`, used by `rnn` alone.
        Returns:
            `f` `[N, R]` and the next state.
        """
        return self._step(self.markov_w1(previous), hidden, state)

    def _step(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "vanilla":
            return embedded, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, state
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)

    def features(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """All slots of `A` blocks with their true previous tokens: `[A, K, R]`, `[A, K, H]` → `[A, K, R]`.

        The output of slot k of `rnn` comes from the state before k, as `step` gives it.
        """
        if self.kind != "rnn":
            return self._step(embedded, hidden, embedded)[0]
        state = self.initial_state(hidden)
        slots = []
        for k in range(embedded.shape[1]):
            out, state = self._step(embedded[:, k], hidden[:, k], state)
            slots.append(out)
        return torch.stack(slots, dim=1)


class ConfidenceHead(nn.Module):
    """Logit of a slot's survival, given that all slots before it survived."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.proj = nn.Linear(features, 1)

    def forward(self, features: Tensor) -> Tensor:
        """`[…, H]` or `[…, H + R]` → `[…]`."""
        out: Tensor = self.proj(features).squeeze(-1)
        return out
