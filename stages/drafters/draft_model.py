"""A small causal LM as drafter: some of the verifier's layers between its embedding, final norm and head, then distilled.

It sees tokens alone. Embedding and head stay the verifier's; layers and final norm are trained. Its checkpoint is a Hugging Face
directory (config.json, model.safetensors, tokenizer) that vLLM serves under the method `draft_model` and transformers reads.

Letters: `B` sequences, `T` tokens, `A` anchors, `K` draft tokens, `H` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from stages.artifacts import read_json, write_json
from stages.drafters.checkpoint import CONFIG, WEIGHTS, as_narrow_as_exact, save_tensors
from stages.drafters.draft import Drafts
from stages.errors import ArtifactError
from stages.pairing.frozen import EMBEDDING, HEAD, FrozenVerifier
from stages.pairing.identity import TOKENIZER_FILES
from stages.pairing.weights import json_object, safetensors_header, weight_files

PREFIX = "model."
BESIDE = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json", "generation_config.json")
"""Files of the verifier that go with its tokenizer."""
QUANTIZED = ("quantization_config", "compression_config")
PER_LAYER = ("layer_types", "no_rope_layers")
"""Keys of config.json that hold one value for each layer."""


class DraftModelConfig(BaseModel):
    """Everything needed to build the model without its weights.

    Attributes:
        layers: of the verifier, from 0, ascending: those that the model began with.
        model: its own `config.json`, as transformers reads it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: Literal["draft_model"] = "draft_model"
    draft_tokens: int
    layers: list[int]
    vocab_size: int
    model: dict[str, Any]

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def reduced_vocabulary(self) -> bool:
        return False

    @property
    def layer_ids(self) -> list[int]:
        """No layer is tapped."""
        return []


def spread(count: int, num_layers: int) -> list[int]:
    """`count` layers of `num_layers`, evenly from the first to the last; the first alone where it is one."""
    return [0] if count == 1 else [round(place * (num_layers - 1) / (count - 1)) for place in range(count)]


def smaller(model: dict[str, Any], layers: list[int], num_layers: int, dtype: str) -> dict[str, Any]:
    """The verifier's `config.json` for a model of `layers` alone, not quantised."""
    out = {key: value for key, value in model.items() if key not in QUANTIZED}
    out |= {key: [out[key][layer] for layer in layers] for key in PER_LAYER if isinstance(out.get(key), list) and len(out[key]) == num_layers}
    out.pop("torch_dtype", None)
    return out | {"num_hidden_layers": len(layers), "dtype": dtype}


