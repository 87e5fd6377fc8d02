"""The processes that train together: which one this is, and what they add up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from stages.errors import DraftlineError
from stages.params import Train

CPU = torch.device("cpu")
KEPT = "the last checkpoint is kept, run again to go on from there"
WAIT = timedelta(minutes=30)
"""Longest wait for another rank: rank 0 validates and writes checkpoints while the others wait."""
PATIENCE_SECONDS = 20.0
"""A rank that lost another waits so long to be ended by the launcher, which says what happened to the other."""


def launched() -> bool:
    """Whether this process is a rank: torch's elastic launcher (`torchrun`, or our own use of it) has started it."""
    return distributed.is_torchelastic_launched()


def leads() -> bool:
    """Whether this process is the one that writes: rank 0, or alone."""
    return not launched() or os.environ["RANK"] == "0"


@dataclass(frozen=True)
class Ranks:
    """This process among the `count` that train together; the batches of `rank` are computed on `device`."""

    rank: int = 0
    count: int = 1
    parallel: str = "none"
    device: torch.device = CPU

    @property
    def leader(self) -> bool:
        """The one that writes, logs and shows progress."""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Each value summed over the ranks; the same on all of them. Collective."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        out: list[float] = total.tolist()
        return out


ALONE = Ranks()


def require_started_as_set(params: Train) -> None:
    """Raises DraftlineError: `torchrun` started another number of ranks than params.yaml says, or there are fewer GPUs than ranks."""
    started = int(os.environ["WORLD_SIZE"]) if launched() else params.ranks
    if started != params.ranks:
        raise DraftlineError(f"params.yaml: train.ranks = {params.ranks}: torchrun started {started}; make them the same")
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else params.ranks
    if torch.cuda.is_available() and here > torch.cuda.device_count():
        raise DraftlineError(f"params.yaml: train.ranks = {params.ranks}: {here} on this node, which has {torch.cuda.device_count()} GPUs; one GPU each")


@contextmanager
def joined(params: Train) -> Iterator[Ranks]:
    """The group of all ranks: NCCL where there is CUDA, else gloo.

    Raises:
        DraftlineError: another rank is gone; or the block's own, with the number of this rank.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else CPU
    if gpu:
        torch.cuda.set_device(device)
    if params.ranks == 1:
        yield Ranks(device=device)
        return
    distributed.init_process_group("nccl" if gpu else "gloo", timeout=WAIT)
    rank = distributed.get_rank()
    try:
        yield Ranks(rank, params.ranks, params.parallel, device)
    except DraftlineError as error:
        raise DraftlineError(f"rank {rank}: {error}") from error
    except Exception as error:
        if not _lost_contact(error):
            raise
        time.sleep(PATIENCE_SECONDS)
        raise DraftlineError(f"rank {rank}: lost contact with another rank; {KEPT}") from error
    distributed.destroy_process_group()


def _lost_contact(error: Exception) -> bool:
    """gloo raises plain RuntimeErrors; they name its source file."""
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
