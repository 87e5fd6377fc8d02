"""Reports as evaluate and compare write them, from simulated rounds: no engine needed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from stages.dataset import TokenSample
from stages.decoding.engine import Completion, EngineConfig, Round
from stages.evaluate.headline import headline
from stages.evaluate.measure import Cell, Evaluation
from stages.evaluate.speed import Pair, summarise
from stages.evaluate.store import Store
from stages.evaluate.subjects import GUARDED, UNGUARDED, Drafter
from stages.params import Evaluate

RATES = {"code": 0.5, "dialogue": 0.3, "fact": 0.35, "math": 0.45, "story": 0.25}
SECONDS = {"prompts": 1.0, "verifier": 6.0, "drafter": 3.0, "head": 0.5, "other": 0.4, "rounds": 100, "overhead": 0.04, "head_share": 0.05}
DRAFT_TOKENS = 7


def samples(per_kind: int = 3) -> dict[str, list[TokenSample]]:
    """Prompts of each kind."""
    return {kind: [TokenSample(f"{kind}-{index}", kind, [5, 6, 7], [0, 0, 0], 3, 1, []) for index in range(per_kind)] for kind in RATES}


def simulated(chosen: dict[str, list[TokenSample]], scale: float, seed: int, draft_tokens: int = DRAFT_TOKENS, tokens: int = 60) -> list[Completion]:
    """Completions of all prompts whose drafts are accepted with the kind's rate times `scale`."""
    generator = random.Random(seed)
    completions = []
    for kind, group in chosen.items():
        for sample in group:
            rounds, done = [], 0
            while done < tokens:
                accepted = 0
                while accepted < draft_tokens and generator.random() < RATES[kind] * scale:
                    accepted += 1
                rounds.append(Round(20 + done, [1] * draft_tokens, accepted, accepted + 1))
                done += accepted + 1
            completions.append(Completion(sample.id, list(range(10, 10 + done)), "length", rounds))
    return completions


def drafter(name: str, trained: int = DRAFT_TOKENS) -> Drafter:
    return Drafter(name, Path("nowhere"), "dspark", "1" * 64, {"method": "dflash", "num_speculative_tokens": trained})


def measured(scales: dict[str, float], settings: Evaluate | None = None, broken: bool = False) -> Evaluation:
    """An evaluation of drafters named and scaled so, as if it had run; `broken`: the first says nothing at temperature 1."""
    settings = settings or Evaluate(draft_tokens=[2, 4, 15], temperatures=[0.0, 1.0])
    chosen = samples()
    engine = EngineConfig("nowhere", "bfloat16", 256, 8, 1 << 20)
    evaluation = Evaluation([drafter(name) for name in scales], chosen, Path("nowhere"), engine, settings, Store(None, {}))
    evaluation.eos_ids = frozenset({2})
    evaluation.references = {temperature: simulated(chosen, 0.0, 99) for temperature in settings.temperatures}
    for place, (name, scale) in enumerate(scales.items()):
        for temperature in settings.temperatures:
            for count in evaluation.draft_tokens(evaluation.drafters[place]):
                done = simulated(chosen, scale * (1.0 - 0.2 * temperature), 10 * place + count, count)
                if broken and place == 0 and temperature:
                    done = [Completion(completion.id, [2], "stop", []) for completion in done]
                by, seconds = ("loop", SECONDS) if temperature else ("engine", None)
                evaluation.cells.append(Cell(name, temperature, count, by, count == DRAFT_TOKENS, done, seconds))
        for count in evaluation.draft_tokens(evaluation.drafters[place]):
            for batch_size in settings.batch_sizes:
                pairs = [Pair((240, 8.0 / batch_size + 0.1 * repeat), (240, (7.0 - 2 * scale) / batch_size**0.6)) for repeat in range(3)]
                evaluation.speeds.append({"drafter": name, "draft_tokens": count, "batch_size": batch_size, **summarise(pairs)})
        pairs = [Pair((240, 7.0 + 0.1 * repeat), (240, 6.0)) for repeat in range(3)]
        evaluation.lookup_speeds.append({"drafter": name, "seconds": SECONDS, **summarise(pairs)})
    for name, scale in ((GUARDED, 0.5), (UNGUARDED, 0.7)):
        for temperature in settings.temperatures if name == GUARDED else [0.0]:
            done = simulated(chosen, scale, 7)
            evaluation.cells.append(Cell(name, temperature, DRAFT_TOKENS, "loop", True, done, SECONDS, {"guarded_tokens": 12} if name == GUARDED else {}))
    return evaluation


def calibrated() -> dict[str, Any]:
    """A calibration that a drafter brings along."""
    rows = []
    for position in range(1, DRAFT_TOKENS + 1):
        bins = [{"count": 100 // bin_, "predicted": 0.1 * bin_ - 0.05, "survived": 0.1 * bin_ - 0.05 + 0.01 * (-1) ** bin_} for bin_ in range(1, 11)]
        bold = [{**entry, "survived": entry["predicted"] ** 1.5} for entry in bins]
        errors = {"ece_before": 0.08 / position, "ece_after": 0.01}
        rows.append({"position": position, "blocks": 900, "survived": 0.3, **errors, "reliability_before": bold, "reliability_after": bins})
    return {"greedy": {"fitted_on": 1000, "held_out": rows}, "sampled": {"fitted_on": 1000, "held_out": rows}}


def make_report(scale: float = 1.0, settings: Evaluate | None = None, broken: bool = False) -> dict[str, Any]:
    """The stage's."""
    report = measured({"drafter": scale}, settings, broken).report()
    report["calibration"]["drafter"] = calibrated()
    return {"verifier": "0" * 64, "checkpoint": "1" * 64, **headline(report, "drafter")}


def make_comparison(engine_too: bool = True) -> dict[str, Any]:
    """Of three drafters."""
    evaluation = measured({"dspark": 1.3, "dflash": 1.1, "eagle3": 0.9})
    evaluation.engine_too = engine_too
    if not engine_too:
        evaluation.speeds, evaluation.lookup_speeds = [], []
    report = evaluation.report()
    report["calibration"]["dspark"] = calibrated()
    return {"verifier": "0" * 64, "checkpoints": {}, **report}
