"""Training samples: tokens and masks from `prepare`, hidden states from a dump or a stream, packed into one step's batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from stages.dataset import TokenSample
from stages.drafters.model import Blocks, make_segments
from stages.errors import DraftlineError
from stages.hidden_states.format import UnusableSampleError
from stages.hidden_states.source import States
from stages.pairing.frozen import FrozenVerifier
from stages.train.anchors import choose, generator
from stages.train.losses import Targets, log_normalisers


def choose_draft_vocabulary(samples: Iterable[TokenSample], size: int, vocab_size: int, always: Iterable[int]) -> Tensor:
    """The `size` verifier ids that the drafter can propose, ascending: `[D]` int64.

    Args:
        always: ids that must be in it (EOS), whatever their count.

    The most frequent supervised tokens; ties and the padding of a small data set go to the lower id, so that the
    same data always give the same vocabulary.
    """
    counts: Counter[int] = Counter()
    for sample in samples:
        mask = np.asarray(sample.loss_mask, dtype=bool)
        counts.update(np.asarray(sample.input_ids)[mask].tolist())
    forced = sorted(set(always))[:size]
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    chosen = forced + [token for token in ranked if token not in set(forced)][: size - len(forced)]
    return torch.tensor(sorted(chosen), dtype=torch.int64)


LOG_Z_TOKENS = 1 << 26
"""Log-normalisers that are kept, tokens: 256 MiB. Those of further samples are made anew each time."""


@dataclass
class TrainingSet:
    """One split joined with its hidden states.

    Attributes:
        samples: those with at least one anchor.
        layer_ids: tapped layers of the drafter, some of the extracted ones; None: all.
        first_anchor: earliest position that can be an anchor.
        log_z: per sample id, `[T]` log-normalisers of the verifier over all `V`, made on first use; at most `LOG_Z_TOKENS`.
    """

    samples: list[TokenSample]
    states: States
    frozen: FrozenVerifier
    draft_ids: Tensor | None
    dtype: torch.dtype
    layer_ids: list[int] | None = None
    first_anchor: int = 0
    log_z: dict[str, Tensor] = field(default_factory=dict)
    log_z_tokens: int = 0

    def __post_init__(self) -> None:
        present = set(self.states.ids)
        self.samples = [sample for sample in self.samples if any(sample.loss_mask[1 + self.first_anchor :])]
        if not any(sample.id in present for sample in self.samples):
            raise DraftlineError("outputs/extract: no sample of this split has hidden states and a supervised token; run dvc repro extract")
        extracted = list(self.states.plan.layer_ids[:-1]) if self.layer_ids is not None else []
        self.columns = None if self.layer_ids in (None, extracted) else [extracted.index(layer) for layer in self.layer_ids or []]
        vocab_size = len(self.frozen.embedding)
        self.head = self.frozen.lm_head if self.draft_ids is None else self.frozen.lm_head[self.draft_ids]
        self.head = self.head.to(self.dtype).contiguous()
        self.full_head = self.frozen.lm_head.to(self.dtype) if self.draft_ids is not None else None
        self.draft_index = torch.full((vocab_size,), -1, dtype=torch.int64)
        ids = torch.arange(vocab_size) if self.draft_ids is None else self.draft_ids
        self.draft_index[ids] = torch.arange(len(ids))

    def __len__(self) -> int:
        return len(self.samples)

    def _normalisers(self, sample: TokenSample, states: Tensor) -> Tensor | None:
        """`[T]` log-normalisers where the next token is supervised, 0 elsewhere; None for the full vocabulary.

        Always made over the same rows of a sample, so that a resumed run gets the same bits.
        """
        if self.full_head is None:
            return None
        if sample.id in self.log_z:
            return self.log_z[sample.id]
        rows = torch.from_numpy(np.flatnonzero(np.asarray(sample.loss_mask[1:], dtype=bool)))
        out = torch.zeros(len(states))
        out[rows] = log_normalisers(states[rows], self.full_head)
        if self.log_z_tokens + len(out) <= LOG_Z_TOKENS:
            self.log_z[sample.id] = out
            self.log_z_tokens += len(out)
        return out


@dataclass(frozen=True)
class Batch:
    """One step's input.

    Attributes:
        tokens: the ids of each whole sequence. previous: `[A, K]` the token before each slot, the anchor first.
        slots: `[A, K]` bool: which of the blocks' slots count; targets are of the counted ones.
    """

    blocks: Blocks
    tokens: list[Tensor]
    previous: Tensor
    slots: Tensor
    targets: Targets

    @property
    def positions(self) -> Tensor:
        """`[N]` block position k of each counted slot."""
        return torch.nonzero(self.slots)[:, 1]


def slot_weights(draft_tokens: int, gamma: float) -> Tensor:
    """`[K]` exp(−k/γ)."""
    return torch.exp(-torch.arange(draft_tokens, dtype=torch.float64) / gamma).float()


def make_batch(data: TrainingSet, indices: list[int], anchors_per_sequence: int, draft_tokens: int, gamma: float, key: tuple[object, ...]) -> Batch | None:
    """Pack samples `indices`; `key` seeds the anchors of each together with its id.

    Samples without usable hidden states are left out; None if there are no others.
    """
    contexts, context_positions, anchor_tokens, previous, lengths, all_anchors, sequences = [], [], [], [], [], [], []
    slots, states, normalisers, rows, labels = [], [], [], [], []
    row_offset = 0
    steps = torch.arange(draft_tokens)
    for index in indices:
        sample = data.samples[index]
        try:
            hidden = data.states.read(sample.id, sample.input_ids).hidden_states
        except UnusableSampleError:
            continue
        tokens = torch.tensor(sample.input_ids)
        anchors, counts = _anchors(sample, anchors_per_sequence, draft_tokens, key, data.first_anchor)
        last = int(anchors[-1])
        sequences.append(tokens)
        tapped = hidden[:last, :-1] if data.columns is None else hidden[:last, data.columns]
        contexts.append(tapped.reshape(last, -1).to(data.dtype))
        context_positions.append(torch.arange(last))
        lengths.append(last)
        all_anchors.append(anchors)
        anchor_tokens.append(tokens[anchors])
        counted = steps[None, :] < counts[:, None]
        predicting = anchors[:, None] + steps[None, :]
        previous.append(tokens[predicting.clamp(max=len(tokens) - 1)])
        slots.append(counted)
        final = F.rms_norm(hidden[:, -1].float(), (hidden.shape[-1],), data.frozen.norm_weight.float(), data.frozen.norm_eps).to(data.dtype)
        used, inverse = torch.unique(predicting[counted], return_inverse=True)
        states.append(final[used])
        log_z = data._normalisers(sample, final)
        if log_z is not None:
            normalisers.append(log_z[used])
        rows.append(inverse + row_offset)
        row_offset += len(used)
        labels.append(data.draft_index[tokens[predicting[counted] + 1]])
    if not slots:
        return None
    counted = torch.cat(slots)
    weights = slot_weights(draft_tokens, gamma).expand(counted.shape)[counted]
    return Batch(
        blocks=Blocks(torch.cat(contexts), torch.cat(context_positions), torch.cat(anchor_tokens), torch.cat(all_anchors), make_segments(lengths, all_anchors)),
        tokens=sequences,
        previous=torch.cat(previous),
        slots=counted,
        targets=Targets(torch.cat(states), torch.cat(normalisers) if normalisers else None, torch.cat(rows), torch.cat(labels), weights / weights.sum()),
    )


def _anchors(sample: TokenSample, count: int, draft_tokens: int, key: tuple[object, ...], first: int) -> tuple[Tensor, Tensor]:
    mask: NDArray[np.bool_] = np.array(sample.loss_mask, dtype=bool)
    mask[: 1 + first] = False
    anchors, counts = choose(mask, count, draft_tokens, generator(*key, sample.id))
    return torch.from_numpy(anchors), torch.from_numpy(counts)


def sample_order(count: int, per_step: int, steps: int, seed: int) -> list[list[int]]:
    """Sample indices of every step: epoch after epoch, each in an order of its own, none left out.

    A step may reach over the end of an epoch; an index comes once per epoch.
    """
    needed = per_step * steps
    order: list[int] = []
    epoch = 0
    while len(order) < needed:
        order.extend(generator("order", seed, epoch).permutation(count).tolist())
        epoch += 1
    return [order[step * per_step : (step + 1) * per_step] for step in range(steps)]
