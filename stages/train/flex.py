"""Block attention of a whole packed batch in one kernel: torch's flex attention, which skips what a block does not see."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from stages.drafters.layers import Segment


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only compiled is it one kernel, and the mask never dense."""
    return torch.compile(function, dynamic=True)


def attend_flex(q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor, segments: list[Segment]) -> Tensor:
    """As `attend_segments`: `[A, I, n, d]` queries, `[A, I, m, d]` and `[T, m, d]` keys and values → `[A, I, n·d]`."""
    a, i, n, d = q.shape
    t, m, _ = k_context.shape
    # A block sees rows `first` to `last` of the context: those of its own sequence before its anchor.
    first = torch.cat([torch.full((len(s.mask),), s.context[0], device=q.device) for s in segments])
    last = first + torch.cat([s.mask.sum(dim=1) for s in segments])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // i
        return ((key >= first[block]) & (key < last[block])) | ((key >= t) & ((key - t) // i == block))

    queries = q.reshape(a * i, n, d)
    keys, values = (torch.cat([context, block.reshape(a * i, m, d)]).to(q.dtype) for context, block in ((k_context, k_block), (v_context, v_block)))
    mask = _compiled(create_block_mask)(visible, None, None, a * i, t + a * i, device=q.device)
    out: Tensor = _compiled(flex_attention)(*(x.transpose(0, 1)[None] for x in (queries, keys, values)), block_mask=mask, enable_gqa=n != m)
    return out[0].transpose(0, 1).reshape(a, i, n * d)
