"""A DSpark drafter inside vLLM's model runner V1, where only DFlash is known.

V1's DFlash proposer runs the draft model once on `[anchor, mask × K]` per request, then takes its draft tokens from
`compute_logits(rows of the masks).argmax(-1)`, rows request-major. A Markov head fits in there: this class keeps the
input ids of the forward, and when the drafts are asked for adds each slot's bias in turn, following the argmax chain from the anchor.

With `sample_from_anchor: true` slot k is predicted by the row before it, so rows 0 … K-1 of the same forward are used:
the block that the drafter was trained on is anchor + (block_size − 1) masks, hence K = block_size − 1, one draft fewer than trained.

Runs inside vLLM, possibly without the rest of Draftline (see infra/vllm_plugin): of this repository it imports `heads` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from stages.drafters.heads import MarkovHead


class PerLayerKeyNorm(DFlashQwen3Model):  # type: ignore[misc]
    """vLLM's DFlash backbone with each layer's own norm on the keys of its context.

    vLLM norms the keys of all layers in one call with stacked weights `[layers, d]`. Its CUDA kernel takes them row by row; its
    CPU kernel (0.32) reads the first row for every layer, so each layer after the first drafts from wrongly scaled keys. Nothing
    fails: output stays lossless, acceptance falls. Drafters whose norms are still all ones do not show it.
    """

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        """`[layers, T, m, d]` → the same, normed."""
        normed = torch.empty_like(all_k)
        for layer, keys in enumerate(all_k):
            ops.rms_norm(normed[layer], keys, self._k_norm_weights[layer], self._rms_norm_eps)
        return normed


def nothing_to_draft() -> bool:
    """Are the queries of this forward anchors alone, one per request? So it is where dynamic speculation asks for 0 drafts."""
    metadata = get_forward_context().attn_metadata
    entries = list(metadata.values()) if isinstance(metadata, dict) else []
    return bool(entries) and all(getattr(entry, "max_query_len", 0) == 1 for entry in entries)


class DFlashForCausalLM(DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """vLLM's DFlash drafter on the corrected backbone."""

    model_cls = PerLayerKeyNorm

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """`[B·(1 + K)]` ids and positions → `[B·(1 + K), H]`.

        For K = 0 vLLM runs the backbone over the anchors "to keep the cache in sync". A DFlash block leaves nothing behind that is read
        again (the context's keys and values are written before, from the verifier's states), so that pass is spared.
        """
        if nothing_to_draft():
            return torch.zeros(len(input_ids), self.config.hidden_size, dtype=self.model.norm.weight.dtype, device=input_ids.device)
        hidden: Tensor = super().forward(input_ids, positions, inputs_embeds)
        return hidden


class DSparkForCausalLM(DFlashForCausalLM):
    """DFlash backbone of vLLM, Markov head of Draftline (`vanilla`, `gated`, `rnn`); the confidence head is not used."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        if not config.markov_rank:
            raise ValueError("markov_rank = 0 in a checkpoint of type dspark: a drafter without Markov head is of type dflash")
        self.markov_head = MarkovHead(config.vocab_size, config.draft_vocab_size, config.markov_rank, config.hidden_size, config.markov_head_type)
        self._input_ids: Tensor | None = None
        self._hidden: Tensor | None = None

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """`[B·(1 + K)]` ids and positions → `[B·(1 + K), H]`; both are kept for `_chain`."""
        hidden = super().forward(input_ids, positions, inputs_embeds)
        self._input_ids, self._hidden = input_ids, hidden
        return hidden

    def _chain(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Follow the Markov chain from each request's anchor.

        Args:
            hidden_states: `[B·K, H]`, the rows of the masks. K is taken from here: dynamic speculation changes it from call to call.
        Returns:
            tokens `[B·K]` of the verifier's vocabulary, and the logits `[B·K, D]` that chose them.
        """
        assert self._input_ids is not None
        assert self._hidden is not None
        rows = len(hidden_states)
        requests = len(self._input_ids) - rows
        if requests <= 0 or rows % requests:
            # Padded inputs (CUDA graphs) hide where a request begins; a guess would only cost acceptance, unseen.
            raise RuntimeError(f"DSpark: {rows} draft rows of {len(self._input_ids)} inputs are not K of K + 1 each; start vLLM with --enforce-eager")
        slots = rows // requests
        previous = self._input_ids.view(requests, slots + 1)[:, 0].long()
        hidden = self._hidden.view(requests, slots + 1, -1)[:, :slots] if self.config.sample_from_anchor else hidden_states.view(requests, slots, -1)
        logits: Tensor = self.logits_processor(self.lm_head, hidden.reshape(rows, -1)).view(requests, slots, -1)
        state = self.markov_head.initial_state(hidden)
        tokens = []
        for slot in range(slots):
            features, state = self.markov_head.step(previous, hidden[:, slot], state)
            logits[:, slot] += self.markov_head.markov_w2(features)
            previous = logits[:, slot].argmax(dim=-1)
            if self.draft_id_to_target_id is not None:
                previous = previous + self.draft_id_to_target_id[previous]
            tokens.append(previous)
        return torch.stack(tokens, dim=1).view(-1), logits.view(rows, -1)

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The drafts themselves, `[B·K]`: what vLLM asks for under `use_local_argmax_reduction`, sparing it the verifier's whole vocabulary."""
        return self._chain(hidden_states)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """The same as logits `[B·K, V]`; tokens outside a reduced draft vocabulary are at −inf."""
        logits = self._chain(hidden_states)[1]
        if self.draft_id_to_target_id is None:
            return logits
        targets = torch.arange(logits.shape[1], device=logits.device) + self.draft_id_to_target_id
        return logits.new_full((len(logits), self.config.vocab_size), float("-inf")).index_copy_(1, targets, logits)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Backbone by vLLM, Markov head here; the confidence head and training-only tensors are left out."""
        markov: dict[str, Tensor] = {}
        backbone: list[tuple[str, Tensor]] = []
        for name, tensor in weights:
            if name.startswith("markov_head."):
                markov[name.removeprefix("markov_head.")] = tensor
            elif not name.startswith("confidence_head."):
                backbone.append((name, tensor))
        super().load_weights(backbone)
        self.markov_head.load_state_dict(markov)
