"""The engine is vLLM: what a drafter must never change, and what the recorded rounds say about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.decoding.engine import Completion, Request, Round, accepted_prefix
from stages.decoding.isolated import EngineProcess, run_isolated
from stages.decoding.parity import draft_parity
from tests.decoding.pairs import MAX_MODEL_LEN, engine_config, lookup_config, requests, write_drafter
from tests.gate.pair import make_bigram_verifier
from tests.tiny import EOS_TOKEN_ID

PROMPTS = requests()

DRAFTERS: dict[str, dict[str, Any]] = {
    "vanilla": {"plant": "bigrams"},
    "reduced": {"plant": "bigrams", "draft_ids": torch.arange(0, 512, 2)},
    "gated": {"markov_head_type": "gated"},
    "rnn from the anchor": {"markov_head_type": "rnn", "sample_from_anchor": True},
    "dflash": {"algorithm": "dflash", "markov_rank": 0, "confidence_head": False, "confidence_head_with_markov": False},
}


class Bench:
    """One verifier, engines that stay alive as long as the module's tests, and each drafter's run over `PROMPTS`."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.verifier = make_bigram_verifier(root / "verifier")
        self.checkpoints: dict[str, Path] = {}
        for name, options in DRAFTERS.items():
            self.checkpoints[name] = write_drafter(root / name.replace(" ", "-"), self.verifier, **options)
        self.plain = stack.enter_context(EngineProcess(engine_config(self.verifier)))
        self.drafted = stack.enter_context(EngineProcess(engine_config(self.verifier, self.checkpoints["vanilla"])))
        self.expected = self.plain.generate(PROMPTS)
        self.runs: dict[str, list[Completion]] = {"vanilla": self.drafted.generate(PROMPTS)}
        for name in DRAFTERS:
            if name not in self.runs:
                self.runs[name] = run_isolated(engine_config(self.verifier, self.checkpoints[name]), [PROMPTS]).completions[0]
        self.runs["prompt lookup"] = run_isolated(lookup_config(self.verifier), [PROMPTS]).completions[0]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(tmp_path_factory.mktemp("engines"), stack)


def check_rounds(request: Request, completion: Completion) -> None:
    """What holds for the rounds of any greedy run."""
    sequence = request.prompt_ids + completion.token_ids
    context = len(request.prompt_ids) + 1
    for number, entry in enumerate(completion.rounds):
        assert entry.context_length == context
        committed = sequence[context : context + entry.committed]
        assert entry.drafted[: entry.accepted] == committed[: entry.accepted]
        cut = entry.committed == entry.accepted
        assert cut or entry.committed == entry.accepted + 1
        assert not cut or number == len(completion.rounds) - 1, "only an end can fall on a drafted token"
        context += entry.committed
    assert context == len(sequence)


def test_accepted_is_the_common_prefix_of_drafts_and_commits() -> None:
    assert accepted_prefix([1, 2, 3], [1, 2, 9]) == 2
    assert accepted_prefix([1, 2, 3], [9]) == 0
    assert accepted_prefix([1, 2, 3], [1, 2, 3, 4]) == 3
    # Cut after the first draft: what lies behind was not committed, whether the verifier agrees or not.
    assert accepted_prefix([1, 2, 3], [1]) == 1
    assert accepted_prefix([], [5]) == 0


@pytest.mark.integration
@pytest.mark.parametrize("name", [*DRAFTERS, "prompt lookup"])
def test_no_drafter_changes_greedy_output_in_fp32(name: str, bench: Bench) -> None:
    assert [done.token_ids for done in bench.runs[name]] == [done.token_ids for done in bench.expected]
    assert [done.id for done in bench.runs[name]] == [request.id for request in PROMPTS]


@pytest.mark.integration
@pytest.mark.parametrize("name", [*DRAFTERS, "prompt lookup"])
def test_rounds_add_up_to_the_output(name: str, bench: Bench) -> None:
    for request, completion in zip(PROMPTS, bench.runs[name], strict=True):
        check_rounds(request, completion)
        if name != "prompt lookup":
            assert all(len(entry.drafted) == 4 for entry in completion.rounds)


@pytest.mark.integration
def test_rounds_without_a_drafter_commit_one_token_each(bench: Bench) -> None:
    for request, completion in zip(PROMPTS, bench.expected, strict=True):
        first = len(request.prompt_ids) + 1
        assert completion.rounds == [Round(first + index, [], 0, 1) for index in range(len(completion.token_ids) - 1)]


@pytest.mark.integration
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_engine_drafts_what_our_own_forward_drafts(name: str, bench: Bench) -> None:
    """Losslessness cannot see a drafter that the engine runs wrongly; this can."""
    parity = draft_parity(bench.checkpoints[name], bench.verifier, [request.prompt_ids for request in PROMPTS], bench.runs[name], 60)
    assert parity.rounds == 60
    assert not [mismatch.line() for mismatch in parity.mismatches if mismatch.gap > 1e-4]


