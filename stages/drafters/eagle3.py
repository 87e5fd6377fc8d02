"""EAGLE-3 (Li et al., 2025): one decoder layer that drafts token by token from the verifier's hidden states.

Row j of its sequence joins the verifier's states of position j (fused by `fc`) with the embedding of token j + 1, and says token
j + 2. An anchor at position p has no hidden state yet: its first row is that of position p - 1, which holds the anchor's embedding.
Each further row takes the layer's own output in place of the states and the token just drafted. Tensor names and the order of
norms are those of the speculators format, in which vLLM reads the layer (`llama_eagle3.py`, with `norm_before_residual`).

Letters: `T` context rows, `A` anchors, `K` draft tokens, `L` tapped layers, `H` hidden size, `n` query heads, `m` key-value heads, `d` head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stages.drafters.config import LayerShape, layer_fields, read_layer_fields, speculators_header
from stages.drafters.draft import Drafts
from stages.drafters.layers import Mlp, Rope, block_attention, rotate
from stages.drafters.model import Blocks, make_segments
from stages.errors import ArtifactError
from stages.pairing.frozen import FrozenVerifier


def tapped(layer_ids: list[int]) -> list[int]:
    """Of the extracted layers those that EAGLE-3 fuses: all of up to three, else the first, the middle and the last."""
    return layer_ids if len(layer_ids) <= 3 else [layer_ids[0], layer_ids[len(layer_ids) // 2], layer_ids[-1]]


class Eagle3Config(LayerShape):
    """Everything needed to build an EAGLE-3 draft without its verifier's files; attributes as in `DrafterConfig`."""

    algorithm: Literal["eagle3"] = "eagle3"
    draft_tokens: int
    draft_vocab_size: int
    layer_ids: list[int]

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    def to_speculators(self, verifier_name: str, verifier_architectures: list[str]) -> dict[str, Any]:
        """The checkpoint's `config.json`; arguments as `speculators_header`."""
        layer = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "mlp_bias": False,
            # vLLM sizes `fc` for three layers where this is missing.
            "num_aux_hidden_states": len(self.layer_ids),
            **layer_fields(self, 1),
        }
        return {
            **speculators_header("eagle3", "Eagle3DraftModel", self.draft_tokens, verifier_name, verifier_architectures),
            "transformer_layer_config": layer,
            "eagle_aux_hidden_state_layer_ids": self.layer_ids,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.hidden_size,
            # vLLM takes a missing key for true, speculators for false: always written.
            "norm_before_residual": True,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
        }

    @classmethod
    def from_speculators(cls, config: dict[str, Any], where: str = "config.json") -> Eagle3Config:
        """Read a checkpoint's `config.json` back.

        Raises:
            ArtifactError: a key is missing, or the layer is of a kind we do not build.
        """
        try:
            layer = config["transformer_layer_config"]
            built = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
            for name, value in [*built.items(), ("model_type", "llama"), ("num_hidden_layers", 1)]:
                found = (config if name in built else layer)[name]
                if found != value:
                    raise ArtifactError(f"{where}: {name} = {found!r}; supported: {value!r}")
            return cls(
                draft_tokens=config["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
                draft_vocab_size=config["draft_vocab_size"],
                layer_ids=config["eagle_aux_hidden_state_layer_ids"],
                **read_layer_fields(layer),
            )
        except KeyError as error:
            raise ArtifactError(f"{where}: key {error.args[0]!r} is missing") from None


class Eagle3Attention(nn.Module):
    """Llama attention whose inputs are embedding and hidden state side by side, `[N, 2H]`."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.n, self.m, self.d = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, self.n * self.d, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, self.m * self.d, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, self.m * self.d, bias=False)
        self.o_proj = nn.Linear(self.n * self.d, config.hidden_size, bias=False)

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """`[N, 2H]` → rotated queries `[N, n, d]`."""
        return rotate(self.q_proj(x).view(-1, self.n, self.d), *rope)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`[N, 2H]` → rotated keys and values `[N, m, d]`."""
        return rotate(self.k_proj(x).view(-1, self.m, self.d), *rope), self.v_proj(x).view(-1, self.m, self.d)


class Eagle3Layer(nn.Module):
    """The decoder layer; both of its inputs have a norm of their own."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def join(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and hidden states `[N, H]` → the attention's inputs `[N, 2H]` and the residual stream `[N, H]`."""
        normed = self.hidden_norm(hidden)
        return torch.cat([self.input_layernorm(embedded), normed], dim=-1), normed

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual `[N, H]` and attention's output `[N, n·d]` → the layer's output `[N, H]`."""
        hidden = residual + self.self_attn.o_proj(attended)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


@dataclass
class Chain:
    """Drafting from `A` anchors at a time, one token of each per step.

    Attributes:
        keys, values: `[T, m, d]` of the context rows; blocks: which of them each anchor sees: those before its first row.
        positions: `[A]` rotary position of the next row. hidden: `[A, H]` what stands for the verifier's states in it.
        own_keys, own_values: of the rows so far, `[A, m, d]` each.
    """

    blocks: Blocks
    keys: Tensor
    values: Tensor
    positions: Tensor
    hidden: Tensor
    own_keys: list[Tensor] = field(default_factory=list)
    own_values: list[Tensor] = field(default_factory=list)


class Eagle3(nn.Module):
    """An EAGLE-3 draft; the state dict holds the trained weights alone, named as in a speculators checkpoint."""

    draft_ids: Tensor
    embedding: Tensor
    head: Tensor

    def __init__(self, config: Eagle3Config, frozen: FrozenVerifier, draft_ids: Tensor | None = None) -> None:
        """
        Args:
            frozen: the verifier's embedding and `lm_head`, shared, never trained.
            draft_ids: `[D]` ascending verifier ids that can be proposed; None: all.
        """
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.layer_ids) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rope = Rope(layer_fields(config, 1))
        ids = torch.arange(config.vocab_size) if draft_ids is None else draft_ids
        self.register_buffer("draft_ids", ids, persistent=False)
        self.register_buffer("embedding", frozen.embedding, persistent=False)
        self.register_buffer("head", frozen.lm_head if draft_ids is None else frozen.lm_head[ids].contiguous(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    @property
    def layer(self) -> Eagle3Layer:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def start(self, blocks: Blocks, following: Tensor) -> Chain:
        """A chain at its anchors.

        Args:
            blocks: anchors at positions from 1 on. Segments' masks must end before an anchor's own first row: `anchor_segments`.
            following: `[T]` the token after each context position.
        """
        dtype = self.fc.weight.dtype
        context = self.fc(blocks.context.to(dtype)).to(dtype)
        x, _ = self.layer.join(self.embedding[following].to(dtype), context)
        keys, values = self.layer.self_attn.keys_values(x, self.rope(blocks.context_positions))
        starts = torch.cat([blocks.anchor_positions.new_full((s.anchors[1] - s.anchors[0],), s.context[0]) for s in blocks.segments])
        return Chain(blocks, keys, values, blocks.anchor_positions - 1, context[starts + blocks.anchor_positions - 1])

    def step(self, chain: Chain, tokens: Tensor) -> Tensor:
        """The next row of every anchor: `tokens` `[A]` are the tokens before it; returns its normed output `[A, H]`."""
        attention = self.layer.self_attn
        x, residual = self.layer.join(self.embedding[tokens].to(chain.hidden.dtype), chain.hidden)
        rope = self.rope(chain.positions)
        queries = attention.queries(x, rope)[:, None]
        keys, values = attention.keys_values(x, rope)
        chain.own_keys.append(keys)
        chain.own_values.append(values)
        own_keys, own_values = torch.stack(chain.own_keys, dim=1), torch.stack(chain.own_values, dim=1)
        attended = torch.cat(
            [
                block_attention(
                    queries[s.anchors[0] : s.anchors[1]],
                    own_keys[s.anchors[0] : s.anchors[1]],
                    own_values[s.anchors[0] : s.anchors[1]],
                    chain.keys[s.context[0] : s.context[1]],
                    chain.values[s.context[0] : s.context[1]],
                    s.mask,
                )
                for s in chain.blocks.segments
            ]
        )
        chain.hidden = self.layer.finish(residual, attended[:, 0])
        chain.positions = chain.positions + 1
        out: Tensor = self.norm(chain.hidden)
        return out

    def unrolled(self, blocks: Blocks, following: Tensor, previous: Tensor) -> Tensor:
        """Training-time test: `K` steps on its own outputs and the data's tokens `previous` `[A, K]`, the anchor first; `[A, K, H]`, normed."""
        chain = self.start(anchor_segments(blocks), following)
        return torch.stack([self.step(chain, previous[:, k]) for k in range(previous.shape[1])], dim=1)


def anchor_segments(blocks: Blocks) -> Blocks:
    """The same blocks, their masks ended one position earlier: an anchor's own first row is part of its chain, not of the context."""
    lengths = [s.context[1] - s.context[0] for s in blocks.segments]
    rows = [blocks.anchor_positions[s.anchors[0] : s.anchors[1]] - 1 for s in blocks.segments]
    return Blocks(blocks.context, blocks.context_positions, blocks.anchor_tokens, blocks.anchor_positions, make_segments(lengths, rows))


@torch.no_grad()
def greedy_chains(model: Eagle3, context: Tensor, tokens: Tensor, anchor_positions: Tensor) -> Drafts:
    """Draft `K` tokens from several anchors of one sequence.

    Args:
        context: `[T, L·H]` aux hidden states of positions `0…T-1`. tokens: at least the sequence up to its last anchor.
        anchor_positions: `[A]`, from 1 on.
    """
    last = int(anchor_positions.max())
    positions = torch.arange(last, device=context.device)
    blocks = Blocks(context[:last], positions, tokens[anchor_positions], anchor_positions, make_segments([last], [anchor_positions]))
    chain = model.start(anchor_segments(blocks), tokens[1 : last + 1])
    previous, drafted, logits = blocks.anchor_tokens, [], []
    for _ in range(model.config.draft_tokens):
        hidden = model.step(chain, previous)
        logits.append(hidden @ model.head.to(hidden.dtype).T)
        previous = model.draft_ids[logits[-1].argmax(dim=-1)]
        drafted.append(previous)
    return Drafts(torch.stack(drafted, 1), torch.stack(logits, 1), None)
