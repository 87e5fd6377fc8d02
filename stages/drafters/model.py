"""The drafter: DFlash backbone, optional Markov and confidence heads, the verifier's frozen ends.

Letters as in stages/drafters/layers.py; `L` tapped layers, `H` hidden size, `V`, `D` vocabularies, `K` draft tokens, `R` rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stages.drafters.config import DrafterConfig
from stages.drafters.heads import ConfidenceHead, MarkovHead
from stages.drafters.layers import Layer, Rope, Segment
from stages.pairing.frozen import FrozenVerifier


@dataclass(frozen=True)
class Blocks:
    """What a packed batch asks of the drafter.

    Attributes:
        context: `[T, L·H]` aux hidden states of all sequences, one after another.
        context_positions: `[T]` position of each within its own sequence.
        anchor_tokens: `[A]`, grouped by sequence in the order of `segments`.
        anchor_positions: `[A]` positions within their own sequences.
        segments: one per sequence.
    """

    context: Tensor
    context_positions: Tensor
    anchor_tokens: Tensor
    anchor_positions: Tensor
    segments: list[Segment]


def make_segments(context_lengths: list[int], anchors: list[Tensor]) -> list[Segment]:
    """Document boundaries of a packed batch: `anchors[s]` holds the anchor positions of sequence `s`."""
    segments = []
    start, first = 0, 0
    for length, positions in zip(context_lengths, anchors, strict=True):
        mask = torch.arange(length, device=positions.device)[None, :] < positions[:, None]
        segments.append(Segment((start, start + length), (first, first + len(positions)), mask))
        start, first = start + length, first + len(positions)
    return segments


class Drafter(nn.Module):
    """A draft model; the state dict holds the trained weights alone, named as in a speculators checkpoint."""

    draft_ids: Tensor
    embedding: Tensor
    head: Tensor

    def __init__(self, config: DrafterConfig, frozen: FrozenVerifier, draft_ids: Tensor | None = None) -> None:
        """
        Args:
            frozen: the verifier's embedding and `lm_head`, shared, never trained.
            draft_ids: `[D]` ascending verifier ids that the drafter can propose; None: all.
        """
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.markov_head = (
            MarkovHead(config.vocab_size, config.draft_vocab_size, config.markov_rank, hidden, config.markov_head_type) if config.markov_rank else None
        )
        with_markov = config.confidence_head_with_markov and config.markov_rank > 0
        self.confidence_head = ConfidenceHead(hidden + (config.markov_rank if with_markov else 0)) if config.confidence_head else None
        self._rope = Rope(config.layer_config())
        ids = torch.arange(config.vocab_size) if draft_ids is None else draft_ids
        self.register_buffer("draft_ids", ids, persistent=False)
        self.register_buffer("embedding", frozen.embedding, persistent=False)
        self.register_buffer("head", frozen.lm_head if draft_ids is None else frozen.lm_head[ids].contiguous(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not getattr(self.markov_head, "markov_w2", None):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def hidden(self, blocks: Blocks) -> Tensor:
        """Normed backbone output of the `K` predicting slots of each block: `[A, K, H]`."""
        config = self.config
        dtype = self.fc.weight.dtype
        context = self.hidden_norm(self.fc(blocks.context.to(dtype)))
        inputs = torch.full((len(blocks.anchor_tokens), config.block_size), config.mask_token_id, device=context.device)
        inputs[:, 0] = blocks.anchor_tokens
        block = self.embedding[inputs].to(dtype)
        positions = (blocks.anchor_positions[:, None] + torch.arange(config.block_size, device=context.device)).reshape(-1)
        block_rope, context_rope = self._rope(positions), self._rope(blocks.context_positions)
        for layer in self.layers:
            block = layer(block, context, block_rope, context_rope, blocks.segments)
        out: Tensor = self.norm(block if config.sample_from_anchor else block[:, 1:])
        return out

    def confidence(self, hidden: Tensor, embedded: Tensor | None) -> Tensor | None:
        """Survival logits `[…]` of slots `[…, H]` with previous-token embeddings `[…, R]`."""
        if self.confidence_head is None:
            return None
        if self.config.confidence_head_with_markov and embedded is not None:
            hidden = torch.cat([hidden, embedded.to(hidden.dtype)], dim=-1)
        out: Tensor = self.confidence_head(hidden)
        return out
