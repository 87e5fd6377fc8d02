"""One training step on several ranks: DDP, or FSDP2, around the whole objective.

Gradients are sums over the ranks, not means: a step's loss is already divided by the weights of all of its slots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from stages.drafters.eagle3 import Eagle3
from stages.train.data import Batch
from stages.train.objectives import TrainedDrafter
from stages.train.ranks import Ranks
from stages.train.shards import whole


class Step(nn.Module):
    """The scalar loss of a batch. A module, because within its forward the ranks' wrappers keep all weights whole, whoever reads them."""

    def __init__(self, drafter: TrainedDrafter, loss: Callable[[TrainedDrafter, Batch], Tensor]) -> None:
        super().__init__()
        self.drafter = drafter
        self._loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self._loss(self.drafter, batch)


def trained_copy(drafter: TrainedDrafter, ranks: Ranks) -> TrainedDrafter:
    """What the optimizers work on: the drafter itself, or for FSDP2 a copy that can be divided. The frozen ends are shared.

    The leader alone keeps the whole weights of the other, to validate and to write; elsewhere they are given up.
    """
    if ranks.parallel != "fsdp2":
        return drafter
    out = copy.deepcopy(drafter, {id(buffer): buffer for buffer in drafter.buffers()})
    if not ranks.leader:
        drafter.to("meta")
    return out


def called_layers(drafter: TrainedDrafter) -> list[nn.Module]:
    """Layers that are called as modules; EAGLE-3's only one is used in pieces."""
    return [] if isinstance(drafter, Eagle3) else list(drafter.layers)


def summed(bucket: Any) -> torch.futures.Future[Tensor]:
    """The ranks' sum of each gradient by itself, in DDP's `bucket`.

    DDP's own mean of whole buckets depends on how they are filled, which changes after the first step of a process: a resumed
    run would differ in the last bits.
    """
    for gradient in bucket.gradients():
        distributed.all_reduce(gradient)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def shared(step: Step, ranks: Ranks) -> nn.Module:
    """The step as this rank's part of a common one."""
    if ranks.parallel == "ddp":
        # All ranks begin with the same weights, and the buffers are frozen: nothing of them is sent.
        out = DistributedDataParallel(step, forward_sync_buffers=False, init_sync=False, gradient_as_bucket_view=True)
        # A lambda: DDP compares annotations, which are strings here.
        out.register_comm_hook(None, lambda state, bucket: summed(bucket))
        return out
    if ranks.parallel == "fsdp2":
        mesh = init_device_mesh(ranks.device.type, (ranks.count,))
        for module in (*called_layers(step.drafter), step):
            divided = fully_shard(module, mesh=mesh)
            divided.set_gradient_divide_factor(1.0)
            # gloo has no mean, and needs none here.
            divided.set_force_sum_reduction_for_comms(True)
    return step


def summing(step: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Around a part's forward and backward pass: the ranks' gradients are summed after the last part alone."""
    if isinstance(step, FSDPModule):
        step.set_requires_gradient_sync(last)
    if isinstance(step, DistributedDataParallel) and not last:
        return step.no_sync()
    return nullcontext()


@torch.no_grad()
def gather(trained: TrainedDrafter, drafter: TrainedDrafter) -> None:
    """Put the trained weights into the leader's drafter that they were copied from. Collective."""
    if trained is not drafter:
        for source, target in zip(trained.parameters(), drafter.parameters(), strict=True):
            tensor = whole(source)
            if not target.is_meta:
                target.copy_(tensor)
