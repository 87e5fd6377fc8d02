"""Measures a cost table: rounds of speculative decoding and steps of the verifier alone, on the machine at hand.

    table = measure_costs(engine, speculative, prompts, batch_sizes=[1, 2, 4, 8], draft_tokens=[0, 2, 4, 7], verifier=…, checkpoint=…)

Both engines are alive and every cell is visited several times, in an order that runs forward and backward in turn, so that
the machine's mood hits all alike. What is timed is a whole step of vLLM: scheduler, verifier, drafter. Which drafts are accepted
does not change what a step costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor
from tqdm import tqdm

from stages.decoding.costs import Cell, CostTable, cell, this_machine
from stages.decoding.engine import Engine, EngineConfig, Request
from stages.decoding.isolated import EngineProcess, engine_life
from stages.decoding.schedulers import Offered

WARM_ROUNDS = 2
"""Rounds of a batch before those that are timed."""
ROUNDS = 6
VISITS = 5
CONTEXT = 128

Visit = Callable[[int, int | None], list[float]]
"""Requests and draft tokens (None: the verifier alone) → seconds of some rounds."""


def interleaved(visit: Visit, batch_sizes: Sequence[int], draft_tokens: Sequence[int], visits: int = VISITS, desc: str | None = None) -> list[Cell]:
    """Visit every cell `visits` times, forward and backward in turn.

    Args:
        desc: name of the progress bar on stderr; None: no bar.
    """
    keys: list[tuple[int, int | None]] = list(product(sorted(set(batch_sizes)), [None, *sorted({0, *draft_tokens})]))
    seconds: dict[tuple[int, int | None], list[float]] = {key: [] for key in keys}
    with tqdm(total=visits * len(keys), desc=desc, unit="cell", disable=desc is None) as bar:
        for number in range(visits):
            for key in keys if number % 2 == 0 else keys[::-1]:
                seconds[key].extend(visit(*key))
                bar.update()
    return [cell(requests, drafts, times) for (requests, drafts), times in seconds.items()]


def repeated(prompts: Sequence[Sequence[int]], count: int, length: int) -> list[list[int]]:
    """`count` prompts of just `length` tokens, out of `prompts` taken in turn and repeated where they are too short."""
    return [(list(prompts[index % len(prompts)]) * length)[:length] for index in range(count)]


def time_rounds(engine: Engine, prompts: Sequence[list[int]], draft_tokens: int | None, rounds: int) -> list[float]:
    """Seconds of `rounds` steps in which each of the prompts has its drafts verified and is drafted for anew.

    Args:
        draft_tokens: of each request; None: an engine without a drafter. What prompt lookup does not find is filled up.
    Raises:
        RuntimeError: the requests ended before that: no room, or a drafter that does not draft.
    """
    # The engine's own switch: what `num_speculative_tokens_per_batch_size` fills at its start.
    if draft_tokens is not None:
        engine._scheduler.dynamic_sd_lookup = [draft_tokens] * len(engine._scheduler.dynamic_sd_lookup)
    drafts = draft_tokens or 0
    longest = (WARM_ROUNDS + rounds + len(prompts) + 2) * (1 + drafts)
    ids = [str(number) for number in range(len(prompts))]
    for key, prompt in zip(ids, prompts, strict=True):
        engine._add(key, Request(key, prompt, min(longest, engine.config.max_model_len - len(prompt) - drafts - 1), ignore_eos=True))
    states = engine._scheduler.requests
    finds = engine.config.speculative is not None and engine.config.speculative["method"] == "ngram"
    seconds: list[float] = []
    warm = 0
    try:
        while len(seconds) < rounds:
            read = len(states) == len(ids) and all(state.output_token_ids for state in states.values())
            if read and finds:
                # A pass costs what it reads, and no text makes prompt lookup find `drafts` tokens in every round.
                for state in states.values():
                    state.spec_token_ids = [*state.spec_token_ids, *[0] * drafts][:drafts]
            steady = read and all(len(state.spec_token_ids) == drafts for state in states.values())
            started = time.perf_counter()
            outputs = engine._engine.step()
            elapsed = time.perf_counter() - started
            if any(output.finished for output in outputs):
                raise RuntimeError(f"{len(ids)} requests of {len(prompts[0])} tokens ended before {rounds} rounds were timed; raise engine.max_model_len")
            warm += steady
            if steady and warm > WARM_ROUNDS:
                seconds.append(elapsed)
    finally:
        engine._engine.abort_request(ids)
        while engine._engine.has_unfinished_requests():
            engine._engine.step()
    return seconds


def _time(engine: Engine, connection: Connection, message: Any) -> None:
    connection.send(time_rounds(engine, *message))


timing_life = partial(engine_life, work=_time)
"""An engine's process that answers (prompts, draft tokens, rounds) with seconds."""


