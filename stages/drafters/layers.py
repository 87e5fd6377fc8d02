"""The block-parallel backbone layer (DFlash): queries from the block, keys and values from context and block.

Letters: `S` packed sequences, `T` context tokens of all of them, `A` anchors, `I` inputs of a block, `n` query heads,
`m` key-value heads, `d` head size. A block attends to the context of its own sequence strictly before its anchor's
position, and to all of itself. The anchor is excluded from the context because at decode time it has just been
sampled and has no hidden state yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.drafters.config import DrafterConfig


@dataclass(frozen=True)
class Segment:
    """One sequence of a packed batch: its rows of the context and its anchors.

    Attributes:
        context: half-open range of context rows. anchors: half-open range of blocks.
        mask: `[anchors, context]` bool, true where the block may look.
    """

    context: tuple[int, int]
    anchors: tuple[int, int]
    mask: Tensor


class Rope:
    """Rotary angles, fp32 at all times: bf16 angles are wrong from position 256 on.

    A plain object, not a module: `Module.to(bfloat16)` would round the frequencies and with them every position.
    """

    def __init__(self, layer_config: dict[str, Any]) -> None:
        """`layer_config`: of a Qwen3 layer, whose rotary embedding is Llama's too."""
        parameters = layer_config["rope_parameters"]
        if parameters.get("rope_type", "default") == "default" and "rope_theta" in parameters:
            size = layer_config["head_dim"]
            self.inverse_frequencies = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size))
            self.scaling = 1.0
            return
        # Here and not above: a trainer that needs no long-context scaling starts in half the time and a third of a gigabyte less without it.
        from transformers import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        rotary = Qwen3RotaryEmbedding(Qwen3Config(**layer_config))
        self.inverse_frequencies = rotary.inv_freq.detach().float().clone()
        self.scaling = float(rotary.attention_scaling)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin `[N, d]` of positions `[N]`."""
        with torch.autocast(positions.device.type, enabled=False):
            angles = torch.outer(positions.float(), self.inverse_frequencies.to(positions.device))
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves layout: `[N, heads, d]` with cos, sin `[N, d]`."""
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def block_attention(q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor, mask: Tensor) -> Tensor:
    """Attention of `A` blocks over one sequence's context and themselves, without an `[A·I, T + A·J]` mask.

    Args:
        q: `[A, I, n, d]`. k_block, v_block: `[A, J, m, d]`, J = I where queries and keys come from the same inputs. k_context, v_context: `[T, m, d]`.
        mask: `[A, T]`, true where a block sees the context token.
    Returns:
        `[A, I, n·d]`.
    """
    a, i, n, d = q.shape
    t, m, _ = k_context.shape
    j = k_block.shape[1]
    g = n // m
    # Grouped heads: queries that share a key-value head are rows of one product.
    grouped = (q * d**-0.5).view(a, i, m, g, d)
    over_context = grouped.permute(2, 0, 3, 1, 4).reshape(m, a * g * i, d) @ k_context.permute(1, 2, 0)
    over_block = grouped.permute(2, 0, 3, 1, 4).reshape(m * a, g * i, d) @ k_block.permute(2, 0, 3, 1).reshape(m * a, d, j)
    scores = torch.cat([over_context.view(m, a, g * i, t), over_block.view(m, a, g * i, j)], dim=-1).float()
    bias = torch.zeros(a, t + j, dtype=scores.dtype, device=scores.device)
    bias[:, :t].masked_fill_(~mask, float("-inf"))
    weights = torch.softmax(scores + bias[:, None, :], dim=-1).to(v_context.dtype)
    out = weights[..., :t].reshape(m, a * g * i, t) @ v_context.permute(1, 0, 2)
    out = out.view(m * a, g * i, d) + weights[..., t:].reshape(m * a, g * i, j) @ v_block.permute(2, 0, 1, 3).reshape(m * a, j, d)
    return out.view(m, a, g, i, d).permute(1, 3, 0, 2, 4).reshape(a, i, n * d)


def attend_segments(q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor, segments: list[Segment]) -> Tensor:
    """`block_attention` of a packed batch, one sequence after another; arguments as there, but of all sequences."""
    outputs = [
        block_attention(
            q[s.anchors[0] : s.anchors[1]],
            k_block[s.anchors[0] : s.anchors[1]],
            v_block[s.anchors[0] : s.anchors[1]],
            k_context[s.context[0] : s.context[1]],
            v_context[s.context[0] : s.context[1]],
            s.mask,
        )
        for s in segments
    ]
    return torch.cat(outputs, dim=0)


class Attention(nn.Module):
    """Qwen3 attention (RMSNorm on each head's queries and keys) over context and block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.n, self.m, self.d = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.n * self.d, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.m * self.d, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.m * self.d, bias=False)
        self.o_proj = nn.Linear(self.n * self.d, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.d, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.d, eps=config.rms_norm_eps)
        self.attend = attend_segments

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`[N, H]` → rotated keys and values `[N, m, d]`."""
        keys = rotate(self.k_norm(self.k_proj(x).view(-1, self.m, self.d)), cos, sin)
        return keys, self.v_proj(x).view(-1, self.m, self.d)

    def forward(
        self, block: Tensor, context: Tensor, block_rope: tuple[Tensor, Tensor], context_rope: tuple[Tensor, Tensor], segments: list[Segment]
    ) -> Tensor:
        """block `[A, I, H]`, context `[T, H]` → `[A, I, H]`."""
        a, i, h = block.shape
        rows = block.reshape(a * i, h)
        q = rotate(self.q_norm(self.q_proj(rows).view(-1, self.n, self.d)), *block_rope).view(a, i, self.n, self.d)
        k_block, v_block = (x.view(a, i, self.m, self.d) for x in self.keys_values(rows, *block_rope))
        k_context, v_context = self.keys_values(context, *context_rope)
        v_block, v_context = v_block.to(q.dtype), v_context.to(q.dtype)
        out: Tensor = self.o_proj(self.attend(q, k_block, v_block, k_context, v_context, segments))
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm residual layer; the context passes every layer unchanged."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def forward(
        self, block: Tensor, context: Tensor, block_rope: tuple[Tensor, Tensor], context_rope: tuple[Tensor, Tensor], segments: list[Segment]
    ) -> Tensor:
        block = block + self.self_attn(self.input_layernorm(block), context, block_rope, context_rope, segments)
        out: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return out
