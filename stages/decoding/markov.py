"""The Markov chain of a block, left to right: greedy or sampled, over the whole vocabulary or over the likeliest candidates.

On a CPU the chain is the dear part of a DSpark round: each slot multiplies `W2` `[D, R]`, 50 MB at D = 49,152 and R = 256, by one
vector. With `k` candidates a slot reads only the rows of its `k` likeliest tokens by the backbone's own logits `U`. The
choice is the exact one whenever a token outside cannot overtake: its score is at most `U_(k+1) + ‖f‖ · max ‖W2 row‖`,
and the best candidate's is known. Slots where that inequality proves it are counted as `proved`.

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
            candidates: `k`, greedy only; None: the whole vocabulary. Sampling always takes the whole: q must be known everywhere.
        Raises:
            DecodingError: fewer than one candidate.
        """
        if candidates is not None and candidates < 1:
            raise DecodingError(f"{candidates} candidates of the Markov chain: at least 1")
        self.drafter = drafter
        self.candidates = candidates
        self._slots = self._proved = 0
        head = drafter.markov_head
        self._longest_row = float(head.markov_w2.weight.norm(dim=1).max()) if head is not None and candidates is not None else 0.0

    def counters(self) -> dict[str, int]:
        """Slots drafted with candidates, and those of them that are proved to be the exact choice."""
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
        top = self._top(base) if sampling.greedy and head is not None else None
        tokens_of, probabilities, drafted = [], [], []
        for slot in range(hidden.shape[1]):
            features = None
            if head is not None and state is not None:
                features, state = head.step(previous, hidden[:, slot], state)
            if top is not None and features is not None:
                columns = self._best_candidate(top[0][:, slot], top[1][:, slot], features)
            else:
                logits = base[:, slot] if head is None or features is None else base[:, slot] + head.markov_w2(features)
                if sampling.greedy:
                    columns = logits.argmax(dim=-1)
                else:
                    q = distribution(logits, sampling)
                    chosen = draw(q.probabilities, generator)
                    columns = q.tokens(chosen)
                    drafted.append(q.probabilities.gather(1, chosen[:, None])[:, 0])
                    probabilities.append(q.dense(logits.shape[1]))
            previous = drafter.draft_ids[columns]
            tokens_of.append(previous)
        tokens = torch.stack(tokens_of, dim=1)
        draws = None
        if not sampling.greedy:
            ids = drafter.draft_ids if drafter.config.reduced_vocabulary else None
            draws = Draws(torch.stack(probabilities, dim=1), ids, torch.stack(drafted, dim=1))
        return Drafted(tokens, draws, self._confidence(hidden, tokens, anchors))

    def _top(self, base: Tensor) -> tuple[Tensor, Tensor] | None:
        """The `k + 1` likeliest tokens of every slot: values and columns `[B, K, k + 1]`; None where all are candidates."""
        if self.candidates is None or self.candidates >= base.shape[-1]:
            return None
        values, columns = base.topk(self.candidates + 1, dim=-1)
        return values, columns

    def _best_candidate(self, values: Tensor, columns: Tensor, features: Tensor) -> Tensor:
        """`[B]` best column of the candidates `[B, k + 1]` (the last is the best of the others), given `f` `[B, R]`."""
        head = self.drafter.markov_head
        assert head is not None
        rows = head.markov_w2.weight[columns[:, :-1]]
        scores = values[:, :-1] + torch.bmm(rows, features[:, :, None])[:, :, 0]
        best, place = scores.max(dim=-1)
        bound = values[:, -1] + features.norm(dim=-1) * self._longest_row
        self._slots += len(best)
        self._proved += int((best >= bound).sum())
        return columns.gather(1, place[:, None])[:, 0]

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