class Metronome:
    """A scheduler of the decoding loop that has `count` drafts of each row verified, and notes when each round begins.

    Attributes:
        beats: seconds and rows of each beginning.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.beats: list[tuple[float, int]] = []

    def limit(self, context_lengths: Tensor, draft_tokens: int) -> int:
        """All drafts are made, as the prefix scheduler needs them; with `count` of them verified."""
        self.beats.append((time.perf_counter(), len(context_lengths)))
        return draft_tokens

    def lengths(self, offer: Offered) -> Tensor:
        return offer.available.clamp(max=self.count)

    def rounds(self, rows: int) -> list[float]:
        """Seconds of the rounds with just so many rows, but for the first ones."""
        pairs = zip(self.beats, self.beats[1:], strict=False)
        return [after[0] - before[0] for before, after in pairs if before[1] == after[1] == rows][WARM_ROUNDS:]


def time_decoder(decoder: Any, prompts: Sequence[Any], draft_tokens: int | None) -> list[float]:
    """Seconds of rounds of our own decoding loop: a `Visit` for `interleaved`.

    The loop reads each row's anchor and as many drafts as the longest row has verified: its rounds cost what equal lengths cost.

    Args:
        decoder: a `stages.decoding.loop.Decoder`; without proposer for `draft_tokens` None. prompts: for one batch, of equal length, with
            `max_tokens` for some rounds and no end of sequence before that.
    """
    if draft_tokens is None:
        spent, made = decoder.seconds.round_seconds, decoder.seconds.rounds
        decoder.decode(prompts, batch_size=len(prompts))
        return [(decoder.seconds.round_seconds - spent) / (decoder.seconds.rounds - made)]
    decoder.scheduler = metronome = Metronome(draft_tokens)
    decoder.decode(prompts, batch_size=len(prompts))
    return metronome.rounds(len(prompts))


def measure_costs(
    engine: EngineConfig,
    speculative: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    batch_sizes: Sequence[int],
    draft_tokens: Sequence[int],
    verifier: str,
    checkpoint: str,
    visits: int = VISITS,
    context: int = CONTEXT,
    desc: str | None = None,
) -> CostTable:
    """Measure vLLM with the drafter against vLLM with the verifier alone.

    Args:
        engine: the verifier alone, as it will be served. speculative: vLLM's speculative config of the drafter (`spec_config`).
        prompts: token ids; their beginnings, repeated where too short, are what is decoded.
        batch_sizes: requests at a time; 1 and the largest that will be served should be among them.
        draft_tokens: counts to measure beside 0, at most the drafter's own.
        verifier, checkpoint: digests that the table will name.
        context: tokens of each prompt.
        desc: name of the progress bar on stderr; None: no bar.
    Raises:
        EngineError: an engine could not be started, or failed.
    """
    sizes = sorted(set(batch_sizes))
    alone = replace(engine, max_num_seqs=sizes[-1])
    ranges = {"num_speculative_tokens_per_batch_size": [[1, sizes[-1], speculative["num_speculative_tokens"]]]}
    drafting = replace(alone, speculative=speculative | ranges)
    taken = repeated(prompts, sizes[-1], min(context, engine.max_model_len // 2))
    with EngineProcess(drafting, None, timing_life) as pair, EngineProcess(alone, None, timing_life) as single:

        def visit(requests: int, drafts: int | None) -> list[float]:
            process = single if drafts is None else pair
            seconds: list[float] = process.ask((taken[:requests], drafts, ROUNDS))
            return seconds

        cells = interleaved(visit, sizes, draft_tokens, visits, desc)
    return CostTable(machine=this_machine("vllm"), verifier=verifier, checkpoint=checkpoint, dtype=engine.dtype, context=len(taken[0]), cells=cells)
