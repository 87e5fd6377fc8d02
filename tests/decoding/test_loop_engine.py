"""Our loop against the engine that serves: the same drafts, the same acceptance in every round, the same tokens. Greedy, fp32."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.decoding.engine import Completion, Request
from stages.decoding.isolated import run_isolated
from stages.decoding.loop import Decoder
from stages.decoding.ngram import NgramProposer
from stages.decoding.parity import draft_parity
from stages.decoding.stopping import Prompt
from tests.decoding.loops import SHAPES, K, Pair
from tests.decoding.pairs import MAX_MODEL_LEN, engine_config, lookup_config, requests

pytestmark = pytest.mark.integration

PROMPTS = requests(5, max_tokens=32)


def ours(pair: Pair, name: str, batch_size: int = 5) -> list[Completion]:
    proposer: Any = NgramProposer(K, 1, 3) if name == "prompt lookup" else pair.proposer(name)
    decoder = Decoder(pair.model, proposer, max_length=MAX_MODEL_LEN)
    return decoder.decode([Prompt(request.id, request.prompt_ids, request.max_tokens) for request in PROMPTS], batch_size)


def compare(found: list[Completion], engine: list[Completion], requests: list[Request]) -> None:
    """Equal tokens and equal rounds: drafts, how many of them were accepted, and what was committed."""
    for mine, theirs, request in zip(found, engine, requests, strict=True):
        assert mine.token_ids == theirs.token_ids, request.id
        assert mine.finish_reason == theirs.finish_reason
        # An engine may draft nothing behind an end; every other round must be the same to the token.
        assert [asdict(entry) for entry in mine.rounds] == [asdict(entry) for entry in theirs.rounds], request.id


def test_prompt_lookup_rounds_are_the_engines(pair: Pair) -> None:
    engine = run_isolated(lookup_config(pair.directory), [PROMPTS]).completions[0]
    compare(ours(pair, "prompt lookup"), engine, PROMPTS)
    assert any(entry.accepted for done in engine for entry in done.rounds)


@pytest.mark.parametrize("name", ["dspark", "dspark, reduced vocabulary", "dflash"])
def test_block_rounds_are_the_engines(pair: Pair, name: str) -> None:
    engine = run_isolated(engine_config(pair.directory, pair.checkpoints[name]), [PROMPTS]).completions[0]
    compare(ours(pair, name), engine, PROMPTS)


def test_draft_model_rounds_are_the_engines(pair: Pair) -> None:
    speculative = {"method": "draft_model", "model": str(pair.draft_directory), "num_speculative_tokens": K}
    engine = run_isolated(engine_config(pair.directory, speculative), [PROMPTS]).completions[0]
    compare(ours(pair, "draft model"), engine, PROMPTS)


@pytest.mark.parametrize("name", SHAPES)
def test_block_drafts_are_those_of_one_pass_over_the_verifiers_states(pair: Pair, name: str, tmp_path: Path) -> None:
    """No engine: taps, cache and chain of the loop against `output_hidden_states` and `greedy_drafts`."""
    with torch.inference_mode():
        found = ours(pair, name, 3)
    parity = draft_parity(pair.checkpoints[name], pair.directory, [request.prompt_ids for request in PROMPTS], found, 40)
    assert parity.rounds == 40
    assert not [mismatch.line() for mismatch in parity.mismatches if mismatch.gap > 1e-4]
