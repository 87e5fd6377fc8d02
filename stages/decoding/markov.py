"""The Markov chain of a block, left to right: greedy or sampled, over the whole vocabulary or over the likeliest candidates.

On a CPU the chain is the dear part of a DSpark round: each slot multiplies `W2` `[D, R]`, 50 MB at D = 49,152 and R = 256, by one
vector. With `k` candidates a slot reads only the rows of its `k` likeliest tokens by the backbone's own logits `U`.

Greedy. The choice is the exact one whenever no token outside can overtake. With `m` the mean row of W2, the score of one is at
most `U_(k+1) + m·f + ‖f‖ · max ‖W2 row − m‖`; where the best candidate reaches that, the slot is counted as `proved`.
Sampling. Drafts are drawn among the candidates and q says so: a narrower q can cost acceptance, never correctness.

Letters: `B` rows, `K` slots, `D` draft vocabulary, `H` hidden size, `R` Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.decoding.proposer import DecodingError, Draws, Sampling
from stages.decoding.sampling import distribution, draw
from stages.drafters.model import Drafter


@dataclass(frozen=True)
class Drafted:
    """`tokens` `[B, K]` verifier ids; `draws` None under greedy; `confidence` `[B, K]` or None."""

    tokens: Tensor
    draws: Draws | None
    confidence: Tensor | None


class Chain:
    """Drafts from a block's backbone output."""

    def __init__(self, drafter: Drafter, candidates: int | None = None) -> None:
        """
        Args:
            candidates: `k`; None: the whole vocabulary.
        Raises:
            DecodingError: fewer than one candidate.
        """
        if candidates is not None and candidates < 1:
            raise DecodingError(f"{candidates} candidates of the Markov chain: at least 1")
        self.drafter = drafter
        self.candidates = candidates
        self._slots = self._proved = 0
        if candidates is not None and drafter.markov_head is not None:
            rows = drafter.markov_head.markov_w2.weight.detach()
            self._mean_row = rows.mean(dim=0)
            self._longest_row = float((rows - self._mean_row).norm(dim=1).max())

    def counters(self) -> dict[str, int]:
        """Slots drafted with candidates, and those of them whose best candidate is proved to be the best of all tokens."""
        return {} if self.candidates is None else {"markov_slots": self._slots, "markov_slots_proved": self._proved}

    @torch.inference_mode()
    def draft(self, hidden: Tensor, base: Tensor, anchors: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Drafted:
        """
        Args:
            hidden: `[B, K, H]` backbone output. base: `[B, K, D]` its logits `U`. anchors: `[B]` the tokens before the first slot.
        """
        drafter, head = self.drafter, self.drafter.markov_head
        if sampling.greedy and head is None:
            tokens = drafter.draft_ids[base.argmax(dim=-1)]
            return Drafted(tokens, None, self._confidence(hidden, tokens, anchors))
        previous, state = anchors, head.initial_state(hidden) if head is not None else None
        top = self._top(base)
        chain: list[Tensor] = []
        probabilities: list[Tensor] = []
        drafted: list[Tensor] = []
        for slot in range(hidden.shape[1]):
            # Logits `[B, M]` of this slot, and the columns of the draft vocabulary that they belong to (None: all of them).
            logits, columns = base[:, slot], None
            if head is not None and state is not None:
                features, state = head.step(previous, hidden[:, slot], state)
                if top is None:
                    logits = logits + head.markov_w2(features)
                else:
                    logits, columns = self._of_candidates(top[0][:, slot], top[1][:, slot], features)
            if sampling.greedy:
                place = logits.argmax(dim=-1)
            else:
                q = distribution(logits, sampling)
                chosen = draw(q.probabilities, generator)
                drafted.append(q.probabilities.gather(1, chosen[:, None])[:, 0])
                place = q.tokens(chosen)
                dense = q.dense(logits.shape[1])
                probabilities.append(dense if columns is None else dense.new_zeros(base[:, slot].shape).scatter_(1, columns, dense))
            previous = drafter.draft_ids[place if columns is None else columns.gather(1, place[:, None])[:, 0]]
            chain.append(previous)
        tokens = torch.stack(chain, dim=1)
        draws = None
        if not sampling.greedy:
            ids = drafter.draft_ids if drafter.config.reduced_vocabulary else None
            draws = Draws(torch.stack(probabilities, dim=1), ids, torch.stack(drafted, dim=1))
        return Drafted(tokens, draws, self._confidence(hidden, tokens, anchors))

    def _top(self, base: Tensor) -> tuple[Tensor, Tensor] | None:
        """The `k + 1` likeliest tokens of every slot: values and columns `[B, K, k + 1]`; None where all are candidates."""
        if self.candidates is None or self.drafter.markov_head is None or self.candidates >= base.shape[-1]:
            return None
        values, columns = base.topk(self.candidates + 1, dim=-1)
        return values, columns

    def _of_candidates(self, values: Tensor, columns: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and columns `[B, k]` of the candidates, given `f` `[B, R]`; of `k + 1` values the last is the best of the others."""
        head = self.drafter.markov_head
        assert head is not None
        scores = values[:, :-1] + torch.bmm(head.markov_w2.weight[columns[:, :-1]], features[:, :, None])[:, :, 0]
        bound = values[:, -1] + features @ self._mean_row + features.norm(dim=-1) * self._longest_row
        self._slots += len(scores)
        self._proved += int((scores.amax(dim=-1) >= bound).sum())
        return scores, columns[:, :-1]

    def _confidence(self, hidden: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor | None:
        """`[B, K]` survival probabilities, all slots in one product: each depends on the token before it alone."""
        drafter, head = self.drafter, self.drafter.markov_head
        if drafter.confidence_head is None:
            return None
        embedded = None
        if head is not None:
            embedded = head.markov_w1(torch.cat([anchors[:, None], tokens[:, :-1]], dim=1))
        survival = drafter.confidence(hidden, embedded)
        assert survival is not None
        return torch.sigmoid(survival.float())
