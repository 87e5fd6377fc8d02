"""One optimizer step of the `speculators` package on a CPU: its model, its loss, its batches.

Its defaults fail on a CPU (flex attention has no backward there, the fused loss needs Triton), so attention is `sdpa` and the
loss `eager`: what its own documentation offers instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from stages.params import Train
from stages.train.data import TrainingSet


def load_model(initial: Path) -> Any:
    """Its DSpark model from a speculators checkpoint, in fp32."""
    from speculators.models.dspark import DSparkDraftModel
    from speculators.models.dspark.config import DSparkSpeculatorConfig

    config = DSparkSpeculatorConfig.from_pretrained(initial)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model: Any = DSparkDraftModel.from_pretrained(initial, config=config, dtype=torch.float32)
    model.load_verifier_weights()
    return model.train()


def loss_arguments(model: Any, settings: Train, anchors: int) -> dict[str, Any]:
    """What its forward wants to know of the loss; `anchors`: of a whole step."""
    losses = {"loss_fn": json.dumps({"ce": settings.loss.ce, "tv": settings.loss.tv}), "loss_implementation": "eager"}
    arguments: dict[str, Any] = type(model).get_trainer_kwargs(**losses, max_anchors=anchors, dflash_decay_gamma=settings.decay_gamma)[0]
    return arguments


def batch(data: TrainingSet, indices: list[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Sequences packed the way its collator does: one row, a document id per sequence; states in `dtype`."""
    hidden, last, ids, masks, documents, positions = [], [], [], [], [], []
    for document, index in enumerate(indices):
        sample = data.samples[index]
        states = data.states.read(sample.id, sample.input_ids).hidden_states.to(dtype)
        hidden.append(states[:, :-1].flatten(1))
        last.append(states[:, -1])
        ids.append(torch.tensor(sample.input_ids))
        masks.append(torch.tensor(sample.loss_mask))
        documents.append(torch.full((len(states),), document))
        positions.append(torch.arange(len(states)))
    return {
        "hidden_states": torch.cat(hidden)[None],
        "verifier_last_hidden_states": torch.cat(last)[None],
        "input_ids": torch.cat(ids)[None],
        "loss_mask": torch.cat(masks)[None],
        "document_ids": torch.cat(documents)[None],
        "position_ids": torch.cat(positions)[None],
    }


def take_step(model: Any, packed: dict[str, torch.Tensor], arguments: dict[str, Any], optimizers: list[torch.optim.Optimizer], settings: Train) -> None:
    """Loss, backward, clipping, update; products in the dtype of the batch's states."""
    dtype = packed["hidden_states"].dtype
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        _, loss, _ = model(**packed, **arguments)
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_([parameter for parameter in model.parameters() if parameter.requires_grad], settings.grad_clip)
    for optimizer in optimizers:
        optimizer.step()