class DraftModel(nn.Module):
    """The causal LM; the state dict holds the trained weights alone: `layers.…`, `norm.weight`."""

    draft_ids: Tensor
    embedding: Tensor
    head: Tensor

    def __init__(self, config: DraftModelConfig, frozen: FrozenVerifier) -> None:
        """`frozen`: the verifier's embedding and head, shared, never trained."""
        from transformers import AutoConfig, AutoModel

        super().__init__()
        self.config = config
        shape = AutoConfig.for_model(**config.model)
        # Its own embedding is never used: none is made.
        shape.vocab_size, shape.pad_token_id = 1, None
        decoder = AutoModel.from_config(shape, dtype=torch.float32)
        self.layers, self.norm = decoder.layers, decoder.norm
        # Not a module of this one: its rotary embedding must stay in fp32, and its embedding out of the state dict.
        self._decoder = [decoder]
        self.register_buffer("draft_ids", torch.arange(config.vocab_size), persistent=False)
        self.register_buffer("embedding", frozen.embedding, persistent=False)
        self.register_buffer("head", frozen.lm_head, persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """`[B, T]` ids → `[B, T, H]` after the final norm; row t says token t + 1."""
        dtype = next(self.norm.parameters()).dtype
        out: Tensor = self._decoder[0](inputs_embeds=self.embedding[tokens].to(dtype), use_cache=False).last_hidden_state
        return out

    def supervised(self, sequences: Sequence[Tensor], anchors: Sequence[Tensor], slots: int) -> Tensor:
        """Hidden states that say the tokens after each anchor, given the data's own tokens.

        Args:
            sequences: ids of each sequence. anchors: positions in each.
            slots: tokens after each anchor.
        Returns:
            `[A, slots, H]`; where a sequence has ended, of its last token.
        """
        # Causal attention: what is padded behind a sequence is seen by nothing in it.
        padded = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        hidden = self.hidden(padded)
        steps = torch.arange(slots, device=padded.device)
        return torch.cat([hidden[i][(rows[:, None] + steps).clamp(max=len(sequences[i]) - 1)] for i, rows in enumerate(anchors)])


def _weights_of(directory: Path, layers: list[int]) -> dict[str, Tensor]:
    """The verifier's `layers` renumbered from 0, and its final norm, fp32.

    Raises:
        ArtifactError: weights that are quantised otherwise than one INT8 value and a scale per output channel.
    """
    out: dict[str, Tensor] = {}
    numbers = {f"{PREFIX}layers.{layer}.": f"layers.{place}." for place, layer in enumerate(layers)} | {f"{PREFIX}norm.": "norm."}
    for file in weight_files(directory):
        wanted = {name: prefix for name in safetensors_header(file) for prefix in numbers if name.startswith(prefix)}
        with safe_open(file, "pt") as stream:
            for name, prefix in wanted.items():
                out[numbers[prefix] + name.removeprefix(prefix)] = stream.get_tensor(name)
    for name in [name for name in out if name.endswith(".weight_scale")]:
        scale, weight = out.pop(name), name.removesuffix("_scale")
        if weight in out and out[weight].dtype == torch.int8 and scale.shape == (len(out[weight]), 1):
            out[weight] = out[weight].float() * scale.float()
    if wrong := [name for name, tensor in out.items() if not tensor.is_floating_point()]:
        raise ArtifactError(f"{directory}: {PREFIX}{wrong[0]} is quantised ({out[wrong[0]].dtype}): no draft model can be made of its layers")
    return {name: tensor.float() for name, tensor in out.items()}


def from_verifier(config: DraftModelConfig, frozen: FrozenVerifier, directory: Path) -> DraftModel:
    """The model as training starts from it.

    Raises:
        ArtifactError: the verifier's tensors are named or quantised in a way that is not known here.
    """
    model = DraftModel(config, frozen)
    return _filled(model, _weights_of(directory, config.layers), directory)


def _filled(model: DraftModel, tensors: dict[str, Tensor], where: Path) -> DraftModel:
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ArtifactError(f"{where}: its layers are not those that config.json describes: {' '.join(str(error).split())[:300]}") from None
    return model


def save_trained(directory: Path, model: DraftModel, dtype: torch.dtype) -> None:
    """Write the finished model for the stages after `train`: `config.json` and the trained weights in `dtype`."""
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(directory / WEIGHTS, {name: tensor.to(dtype) for name, tensor in model.state_dict().items()})
    write_json(directory / CONFIG, model.config.model_dump())


def load_trained(directory: Path, frozen: FrozenVerifier, dtype: torch.dtype) -> DraftModel:
    """Read what `save_trained` wrote; parameters are cast to `dtype`."""
    model = DraftModel(DraftModelConfig.model_validate(read_json(directory / CONFIG)), frozen)
    return _filled(model, load_file(directory / WEIGHTS), directory).to(dtype).eval()


def save_checkpoint(directory: Path, model: DraftModel, verifier: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Write a Hugging Face directory with the tokenizer of the verifier in `verifier`; returns its `config.json`.

    Args:
        model: with fp32 frozen ends, so that they are written without loss.
        dtype: of the trained weights; values must already be representable in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    tensors[PREFIX + EMBEDDING] = as_narrow_as_exact(model.embedding, dtype)
    tied = model.head.data_ptr() == model.embedding.data_ptr()
    if not tied:
        tensors[HEAD] = as_narrow_as_exact(model.head, dtype)
    save_tensors(directory / WEIGHTS, tensors)
    for name in (*TOKENIZER_FILES, *BESIDE):
        if (verifier / name).is_file():
            shutil.copyfile(verifier / name, directory / name)
    config = model.config
    own = {"algorithm": config.algorithm, "draft_tokens": config.draft_tokens, "layers": config.layers}
    exported = config.model | {"tie_word_embeddings": tied, "draftline": own}
    write_json(directory / CONFIG, exported)
    return exported


def load_draft_model(directory: Path, dtype: torch.dtype) -> DraftModel:
    """Build the model from its directory alone.

    Raises:
        ArtifactError: a file or a tensor is missing, unexpected or of another shape than the configuration says.
    """
    content = json_object(directory / CONFIG)
    path = directory / WEIGHTS
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file")
    tensors = load_file(path)
    try:
        own = content.pop("draftline")
        embedding = tensors.pop(PREFIX + EMBEDDING).to(dtype)
        head = embedding if content["tie_word_embeddings"] else tensors.pop(HEAD).to(dtype)
        config = DraftModelConfig(draft_tokens=own["draft_tokens"], layers=own["layers"], vocab_size=content["vocab_size"], model=content)
    except KeyError as error:
        raise ArtifactError(f"{directory}: {error.args[0]!r} is missing: not a draft model that convert wrote") from None
    frozen = FrozenVerifier(embedding, head, torch.empty(0), 0.0)
    return _filled(DraftModel(config, frozen), {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}, directory).to(dtype).eval()


@torch.no_grad()
def greedy_continuations(model: DraftModel, tokens: Tensor, anchor_positions: Tensor) -> Drafts:
    """Draft `K` tokens after the anchors at `anchor_positions` `[A]` of the sequence `tokens`, each read anew."""
    drafted, logits = [], []
    for anchor in anchor_positions.tolist():
        sequence, rows = tokens[: anchor + 1], []
        for _ in range(model.config.draft_tokens):
            rows.append(model.hidden(sequence[None])[0, -1] @ model.head.to(model.norm.weight.dtype).T)
            sequence = torch.cat([sequence, rows[-1].argmax()[None]])
        drafted.append(sequence[anchor + 1 :])
        logits.append(torch.stack(rows))
    return Drafts(torch.stack(drafted), torch.stack(logits), None)
