"""A causal language model of transformers that reads rows of different lengths into a cache and can be rewound.

    model = CachedModel(load_model(directory, torch.float32), layer_ids=(2, 4))
    model.begin(rows=2, capacity=64)
    first = model.read_prompts([[1, 2, 3], [4, 5]])      # logits of the last token of each
    out = model.read(torch.tensor([[7, 8], [9, 0]]))     # logits of every new token
    model.rewind([4, 3])                                  # as if only one of the two had been read

Letters: `B` rows, `Q` new tokens per row, `V` vocabulary, `L` tapped layers, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.decoding.kv_cache import RaggedCache, visible
from stages.decoding.proposer import DecodingError


def load_model(directory: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """The model in `directory`, in evaluation mode, every weight in `dtype`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa", trust_remote_code=trust_remote_code).eval()
    # Transformers leaves the scales of a quantised checkpoint in their own dtype, and refuses `model.to` there.
    nn.Module.to(model, dtype)
    return model


@dataclass(frozen=True)
class Read:
    """What a forward gave: `logits` `[B, Q, V]`, `states` `[B, Q, L·H]` (None without tapped layers)."""

    logits: Tensor
    states: Tensor | None


class Taps:
    """The residual stream entering chosen layers, caught on its way: transformers' own `output_hidden_states` would keep all of them.

    with taps:
        model(...)
    states = taps.take()
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        """
        Args:
            layer_ids: id i is the input of layer i; the number of layers is the last layer's output before the final norm.
        Raises:
            DecodingError: the model has no such layer.
        """
        self.layer_ids = tuple(layer_ids)
        self._caught: dict[int, Tensor] = {}
        self._modules: dict[int, nn.Module] = {}
        self._handles: list[Any] = []
        if not self.layer_ids:
            return
        decoder = model.get_decoder()
        layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
        if layers is None or norm is None:
            raise DecodingError(f"{type(model).__name__}: no `layers` and `norm` to tap")
        for layer in self.layer_ids:
            if not 1 <= layer <= len(layers):
                raise DecodingError(f"tapped layer {layer}: the model has layers 1 to {len(layers)}")
            self._modules[layer] = norm if layer == len(layers) else layers[layer]

    def __enter__(self) -> None:
        # Hooks for one forward only: several decoders may share a model, and none may pay for another's taps.
        self._handles = [module.register_forward_pre_hook(self._catch(layer), with_kwargs=True) for layer, module in self._modules.items()]

    def __exit__(self, *_exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _catch(self, layer: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._caught[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def take(self) -> Tensor | None:
        """`[B, Q, L·H]` of the last forward, in the order of `layer_ids`."""
        if not self.layer_ids:
            return None
        out = torch.cat([self._caught[layer] for layer in self.layer_ids], dim=-1)
        self._caught.clear()
        return out


class CachedModel:
    """Model, taps and the cache of the batch it is reading."""

    def __init__(self, model: Any, layer_ids: Sequence[int] = ()) -> None:
        """
        Args:
            model: a causal LM of transformers with `sdpa` attention (`load_model`).
            layer_ids: tapped layers, see `Taps`.
        Raises:
            DecodingError: an attention that this cache cannot serve, or a layer that is not there.
        """
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or model.config._attn_implementation != "sdpa":
            raise DecodingError(
                f"{type(model).__name__}: layers {sorted(kinds)} with {model.config._attn_implementation} attention; only full sdpa attention rewinds"
            )
        self.model = model
        self.taps = Taps(model, layer_ids)
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.num_layers: int = config.num_hidden_layers
        self.device: torch.device = next(model.parameters()).device
        self.cache = RaggedCache(self.num_layers, 0, 0)

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row has read."""
        return self.cache.lengths

    def begin(self, rows: int, capacity: int) -> None:
        """Forget everything; `capacity`: tokens that the longest row may come to hold."""
        self.cache = RaggedCache(self.num_layers, rows, capacity)

    def _forward(self, tokens: Tensor, starts: Sequence[int], first: int, last_only: bool) -> Read:
        """Read `[B, Q]` tokens at positions `starts[b] …` into rows `first …`; lengths stay as they are."""
        width = tokens.shape[1]
        cache = self.cache
        cache.slots.aim(starts, width, first)
        begin = torch.tensor(list(starts), device=self.device)
        mask = None
        # Transformers itself makes no mask for one new token, nor for a prompt from position 0: the fast kernels.
        if not (cache.slots.uniform and (width == 1 or starts[0] == 0)):
            mask = visible(begin, width, cache.slots.end)
        # Padding behind a row's tokens may lie beyond the model's positions; nothing of it is used.
        positions = (begin[:, None] + torch.arange(width, device=self.device)).clamp_(max=self.max_positions - 1)
        keep = 1 if last_only else 0
        with self.taps:
            logits: Tensor = self.model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=keep
            ).logits
        return Read(logits, self.taps.take())

    @torch.inference_mode()
    def read_prompts(self, prompts: Sequence[Sequence[int]]) -> Read:
        """Read one prompt per row, each by itself: no padding, and the same arithmetic whoever else is in the batch.

        Returns:
            Logits `[B, 1, V]` of each row's last token; states `[B, N, L·H]` of all, padded behind a row's length with zeros.
        """
        reads = [self._forward(torch.tensor([list(prompt)], device=self.device), [0], row, True) for row, prompt in enumerate(prompts)]
        self.cache.lengths = [len(prompt) for prompt in prompts]
        states = None
        if self.taps.layer_ids:
            states = nn.utils.rnn.pad_sequence([read.states[0] for read in reads if read.states is not None], batch_first=True)
        return Read(torch.cat([read.logits for read in reads]), states)

    @torch.inference_mode()
    def read(self, tokens: Tensor, last_only: bool = False) -> Read:
        """Read `[B, Q]` new tokens behind each row's length, which grows by `Q`; `last_only`: logits `[B, 1, V]` of the last token alone."""
        out = self._forward(tokens, self.cache.lengths, 0, last_only)
        self.cache.lengths = [length + tokens.shape[1] for length in self.cache.lengths]
        return out

    def rewind(self, lengths: Sequence[int]) -> None:
        """As if each row had read only its first `lengths[b]` tokens.

        Raises:
            ValueError: a row is shorter than that.
        """
        if any(new > old or new < 0 for new, old in zip(lengths, self.cache.lengths, strict=True)):
            raise ValueError(f"rewind from {self.cache.lengths} to {list(lengths)}")
        self.cache.lengths = list(lengths)

    def keep(self, index: Tensor) -> None:
        """Go on with rows `index` alone."""
        self.cache.keep(index)
