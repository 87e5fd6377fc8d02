"""Everything that is measured about one or several drafters of a verifier, on the same prompts.

Greedy acceptance and speed come from the engine that serves; temperature above 0, prompt lookup and the seconds of the parts of a
round from our own loop, in the served dtype. A *cell* is one drafter at one temperature with one K.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages.dataset import TokenSample
from stages.decoding.costs import costs_section
from stages.decoding.engine import Completion, EngineConfig, Request
from stages.decoding.isolated import EngineProcess
from stages.decoding.loop import Decoder
from stages.decoding.measure_costs import measure_costs
from stages.decoding.proposer import Sampling
from stages.decoding.timing import Seconds
from stages.evaluate import own_loop
from stages.evaluate.acceptance import positions_by_kind, prompt_count, survival
from stages.evaluate.degraded import compare_outputs, failures
from stages.evaluate.speed import Timed, grouped, measure, pairs_from_json, pairs_to_json, summarise
from stages.evaluate.statistics import PromptCount, acceptance_length, macro_interval, paired_difference
from stages.evaluate.store import Store, completions_from_json, completions_to_json
from stages.evaluate.subjects import GUARDED, UNGUARDED, Drafter, choose_draft_tokens, load_proposer, lookup_proposer
from stages.evaluate.verdict import judge
from stages.params import Evaluate

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Cell:
    """One drafter at one temperature with K drafts per round.

    Attributes:
        by: "engine" or "loop". seconds: `stages.decoding.timing.Seconds` of a loop, else None. headline: the drafter at its trained K.
    """

    drafter: str
    temperature: float
    draft_tokens: int
    by: str
    headline: bool
    completions: list[Completion]
    seconds: dict[str, float] | None = None
    counters: dict[str, int] | None = None

    @property
    def label(self) -> str:
        return f"{self.drafter}, temperature {self.temperature:g}, K = {self.draft_tokens}"


class Evaluation:
    """The measurements of one call; `cells` in the order they were made."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        chosen: dict[str, list[TokenSample]],
        verifier: Path,
        engine: EngineConfig,
        settings: Evaluate,
        store: Store,
        engine_too: bool = True,
    ) -> None:
        """
        Args:
            chosen: kind → prompts. verifier: its directory. engine: the verifier alone.
            engine_too: false: acceptance alone, all of it through our own loop; no speed, so no verdict.
        """
        self.engine_too = engine_too
        self.drafters, self.chosen, self.settings, self.engine, self.store = drafters, chosen, settings, engine, store
        self.kinds = {sample.id: kind for kind, group in chosen.items() for sample in group}
        self.requests = [Request(sample.id, sample.prompt_ids, settings.max_tokens) for group in chosen.values() for sample in group]
        self.verifier = verifier
        self.dtype: torch.dtype = getattr(torch, engine.dtype)
        self.loop = own_loop.OwnLoop(verifier, self.dtype, engine.max_model_len, engine.trust_remote_code)
        self.cells: list[Cell] = []
        self.references: dict[float, list[Completion]] = {}
        self.speeds: list[dict[str, Any]] = []
        self.lookup_speeds: list[dict[str, Any]] = []
        self.eos_ids: frozenset[int] = frozenset()

    def draft_tokens(self, drafter: Drafter) -> list[int]:
        """Measured K of a drafter, ascending; the trained one is the last."""
        return choose_draft_tokens(drafter.trained, self.settings.draft_tokens)[0]

    def batch_sizes(self) -> list[int]:
        """Prompts that are timed together: those of the params that the engine decodes at a time."""
        return sorted({size for size in self.settings.batch_sizes if size <= self.engine.max_num_seqs})

    def in_the_loop(self) -> list[float]:
        """Temperatures at which our own loop runs the drafters."""
        return sorted(set(self.settings.temperatures) - ({0.0} if self.engine_too else set()))

    def speed_requests(self) -> list[Request]:
        """The prompts of each kind in turn, for speed."""
        longest = max(len(group) for group in self.chosen.values())
        in_turn = [group[index] for index in range(longest) for group in self.chosen.values() if index < len(group)]
        return [Request(sample.id, sample.prompt_ids, self.settings.speed_tokens) for sample in in_turn]

    def groups(self, batch_size: int) -> list[list[Request]]:
        settings = self.settings
        requests = self.speed_requests()
        return grouped(requests[: max(settings.speed_prompts, batch_size)], settings.speed_prompts, batch_size)

    def run(self) -> None:
        """Measure it all."""
        self.eos_ids = self.loop.eos_ids()
        if self.engine_too:
            self._greedy_through_the_engine()
        for temperature in self.in_the_loop():
            alone = self._in_the_loop(self.loop.decoder(None), "verifier alone", {"drafter": None}, temperature, 1)
            self.references[temperature] = alone.completions
        self._prompt_lookup()
        for drafter in self.drafters:
            self._drafter_in_the_loop(drafter)

    def _greedy_through_the_engine(self) -> None:
        """References, greedy cells, and speed beside the verifier alone; at most two engines live at a time."""
        with ExitStack() as stack:
            alone = _Lazy(self.engine, stack)
            key: dict[str, Any] = {"by": "engine", "drafter": None}
            self.references[0.0] = self._through(alone, key, "evaluate: verifier alone")
            for drafter in self.drafters:
                for count in self.draft_tokens(drafter):
                    with ExitStack() as inner:
                        drafted = _Lazy(replace(self.engine, speculative=drafter.speculative(count)), inner)
                        key = {"by": "engine", "drafter": drafter.content, "draft_tokens": count}
                        completions = self._through(drafted, key, f"evaluate: {drafter.name}, K = {count}")
                        self.cells.append(Cell(drafter.name, 0.0, count, "engine", count == drafter.trained, completions))
                        self._speed(alone, drafted, drafter, count, key)

    def _through(self, engine: _Lazy, key: dict[str, Any], desc: str) -> list[Completion]:
        def make() -> list[dict[str, Any]]:
            process = engine.process()
            process.desc = desc
            return completions_to_json(process.generate(self.requests))

        return completions_from_json(self.store.get({**key, "what": "completions"}, make))

    def _speed(self, alone: _Lazy, drafted: _Lazy, drafter: Drafter, count: int, key: dict[str, Any]) -> None:
        """Paired speed at each batch size."""
        for batch_size in self.batch_sizes():

            def make(batch_size: int = batch_size) -> Any:
                groups = self.groups(batch_size)
                for engine in (alone, drafted):
                    engine.timed([replace(request, max_tokens=WARM_UP_TOKENS) for request in groups[0]])
                desc = f"evaluate: {drafter.name}, K = {count}, speed, {batch_size} at a time"
                return pairs_to_json(measure(alone.timed, drafted.timed, groups, self.settings.repeats, desc))

            pairs = pairs_from_json(self.store.get({**key, "what": "speed", "batch_size": batch_size}, make))
            self.speeds.append({"drafter": drafter.name, "draft_tokens": count, "batch_size": batch_size, **summarise(pairs)})

    def _in_the_loop(self, decoder: Decoder, name: str, key: dict[str, Any], temperature: float, count: int) -> own_loop.Run:
        desc = f"evaluate: {name}, temperature {temperature:g}" + (f", K = {count}" if decoder.proposer is not None else "")
        return own_loop.decode(decoder, self.requests, temperature, count, self.settings.batch_size, self.store, key, desc)

    def _prompt_lookup(self) -> None:
        """With and without the guard, with as many drafts as the drafters have."""
        settings = self.settings
        most = max(drafter.trained for drafter in self.drafters)
        for name in (GUARDED, UNGUARDED):
            # Without its guard prompt lookup is shown once, to see what the guard does.
            for temperature in sorted(set(settings.temperatures)) if name == GUARDED else [0.0]:
                decoder = self.loop.decoder(lookup_proposer(name, most, settings.ngram_min, settings.ngram_max))
                key = {"drafter": name, "ngrams": [settings.ngram_min, settings.ngram_max]}
                done = self._in_the_loop(decoder, name, key, temperature, most)
                self.cells.append(Cell(name, temperature, most, "loop", True, done.completions, done.seconds, done.counters))

    def _drafter_in_the_loop(self, drafter: Drafter) -> None:
        """What the engine does not do."""
        drafted = self.loop.decoder(load_proposer(drafter, self.verifier, self.dtype))
        for temperature in self.in_the_loop():
            for count in self.draft_tokens(drafter):
                done = self._in_the_loop(drafted, drafter.name, {"drafter": drafter.content}, temperature, count)
                self.cells.append(Cell(drafter.name, temperature, count, "loop", count == drafter.trained, done.completions, done.seconds, done.counters))
        if self.engine_too:
            self._beside_lookup(drafter, drafted)

    def _beside_lookup(self, drafter: Drafter, drafted: Decoder) -> None:
        """Greedy speed of our own loop beside guarded prompt lookup, one prompt at a time."""
        settings = self.settings

        def make() -> Any:
            drafted.sampling, drafted.scheduler = Sampling(), None
            lookup = self.loop.decoder(lookup_proposer(GUARDED, drafter.trained, settings.ngram_min, settings.ngram_max))
            groups = self.groups(1)
            for decoder in (drafted, lookup):
                own_loop.timed(decoder, [replace(request, max_tokens=WARM_UP_TOKENS) for request in groups[0]])
                decoder.seconds = Seconds()
            desc = f"evaluate: {drafter.name} beside guarded prompt lookup"
            pairs = measure(partial(own_loop.timed, lookup), partial(own_loop.timed, drafted), groups, settings.repeats, desc)
            return {"pairs": pairs_to_json(pairs), "seconds": drafted.seconds.report()}

        key = {"by": "loop", "what": "speed", "drafter": drafter.content, "ngrams": [settings.ngram_min, settings.ngram_max]}
        found = self.store.get(key, make)
        self.lookup_speeds.append({"drafter": drafter.name, "seconds": found["seconds"], **summarise(pairs_from_json(found["pairs"]))})

    def costs(self, drafter: Drafter, verifier: str) -> dict[str, Any]:
        """What the serving plan chooses K by (`stages.serving.speculation`): seconds of a round by batch size and K, and greedy survival for each measured K.

        Args:
            verifier: digest of its identity.
        """
        counts = self.draft_tokens(drafter)
        table = measure_costs(
            self.engine,
            drafter.engine,
            [request.prompt_ids for request in self.speed_requests()],
            batch_sizes=self.batch_sizes(),
            draft_tokens=counts,
            verifier=verifier,
            checkpoint=drafter.content,
            visits=self.settings.repeats,
            desc="evaluate: costs of a round",
        )
        greedy = {cell.draft_tokens: cell.completions for cell in self.cells if cell.drafter == drafter.name and cell.temperature == 0.0}
        return costs_section(table, {count: survival([entry for completion in greedy[count] for entry in completion.rounds], count) for count in counts})

    def counts(self, cell: Cell) -> list[PromptCount]:
        return [prompt_count(completion, self.kinds[completion.id]) for completion in cell.completions]

    def headlines(self, temperature: float) -> list[Cell]:
        """Each drafter, prompt lookup included, at its trained K."""
        return [cell for cell in self.cells if cell.headline and cell.temperature == temperature]

    def report(self) -> dict[str, Any]:
        """Everything measured, with every numerator and denominator, and the verdicts."""
        outputs = {cell.label: compare_outputs(cell.completions, self.references[cell.temperature], self.eos_ids) for cell in self.cells}
        return {
            "drafters": [drafter.name for drafter in self.drafters],
            "dtype": self.engine.dtype,
            "prompts": len(self.requests),
            "max_tokens": self.settings.max_tokens,
            "batch_size": self.settings.batch_size,
            "left_out": {drafter.name: choose_draft_tokens(drafter.trained, self.settings.draft_tokens)[1] for drafter in self.drafters},
            "cells": [self._cell_json(cell, outputs[cell.label]) for cell in self.cells],
            "leads": self._leads(),
            "speed": {"prompts": self.settings.speed_prompts, "max_tokens": self.settings.speed_tokens, "measured": self.speeds},
            "speed_beside_lookup": self.lookup_speeds,
            "verdicts": {drafter.name: self._verdict(drafter) for drafter in self.drafters if self.engine_too},
            "calibration": {drafter.name: drafter.calibration() for drafter in self.drafters},
            "failures": failures(outputs),
        }

    def _cell_json(self, cell: Cell, outputs: dict[str, Any]) -> dict[str, Any]:
        return {
            "drafter": cell.drafter,
            "temperature": cell.temperature,
            "draft_tokens": cell.draft_tokens,
            "by": cell.by,
            "headline": cell.headline,
            "acceptance_length": acceptance_length(self.counts(cell)),
            "interval": macro_interval(self.counts(cell)).as_json(),
            "per_position": positions_by_kind(cell.completions, self.kinds, cell.draft_tokens),
            "outputs": outputs,
            "seconds": cell.seconds,
            "counters": cell.counters or {},
        }

    def _leads(self) -> list[dict[str, Any]]:
        """Each headline over each that is not ahead of it, at every temperature."""
        leads = []
        for temperature in sorted(set(self.settings.temperatures)):
            ranked = sorted(self.headlines(temperature), key=lambda cell: -float(acceptance_length(self.counts(cell))["macro"]))
            for place, first in enumerate(ranked):
                for second in ranked[place + 1 :]:
                    difference = paired_difference(self.counts(first), self.counts(second)).as_json()
                    leads.append({"temperature": temperature, "first": first.drafter, "second": second.drafter, **difference})
        return leads

    def _verdict(self, drafter: Drafter) -> dict[str, Any]:
        alone = next(e for e in self.speeds if (e["drafter"], e["draft_tokens"], e["batch_size"]) == (drafter.name, drafter.trained, 1))
        lookup = next(entry for entry in self.lookup_speeds if entry["drafter"] == drafter.name)
        return judge(alone["ratio"], lookup["ratio"], self.settings.ship_gain, self.settings.drop_gain)


class _Lazy:
    """An engine that starts when it is first needed: where all is stored already, never."""

    def __init__(self, config: EngineConfig, stack: ExitStack) -> None:
        self._config, self._stack = config, stack
        self._process: EngineProcess | None = None

    def process(self) -> EngineProcess:
        if self._process is None:
            self._process = self._stack.enter_context(EngineProcess(self._config, None))
        return self._process

    def timed(self, group: Sequence[Request]) -> Timed:
        """Decode a group together: its tokens and the seconds of the engine, process communication apart."""
        process = self.process()
        process.desc = None
        done = process.generate(list(group))
        return sum(len(completion.token_ids) for completion in done), process.seconds
