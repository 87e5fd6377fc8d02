"""Training samples: tokens and masks from `prepare`, hidden states from a dump or a stream, packed into batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from stages.dataset import TokenSample
from stages.drafters.model import Blocks, make_segments
from stages.hidden_states.format import UnusableSampleError
from stages.hidden_states.source import States
from stages.pairing.frozen import FrozenVerifier
from stages.train.anchors import choose, generator
from stages.train.losses import Targets, log_normalisers
from stages.train.ranks import CPU
from stages.train.shares import SLOT_COST


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


def _supervised(sample: TokenSample, first_anchor: int) -> int:
    """How many positions of a sample can be anchors."""
    return sum(sample.loss_mask[1 + first_anchor :])


def trainable(samples: Iterable[TokenSample], states: States, first_anchor: int) -> bool:
    """Whether any of `samples` has hidden states and an anchor."""
    present = set(states.ids)
    return any(sample.id in present and _supervised(sample, first_anchor) > 0 for sample in samples)


@dataclass
class TrainingSet:
    """One split joined with its hidden states.

    Attributes:
        samples: those with at least one anchor.
        layer_ids: tapped layers of the drafter, some of the extracted ones; None: all.
        first_anchor: earliest position that can be an anchor.
        device: where batches and output heads are.
        log_z: per sample id, `[T]` log-normalisers of the verifier over all `V`, made on first use; at most `LOG_Z_TOKENS`.
    """

    samples: list[TokenSample]
    states: States
    frozen: FrozenVerifier
    draft_ids: Tensor | None
    dtype: torch.dtype
    layer_ids: list[int] | None = None
    first_anchor: int = 0
    device: torch.device = CPU
    log_z: dict[str, Tensor] = field(default_factory=dict)
    log_z_tokens: int = 0

    def __post_init__(self) -> None:
        candidates = [_supervised(sample, self.first_anchor) for sample in self.samples]
        self.samples = [sample for sample, count in zip(self.samples, candidates, strict=True) if count]
        self.candidates = [count for count in candidates if count]
        extracted = list(self.states.plan.layer_ids[:-1]) if self.layer_ids is not None else []
        self.columns = None if self.layer_ids in (None, extracted) else [extracted.index(layer) for layer in self.layer_ids or []]
        vocab_size = len(self.frozen.embedding)
        self.head = self.frozen.lm_head if self.draft_ids is None else self.frozen.lm_head[self.draft_ids]
        self.head = self.head.to(self.device, self.dtype).contiguous()
        self.full_head = self.frozen.lm_head.to(self.device, self.dtype) if self.draft_ids is not None else None
        self.draft_index = torch.full((vocab_size,), -1, dtype=torch.int64)
        ids = torch.arange(vocab_size) if self.draft_ids is None else self.draft_ids
        self.draft_index[ids] = torch.arange(len(ids))

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def usable(self) -> int:
        """Samples that have hidden states, too."""
        present = set(self.states.ids)
        return sum(sample.id in present for sample in self.samples)

    def cost(self, index: int, anchors: int, draft_tokens: int) -> float:
        """About how much a sample takes to train on, in tokens of context."""
        return len(self.samples[index].input_ids) + SLOT_COST * draft_tokens * min(anchors, self.candidates[index])

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
        out[rows] = log_normalisers(states[rows].to(self.device), self.full_head).to(out.device)
        if self.log_z_tokens + len(out) <= LOG_Z_TOKENS:
            self.log_z[sample.id] = out
            self.log_z_tokens += len(out)
        return out


@dataclass(frozen=True)
class Batch:
    """One step's input, or a part of one.

    Attributes:
        tokens: the ids of each whole sequence. previous: `[A, K]` the token before each slot, the anchor first.
        slots: `[A, K]` bool: which of the blocks' slots count; targets are of the counted ones.
        weight: sum of the slots' weights before they were divided by it.
    """

    blocks: Blocks
    tokens: list[Tensor]
    previous: Tensor
    slots: Tensor
    targets: Targets
    weight: float

    @property
    def positions(self) -> Tensor:
        """`[N]` block position k of each counted slot."""
        return torch.nonzero(self.slots)[:, 1]


def moved(value: Any, device: torch.device) -> Any:
    """A batch, or what it is made of, with all tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [moved(item, device) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{part.name: moved(getattr(value, part.name), device) for part in fields(value)})
    return value


def blank_batch(data: TrainingSet, layers: int, draft_tokens: int) -> Batch:
    """One block after one token, all zeros: for a rank that has no sample, and must compute as long as the others do."""
    zeros = torch.zeros(2, dtype=torch.int64)
    width = data.frozen.embedding.shape[1]
    anchor = torch.ones(1, dtype=torch.int64)
    slots = torch.arange(draft_tokens)[None] == 0
    blocks = Blocks(torch.zeros(1, layers * width, dtype=data.dtype), zeros[:1], zeros[:1], anchor, make_segments([1], [anchor]))
    targets = Targets(torch.zeros(1, width, dtype=data.dtype), None if data.full_head is None else torch.zeros(1), zeros[:1], zeros[:1], torch.ones(1))
    batch: Batch = moved(Batch(blocks, [zeros], zeros[:1, None].expand(1, draft_tokens), slots, targets, 0.0), data.device)
    return batch


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
        contexts.append(tapped.flatten(1).to(data.dtype))
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
    total = weights.sum()
    batch = Batch(
        blocks=Blocks(torch.cat(contexts), torch.cat(context_positions), torch.cat(anchor_tokens), torch.cat(all_anchors), make_segments(lengths, all_anchors)),
        tokens=sequences,
        previous=torch.cat(previous),
        slots=counted,
        targets=Targets(torch.cat(states), torch.cat(normalisers) if normalisers else None, torch.cat(rows), torch.cat(labels), weights / total),
        weight=total.item(),
    )
    return batch if data.device == CPU else moved(batch, data.device)


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
