"""Propose, verify, commit: the decoding loop over a verifier and any proposer.

    decoder = Decoder(load_model(verifier, torch.float32), proposer, Sampling(), decode=tokenizer.decode)
    completions = decoder.decode([Prompt("a", [1, 2, 3], max_tokens=64)], batch_size=4)
    decoder.seconds.overhead                                 # share of a round that is neither model's

Without a proposer it is the verifier alone, by the same code: what speculation is compared with. Greedy output is token for
token the verifier's; sampled output has the verifier's distribution (`stages.decoding.sampling`). Which rows stand in a batch
changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from stages.decoding.cached_model import CachedModel
from stages.decoding.engine import Completion, Round
from stages.decoding.proposer import Batch, DecodingError, Observed, Offer, PositionError, Proposal, Proposer, Sampling, Scheduler
from stages.decoding.sampling import verify_greedy, verify_sampled
from stages.decoding.stopping import Decode, Prompt, Stopper, check_prompts, eos_ids
from stages.decoding.timing import Seconds, Stopwatch


@dataclass
class _Row:
    """One sequence that is being decoded."""

    index: int
    prompt: Prompt
    stopper: Stopper
    output: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    reason: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.output)

    def commit(self, new: list[int], drafted: list[int] | None, accepted: int) -> int:
        """Book what a pass chose; returns how many tokens of it belong to the output. `drafted` is None for the pass that reads the prompt."""
        count, self.reason = self.stopper.cut(self.output, new)
        if drafted is not None:
            self.rounds.append(Round(self.length, drafted, min(accepted, count), count))
        self.output.extend(new[:count])
        return count


class Decoder:
    """A verifier with its proposer and scheduler. `seconds` adds up over calls; replace it with a new `Seconds()` to start again."""

    def __init__(
        self,
        model: Any,
        proposer: Proposer | None = None,
        sampling: Sampling | None = None,
        *,
        scheduler: Scheduler | None = None,
        max_length: int | None = None,
        seed: int = 0,
        decode: Decode | None = None,
    ) -> None:
        """
        Args:
            model: the verifier, a causal LM of transformers (`stages.decoding.cached_model.load_model`).
            proposer: None: the verifier alone. scheduler: None: whatever is drafted is verified.
            max_length: longest sequence, tokens; None: the model's own limit.
            seed: of all sampling; two equal calls of a new decoder give equal outputs.
            decode: the verifier's tokenizer, token ids to text; needed for stop strings alone.
        """
        self.verifier = CachedModel(model, proposer.layer_ids if proposer is not None else ())
        self.proposer, self.scheduler = proposer, scheduler
        self.sampling = sampling or Sampling()
        self.max_length = min(max_length or self.verifier.max_positions, self.verifier.max_positions)
        self.eos_ids = eos_ids(model)
        self.decode_text = decode
        self.seconds = Seconds()
        self.generator = torch.Generator(self.verifier.device).manual_seed(seed)

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Prompt], batch_size: int = 1, desc: str | None = None) -> list[Completion]:
        """Decode all prompts, `batch_size` of them at a time, in their order.

        Args:
            desc: name of the progress bar on stderr; None: no bar.
        Returns:
            One completion per prompt, in the order of `prompts`.
        Raises:
            DecodingError: a prompt that cannot be decoded; raised before anything is.
        """
        check_prompts(prompts, self.verifier.vocab_size, self.max_length, self.decode_text is not None)
        done: list[Completion] = []
        with tqdm(total=len(prompts), desc=desc, unit="prompt", disable=desc is None) as bar:
            for start in range(0, len(prompts), batch_size):
                group = list(prompts[start : start + batch_size])
                done.extend(_Run(self, group).finish())
                bar.update(len(group))
        return done


class _Run:
    """One batch, from its prompts to the end of its last row."""

    def __init__(self, decoder: Decoder, prompts: list[Prompt]) -> None:
        self.verifier, self.proposer, self.scheduler = decoder.verifier, decoder.proposer, decoder.scheduler
        self.sampling, self.generator = decoder.sampling, None if decoder.sampling.greedy else decoder.generator
        self.max_length = decoder.max_length
        self.watch = Stopwatch(decoder.seconds, self.verifier.device)
        self.rows = [_Row(index, prompt, Stopper(prompt, decoder.eos_ids, decoder.max_length, decoder.decode_text)) for index, prompt in enumerate(prompts)]
        self.done: list[_Row] = []
        drafts = self.proposer.draft_tokens if self.proposer is not None else 0
        capacity = max(len(row.prompt.token_ids) + row.stopper.limit for row in self.rows) + drafts + 1
        device = self.verifier.device
        self.tokens = torch.zeros(len(self.rows), capacity, dtype=torch.long, device=device)
        self.lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device)
        with self.watch.part("prompts"):
            self._read_prompts(capacity)

    def _read_prompts(self, capacity: int) -> None:
        """Both models read the prompts, and the verifier commits the first token of each."""
        prompts = [row.prompt.token_ids for row in self.rows]
        self.verifier.begin(len(prompts), capacity)
        read = self.verifier.read_prompts(prompts)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        if self.proposer is not None:
            self.proposer.begin(len(prompts), capacity, self.sampling, self.generator)
            longest = max(map(len, prompts))
            self.proposer.observe(Observed(self.tokens[:, :longest], torch.zeros_like(self.lengths), self.lengths.clone(), read.states))
        nothing = torch.zeros_like(self.lengths)
        _, chosen = self._choose(read.logits, None, nothing)
        self._commit(chosen, nothing, None)

    def _choose(self, logits: Tensor, proposal: Proposal | None, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """accepted `[B]` and committed tokens `[B, W + 1]` of logits `[B, W + 1, V]`."""
        if self.sampling.greedy:
            return verify_greedy(logits, proposal, lengths)
        empty = Proposal(torch.zeros(len(logits), 0, dtype=torch.long, device=logits.device), lengths)
        return verify_sampled(logits, proposal or empty, lengths, self.sampling, self.generator)

    def _propose(self) -> tuple[Proposal | None, Tensor]:
        """Drafts, and how many of each row's are verified: `[B]`."""
        nothing = torch.zeros_like(self.lengths)
        if self.proposer is None:
            return None, nothing
        limit = self.proposer.draft_tokens
        if self.scheduler is not None:
            limit = min(limit, self.scheduler.limit(self.lengths, limit))
        # A block is cut where it, and the token that the verifier adds to it, would pass the longest sequence.
        room = (self.max_length - 1 - self.lengths).clamp_(min=0)
        if limit < 1 or int(room.max()) < 1:
            return None, nothing
        before = self.proposer.head_seconds
        with self.watch.part("drafter"):
            proposal = self.proposer.propose(Batch(self.tokens, self.lengths), limit)
        self.watch.seconds.head += self.proposer.head_seconds - before
        available = torch.minimum(proposal.lengths, room)
        if self.scheduler is None:
            return proposal, available
        lengths = self.scheduler.lengths(Offer(available, proposal.confidence, self.lengths))
        if bool((lengths < 0).any() or (lengths > available).any()):
            raise DecodingError(f"verify lengths {lengths.tolist()} of {available.tolist()} drafts")
        return proposal, lengths

    def _commit(self, chosen: Tensor, accepted: Tensor, drafted: list[list[int]] | None) -> None:
        """Append what was chosen, row by row up to its end; `drafted` as `_Row.commit` takes it."""
        per_row = drafted if drafted is not None else [None] * len(self.rows)
        table = zip(self.rows, chosen.tolist(), accepted.tolist(), per_row, strict=True)
        counts = [row.commit(new[: count + 1], drafts, count) for row, new, count, drafts in table]
        # Where a row ends early the tokens behind its end are written too; nobody reads behind a length.
        slots = self.lengths[:, None] + torch.arange(chosen.shape[1], device=chosen.device)
        self.tokens.scatter_(1, slots, chosen)
        self.lengths = self.lengths + torch.tensor(counts, device=chosen.device)

    def _round(self) -> None:
        """One verify pass over every row."""
        proposal, lengths = self._propose()
        width = int(lengths.max())
        starts = self.lengths - 1
        anchors = Batch(self.tokens, self.lengths).anchors()[:, None]
        drafts = proposal.tokens[:, :width] if proposal is not None else anchors[:, :0]
        with self.watch.part("verifier"):
            read = self.verifier.read(torch.cat([anchors, drafts], dim=1))
        accepted, chosen = self._choose(read.logits, proposal, lengths)
        self._commit(chosen, accepted, [tokens[:length] for tokens, length in zip(drafts.tolist(), lengths.tolist(), strict=True)])
        # What was verified up to the last accepted draft is right, whether or not an end cuts the output before it.
        counts = accepted + 1
        self.verifier.rewind((starts + counts).tolist())
        if self.proposer is not None:
            with self.watch.part("drafter"):
                self.proposer.observe(Observed(torch.cat([anchors, chosen[:, :width]], dim=1), starts, counts, read.states))
        self._drop_finished()
        self._check_positions()

    def _drop_finished(self) -> None:
        """Rows that have ended leave the batch."""
        if not any(row.reason for row in self.rows):
            return
        going_on = [place for place, row in enumerate(self.rows) if row.reason is None]
        self.done += [row for row in self.rows if row.reason is not None]
        self.rows = [self.rows[place] for place in going_on]
        if not self.rows:
            return
        index = torch.tensor(going_on, device=self.lengths.device)
        self.tokens, self.lengths = self.tokens[index], self.lengths[index]
        self.verifier.keep(index)
        if self.proposer is not None:
            self.proposer.keep(index)

    def _check_positions(self) -> None:
        """Both models must have read the same tokens: all but the anchor of each row.

        Raises:
            PositionError: they have not.
        """
        expected = [row.length - 1 for row in self.rows]
        positions = self.proposer.positions() if self.proposer is not None else None
        drafter = expected if positions is None else positions.tolist()
        if self.rows and not expected == self.verifier.lengths == drafter:
            raise PositionError(f"before the anchors lie {expected} tokens; the verifier holds {self.verifier.lengths}, the drafter {drafter}")

    def finish(self) -> list[Completion]:
        """Rounds until every row has ended."""
        self._drop_finished()
        self._check_positions()
        while self.rows:
            with self.watch.round():
                self._round()
        rows = sorted(self.done, key=lambda row: row.index)
        return [Completion(row.prompt.id, row.output, row.reason or "length", row.rounds) for row in rows]
