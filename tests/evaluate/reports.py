"""A report as evaluate writes it, from simulated rounds: no engine needed."""

from __future__ import annotations

import random
from typing import Any

from stages.decoding.engine import Completion, Round
from stages.evaluate.acceptance import positions_by_kind, prompt_count
from stages.evaluate.speed import Pair, summarise
from stages.evaluate.statistics import acceptance_length, paired_difference

RATES = {"code": 0.5, "dialogue": 0.3, "fact": 0.35, "math": 0.45, "story": 0.25}


def simulated(scale: float, seed: int, draft_tokens: int = 7, tokens: int = 60) -> tuple[list[Completion], dict[str, str]]:
    """Completions of three prompts per kind whose drafts are accepted with the kind's rate times `scale`."""
    generator = random.Random(seed)
    completions, kinds = [], {}
    for kind, chance in RATES.items():
        for index in range(3):
            rounds, done = [], 0
            while done < tokens:
                accepted = 0
                while accepted < draft_tokens and generator.random() < chance * scale:
                    accepted += 1
                rounds.append(Round(20 + done, [1] * draft_tokens, accepted, accepted + 1))
                done += accepted + 1
            completions.append(Completion(f"{kind}-{index}", [1] * done, "length", rounds))
            kinds[f"{kind}-{index}"] = kind
    return completions, kinds


def make_report(scale: float = 1.0) -> dict[str, Any]:
    (ours, kinds), (theirs, _) = simulated(scale, 0), simulated(0.8 * scale, 1)
    first, second = ([prompt_count(completion, kinds[completion.id]) for completion in group] for group in (ours, theirs))
    pairs = [Pair((240, 8.0 + 0.1 * repeat), (240, 7.0)) for repeat in range(3)]
    return {
        "verifier": "0" * 64,
        "checkpoint": "1" * 64,
        "dtype": "bfloat16",
        "draft_tokens": 7,
        "prompts": len(kinds),
        "max_tokens": 64,
        "acceptance_length": acceptance_length(first),
        "per_position": positions_by_kind(ours, kinds, 7),
        "prompt_lookup": {
            "ngram_min": 1,
            "ngram_max": 3,
            "acceptance_length": acceptance_length(second),
            "per_position": positions_by_kind(theirs, kinds, 7),
        },
        "lead_over_prompt_lookup": paired_difference(first, second, resamples=100).as_json(),
        "speed": {"prompts": 5, "max_tokens": 64, **summarise(pairs)},
    }