def long_round(bench: Bench) -> tuple[Request, Completion, Round]:
    """A round that accepted at least three drafts, none of them an end, all of its tokens new to the output."""
    for request, completion in zip(PROMPTS, bench.runs["vanilla"], strict=True):
        for entry in completion.rounds[:-1]:
            start = entry.context_length - len(request.prompt_ids)
            output = completion.token_ids
            if entry.accepted >= 3 and output[start + 1] not in output[: start + 1]:
                return request, completion, entry
    raise AssertionError("the planted drafter was expected to have three drafts accepted somewhere")


@pytest.mark.integration
def test_a_stop_token_inside_a_block_cuts_it(bench: Bench) -> None:
    """The engine's own counters count the accepted drafts behind the end; a user never sees those tokens."""
    request, completion, entry = long_round(bench)
    start = entry.context_length - len(request.prompt_ids)
    stopped = replace(request, stop_token_ids=(completion.token_ids[start + 1],))
    (ours,) = bench.drafted.generate([stopped])
    (plain,) = bench.plain.generate([stopped])
    assert ours.token_ids == plain.token_ids == completion.token_ids[: start + 2]
    assert ours.finish_reason == plain.finish_reason == "stop"
    check_rounds(stopped, ours)
    assert (ours.rounds[-1].accepted, ours.rounds[-1].committed) == (2, 2)
    assert len(ours.rounds[-1].drafted) == 4


@pytest.mark.integration
def test_the_models_own_end_inside_a_block_cuts_it_unless_ignored(bench: Bench, tmp_path: Path) -> None:
    """The end tokens are not named in the request: the engine reads them, all of them, from the model's generation config."""
    request, completion, entry = long_round(bench)
    start = entry.context_length - len(request.prompt_ids)
    verifier = shutil.copytree(bench.verifier, tmp_path / "verifier")
    end = completion.token_ids[start + 1]
    (verifier / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_TOKEN_ID, end]}))
    with EngineProcess(engine_config(verifier, bench.checkpoints["vanilla"])) as engine:
        ours, going_on = engine.generate([request, replace(request, ignore_eos=True)])
    assert ours.token_ids == completion.token_ids[: start + 2]
    assert ours.finish_reason == "stop"
    check_rounds(request, ours)
    assert (ours.rounds[-1].accepted, ours.rounds[-1].committed) == (2, 2)
    assert len(going_on.token_ids) == request.max_tokens


@pytest.mark.integration
def test_max_tokens_inside_a_block_cuts_it(bench: Bench) -> None:
    request, completion, entry = long_round(bench)
    start = entry.context_length - len(request.prompt_ids)
    limited = replace(request, max_tokens=start + 1)
    (ours,) = bench.drafted.generate([limited])
    assert ours.token_ids == completion.token_ids[: start + 1]
    assert ours.finish_reason == "length"
    check_rounds(limited, ours)
    assert (ours.rounds[-1].accepted, ours.rounds[-1].committed) == (1, 1)
    (one,) = bench.drafted.generate([replace(request, max_tokens=1)])
    assert one.token_ids == completion.token_ids[:1]
    assert one.rounds == []


@pytest.mark.integration
def test_the_models_length_ends_the_output_and_nothing_is_counted_that_no_drafter_drafted(bench: Bench) -> None:
    """Near its end vLLM verifies zeros for the whole batch instead of drafts."""
    prompts = [replace(request, max_tokens=1000, ignore_eos=True) for request in PROMPTS[:3]]
    for request, ours, plain in zip(prompts, bench.drafted.generate(prompts), bench.plain.generate(prompts), strict=True):
        assert ours.token_ids == plain.token_ids
        assert ours.finish_reason == "length"
        assert len(request.prompt_ids) + len(ours.token_ids) == MAX_MODEL_LEN
        check_rounds(request, ours)
        assert not [entry for entry in ours.rounds if entry.drafted and not any(entry.drafted)]
        assert not any(entry.drafted for entry in ours.rounds[-1:])


@pytest.mark.integration
def test_who_else_is_in_the_batch_changes_nothing(bench: Bench) -> None:
    alone = [bench.drafted.generate([request])[0] for request in PROMPTS[:3]]
    assert alone == bench.runs["vanilla"][:3]


@pytest.mark.integration
def test_logprobs_name_the_chosen_token_first(bench: Bench) -> None:
    for engine in (bench.plain, bench.drafted):
        for done in engine.generate([replace(request, logprobs=3) for request in PROMPTS[:2]]):
            assert done.logprobs is not None
            assert [max(position, key=position.__getitem__) for position in done.logprobs] == done.token_ids
            assert all(len(position) == 3 for position in done.logprobs)


@pytest.mark.integration
def test_a_seeded_sample_is_the_same_again(bench: Bench) -> None:
    sampled = [replace(request, temperature=1.0, seed=7) for request in PROMPTS[:2]]
    first = bench.plain.generate(sampled)
    assert [done.token_ids for done in first] == [done.token_ids for done in bench.plain.generate(sampled)]
    assert [done.token_ids for done in first] != [done.token_ids for done in bench.expected[:2]]
