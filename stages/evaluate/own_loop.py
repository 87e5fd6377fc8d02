"""Decoding through our own loop (`stages.decoding.loop`): what the engine cannot do.

That is temperature above 0 as DSpark samples (vLLM's V1 proposer drafts the argmax chain there), prompt lookup with its guard, and
the seconds of verifier, drafter and Markov head one by one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from stages.artifacts import digest_json
from stages.decoding.cached_model import load_model
from stages.decoding.engine import Completion, Request
from stages.decoding.loop import Decoder
from stages.decoding.proposer import Offer, Proposer, Sampling
from stages.decoding.stopping import Prompt, eos_ids
from stages.decoding.timing import Seconds
from stages.evaluate.speed import Timed
from stages.evaluate.store import Store, completions_from_json, completions_to_json


class FirstDrafts:
    """A scheduler that verifies the first `draft_tokens` drafts of the block, K of a sweep."""

    def __init__(self, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens

    def limit(self, context_lengths: Tensor, draft_tokens: int) -> int:
        return min(self.draft_tokens, draft_tokens)

    def lengths(self, offer: Offer) -> Tensor:
        return offer.available


@dataclass(frozen=True)
class Run:
    """Completions in the order of the requests; `Seconds` (as its `report`) and the proposer's counters, summed over the batches."""

    completions: list[Completion]
    seconds: dict[str, float]
    counters: dict[str, int]


class OwnLoop:
    """The verifier as transformers runs it, loaded when it is first needed."""

    def __init__(self, verifier: Path, dtype: torch.dtype, max_length: int, trust_remote_code: bool = False) -> None:
        self.verifier, self.dtype, self.max_length = verifier, dtype, max_length
        self.trust_remote_code = trust_remote_code
        self._model: Any = None

    @property
    def model(self) -> Any:
        if self._model is None:
            self._model = load_model(self.verifier, self.dtype, self.trust_remote_code)
        return self._model

    def eos_ids(self) -> frozenset[int]:
        return frozenset(eos_ids(self.model))

    def decoder(self, proposer: Proposer | None) -> Decoder:
        """Decodes with `proposer`; None: the verifier alone."""
        return Decoder(self.model, proposer, max_length=self.max_length)


def prompts_of(requests: Sequence[Request]) -> list[Prompt]:
    return [Prompt(request.id, list(request.prompt_ids), request.max_tokens) for request in requests]


def decode(
    decoder: Decoder,
    requests: Sequence[Request],
    temperature: float,
    draft_tokens: int,
    batch_size: int,
    store: Store,
    key: dict[str, Any],
    desc: str,
) -> Run:
    """Decode all requests in batches; each is stored as soon as it is done.

    Args:
        draft_tokens: K; what the proposer drafts beyond is not asked for.
        key: what the result depends on besides `store.about` and the other arguments.
    """
    decoder.sampling = Sampling(temperature)
    decoder.scheduler = FirstDrafts(draft_tokens)
    completions: list[Completion] = []
    total, counters = Seconds(), Counter[str]()
    with tqdm(total=len(requests), desc=desc, unit="prompt") as bar:
        for start in range(0, len(requests), batch_size):
            group = requests[start : start + batch_size]

            batch = {
                **key,
                "by": "loop",
                "temperature": temperature,
                "draft_tokens": draft_tokens,
                "batch_size": batch_size,
                "ids": [request.id for request in group],
            }

            def make(group: Sequence[Request] = group, batch: dict[str, Any] = batch) -> dict[str, Any]:
                decoder.seconds = Seconds()
                before = Counter(_counters(decoder))
                # Each batch has its own seed: the same draws, whichever batches were there already.
                decoder.generator.manual_seed(int(digest_json(batch)[:12], 16))
                done = decoder.decode(prompts_of(group), batch_size)
                return {"completions": completions_to_json(done), "seconds": asdict(decoder.seconds), "counters": Counter(_counters(decoder)) - before}

            found = store.get(batch, make)
            completions += completions_from_json(found["completions"])
            for name, value in found["seconds"].items():
                setattr(total, name, getattr(total, name) + value)
            counters.update(found["counters"])
            bar.update(len(group))
    return Run(completions, total.report(), dict(counters))


def _counters(decoder: Decoder) -> dict[str, int]:
    return decoder.proposer.counters() if decoder.proposer is not None else {}


def timed(decoder: Decoder, group: Sequence[Request]) -> Timed:
    """Decode one group together: its tokens and the seconds they took, reading the prompts included."""
    started = time.perf_counter()
    done = decoder.decode(prompts_of(group), len(group))
    return sum(len(completion.token_ids) for completion in done), time.perf_counter() - started
