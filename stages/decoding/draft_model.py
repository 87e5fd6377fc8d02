"""A small causal language model with the verifier's tokenizer as proposer: `K` forwards of one token, on a cache of its own.

Letters: `B` rows, `W` tokens read at once, `K` drafts, `V` vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.decoding.cached_model import CachedModel, load_model
from stages.decoding.proposer import Batch, DecodingError, Draws, Observed, Proposal, Sampling
from stages.decoding.sampling import distribution, draw


def check_same_tokenizer(verifier: Path, draft: Path, trust_remote_code: bool = False) -> None:
    """Drafts are token ids: both models must mean the same by each of them.

    Raises:
        DecodingError: the directories' tokenizers give some token different ids.
    """
    from transformers import AutoTokenizer

    ours, theirs = (AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code).get_vocab() for path in (verifier, draft))
    if ours != theirs:
        differing = min((token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)), key=lambda token: ours.get(token, len(ours)))
        raise DecodingError(
            f"draft model {draft}: its tokenizer is not the verifier's ({verifier}): "
            f"{differing!r} is {theirs.get(differing, 'unknown')} there and {ours.get(differing, 'unknown')} here"
        )


def load_draft_model(verifier: Path, draft: Path, dtype: torch.dtype, draft_tokens: int, trust_remote_code: bool = False) -> DraftModelProposer:
    """The draft model in directory `draft` for the verifier in directory `verifier`.

    Raises:
        DecodingError: its tokenizer is another one.
    """
    check_same_tokenizer(verifier, draft, trust_remote_code)
    return DraftModelProposer(load_model(draft, dtype, trust_remote_code), draft_tokens)


class DraftModelProposer:
    """See the module. Greedy under greedy, else samples from its own distribution under the same temperature and truncation."""

    name = "draft_model"
    layer_ids: tuple[int, ...] = ()
    head_seconds = 0.0

    def __init__(self, model: Any, draft_tokens: int, vocab_size: int | None = None) -> None:
        """
        Args:
            model: a causal LM of transformers. draft_tokens: `K`.
            vocab_size: the verifier's `V`, to be checked; None: not checked.
        Raises:
            DecodingError: `K` below 1, or another vocabulary.
        """
        if draft_tokens < 1:
            raise DecodingError(f"draft_tokens = {draft_tokens}: a draft model drafts at least 1")
        self.model = CachedModel(model)
        if vocab_size not in (None, self.model.vocab_size):
            raise DecodingError(f"draft model: vocabulary of {self.model.vocab_size} tokens, the verifier's has {vocab_size}")
        self.draft_tokens = draft_tokens
        self._sampling = Sampling()
        self._generator: torch.Generator | None = None
        self._known = torch.zeros(0, 0, dtype=torch.long)
        self._lengths: list[int] = []

    @property
    def device(self) -> torch.device:
        return self.model.device

    def begin(self, rows: int, capacity: int, sampling: Sampling, generator: torch.Generator | None) -> None:
        self.model.begin(rows, capacity)
        self._sampling, self._generator = sampling, generator
        # What stands in the cache, and behind it what the verifier has committed since: `[B, S]`.
        self._known = torch.zeros(rows, capacity, dtype=torch.long, device=self.device)
        self._lengths = [0] * rows

    @torch.inference_mode()
    def observe(self, observed: Observed) -> None:
        """Keep of the cache what the verifier has read too: an accepted draft's keys and values are right already."""
        starts, counts = observed.starts.tolist(), observed.counts.tolist()
        width = observed.tokens.shape[1]
        offsets = torch.arange(width, device=self.device)
        valid = offsets < observed.counts[:, None]
        slots = observed.starts[:, None] + offsets
        # Padding goes to where it is again: a row's own slots behind its count keep what they held.
        slots = slots.clamp(max=self._known.shape[1] - 1)
        held = self._known.gather(1, slots)
        agree = ((held == observed.tokens) & valid).long().cumprod(dim=1).sum(dim=1).tolist()
        self._known.scatter_(1, slots, torch.where(valid, observed.tokens, held))
        cached = self.model.lengths
        self._lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self.model.rewind([min(have, start + same) for have, start, same in zip(cached, starts, agree, strict=True)])
        if not any(starts):
            self.model.read_prompts([self._known[row, :count].tolist() for row, count in enumerate(counts)])

    def _read_from(self, batch: Batch, width: int) -> Tensor:
        """Read the next `width` committed tokens of each row (behind its end: padding); logits `[B, width or 1, V]`."""
        slots = torch.tensor(self.model.lengths, device=self.device)[:, None] + torch.arange(width, device=self.device)
        return self.model.read(batch.tokens.gather(1, slots.clamp(max=batch.tokens.shape[1] - 1))).logits

    def _catch_up(self, batch: Batch) -> Tensor:
        """Read what was committed since, up to the anchor; logits `[B, V]` behind each row's anchor."""
        needed = batch.lengths.tolist()
        most = self.draft_tokens + 1
        # Rounds without drafts leave more than a block unread: never more at once, or a row would run past its cache.
        while any(new - old > most for new, old in zip(needed, self.model.lengths, strict=True)):
            cached = self.model.lengths
            self._read_from(batch, most)
            self.model.rewind([old + most if new - old > most else old for new, old in zip(needed, cached, strict=True)])
        cached = self.model.lengths
        width = max(new - old for new, old in zip(needed, cached, strict=True))
        logits = self._read_from(batch, width)
        self.model.rewind(needed)
        last = torch.tensor([new - old - 1 for new, old in zip(needed, cached, strict=True)], device=self.device)
        return logits[torch.arange(len(last), device=self.device), last]

    @torch.inference_mode()
    def propose(self, batch: Batch, limit: int) -> Proposal:
        # A row that has left the draft model's positions is the verifier's alone; the others' drafts are cut there.
        lengths = (self.model.max_positions + 1 - batch.lengths).clamp(min=0, max=limit)
        steps = int(lengths.max())
        if steps == 0:
            return Proposal(batch.anchors()[:, None].expand(-1, limit), lengths)
        logits = self._catch_up(batch)
        tokens: list[Tensor] = []
        drafted: list[Tensor] = []
        probabilities: list[Tensor] = []
        for step in range(steps):
            if step:
                logits = self.model.read(tokens[-1][:, None]).logits[:, 0]
            if self._sampling.greedy:
                tokens.append(logits.argmax(dim=-1))
                continue
            q = distribution(logits, self._sampling)
            columns = draw(q.probabilities, self._generator)
            tokens.append(q.tokens(columns))
            drafted.append(q.probabilities.gather(1, columns[:, None])[:, 0])
            probabilities.append(q.dense(logits.shape[1]))
        out = torch.stack(tokens, dim=1)
        # The last draft is not in the cache.
        written = torch.cat([batch.anchors()[:, None], out[:, :-1]], dim=1)
        self._known.scatter_(1, (batch.lengths - 1)[:, None] + torch.arange(steps, device=self.device), written)
        draws = None if self._sampling.greedy else Draws(torch.stack(probabilities, dim=1), None, torch.stack(drafted, dim=1))
        return Proposal(out, lengths, draws)

    def keep(self, index: Tensor) -> None:
        self.model.keep(index)
        self._known = self._known[index]
        self._lengths = [self._lengths[row] for row in index.tolist()]

    def positions(self) -> Tensor | None:
        return torch.tensor(self._lengths)

    def counters(self) -> dict[str, int]:
        return {}
