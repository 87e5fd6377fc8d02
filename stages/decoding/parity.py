"""Does the engine draft what our own forward drafts? Greedy, fp32, the same K.

A drafter that the engine runs wrongly (positions, causality, a tapped layer off by one, the Markov chain started from
the wrong token) is still lossless: it only stops being accepted. So the drafts themselves are compared: the rounds that an
fp32 engine run recorded, against `stages.drafters` on hidden states of the verifier as transformers runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from stages.decoding.engine import Completion, Round
from stages.drafters.algorithms import checkpoint_algorithm
from stages.drafters.draft import Drafts
from stages.pairing.frozen import load_frozen


@dataclass(frozen=True)
class DraftMismatch:
    """The first slot of a round where the two drafts differ; what follows it hangs on it and is not compared.

    Attributes:
        request: the completion's id. context_length: the round's. slot: from 0.
        engine, ours: the drafted tokens.
        margin: our logit of `ours` minus our next best: small at a near-tie.
        gap: our logit of `ours` minus ours of `engine`; infinite where the drafter cannot propose that token, or has no logits (prompt lookup).
    """

    request: str
    context_length: int
    slot: int
    engine: int
    ours: int
    margin: float
    gap: float

    def line(self) -> str:
        """For people."""
        return (
            f"{self.request}: after {self.context_length} tokens, slot {self.slot}: "
            f"engine {self.engine}, ours {self.ours} (margin {self.margin:.2g}, gap {self.gap:.2g})"
        )


@dataclass(frozen=True)
class Parity:
    """`rounds` and `tokens` compared; `mismatches`, at most one per round."""

    rounds: int
    tokens: int
    mismatches: list[DraftMismatch]


def choose_rounds(completions: Sequence[Completion], limit: int) -> list[list[Round]]:
    """At most `limit` rounds with drafts, evenly over all rounds of all completions; one list per completion."""
    drafted = [(index, entry) for index, completion in enumerate(completions) for entry in completion.rounds if entry.drafted]
    count = min(limit, len(drafted))
    chosen: list[list[Round]] = [[] for _ in completions]
    for place in range(count):
        index, entry = drafted[place * len(drafted) // count]
        chosen[index].append(entry)
    return chosen


def aux_hidden_states(model: Any, token_ids: Sequence[int], layer_ids: Sequence[int]) -> Tensor:
    """`[T, L·H]` aux hidden states of one sequence.

    Args:
        model: a decoder of transformers without its head (`AutoModel`).
        layer_ids: id i is the input of layer i; the number of layers is the last layer's output before the final norm.
    """
    last: list[Tensor] = []
    # Transformers' last hidden state is already normed; what enters the norm is the residual stream.
    handle = model.norm.register_forward_pre_hook(lambda _module, args: last.append(args[0]))
    try:
        states = model(torch.tensor([list(token_ids)], device=model.device), output_hidden_states=True, use_cache=False).hidden_states
    finally:
        handle.remove()
    streams = [*states[:-1], last[0]]
    return torch.cat([streams[layer][0] for layer in layer_ids], dim=-1)


def anchor_positions(rounds: Sequence[Round]) -> Tensor:
    """`[A]`: the anchor of a round is the last token of its context."""
    return torch.tensor([entry.context_length - 1 for entry in rounds])


def compare_rounds(drafts: Drafts, draft_ids: Tensor | None, rounds: Sequence[Round], request: str) -> list[DraftMismatch]:
    """Compare rounds of one completion with our `drafts` from the same anchors.

    Args:
        draft_ids: `[D]` verifier ids of the logits; None without logits.
    """
    found = []
    for number, entry in enumerate(rounds):
        ours: list[int] = drafts.tokens[number].tolist()
        slot = next((place for place, token in enumerate(entry.drafted) if token != ours[place]), None)
        if slot is None:
            continue
        margin, gap = 0.0, float("inf")
        if drafts.logits is not None and draft_ids is not None:
            logits = drafts.logits[number, slot]
            best, second = logits.topk(2).values.tolist()
            column = (draft_ids == entry.drafted[slot]).nonzero().flatten().tolist()
            margin = best - second
            gap = best - float(logits[column[0]]) if column else float("inf")
        found.append(DraftMismatch(request, entry.context_length, slot, entry.drafted[slot], ours[slot], margin, gap))
    return found


@torch.no_grad()
def draft_parity(
    checkpoint: Path,
    verifier: Path,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    max_rounds: int,
    trust_remote_code: bool = False,
    desc: str | None = None,
) -> Parity:
    """Compare an engine's drafts with our own.

    Args:
        checkpoint: the drafter's directory that the engine ran. verifier: its directory.
        prompts: token ids, in the order of `completions`: an fp32 run with the drafter.
        max_rounds: rounds to compare, evenly over the run.
        desc: name of the progress bar on stderr; None: no bar.
    """
    algorithm = checkpoint_algorithm(checkpoint)
    drafter = algorithm.load(checkpoint, load_frozen(verifier, torch.float32), torch.float32)
    # Prompt lookup has settings in place of a model with a configuration.
    layer_ids: list[int] = getattr(drafter, "config", drafter).layer_ids
    model = _verifier(verifier, trust_remote_code) if layer_ids else None
    chosen = choose_rounds(completions, max_rounds)
    mismatches: list[DraftMismatch] = []
    for prompt, completion, rounds in tqdm(list(zip(prompts, completions, chosen, strict=True)), desc=desc, unit="prompt", disable=desc is None):
        if not rounds:
            continue
        tokens = [*prompt, *completion.token_ids][: max(entry.context_length for entry in rounds)]
        # One pass for all rounds: the verifier is causal, a round sees the states before its anchor.
        context = aux_hidden_states(model, tokens, layer_ids) if model is not None else None
        drafts = algorithm.redraft(drafter, tokens, context, anchor_positions(rounds))
        mismatches.extend(compare_rounds(drafts, getattr(drafter, "draft_ids", None), rounds, completion.id))
    return Parity(sum(map(len, chosen)), sum(len(entry.drafted) for rounds in chosen for entry in rounds), mismatches)


def _verifier(directory: Path, trust_remote_code: bool) -> Any:
    """The decoder in fp32, without its head."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()
    # Transformers leaves the scales of a quantised checkpoint in their own dtype, and refuses `model.float()`.
    torch.nn.Module.float(model)
    return model
