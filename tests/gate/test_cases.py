"""The gate decodes what it says it decodes: all kinds, several turns, a long prompt, and ends inside a block."""

from __future__ import annotations

import pytest

from stages.dataset import TokenSample, choose_per_kind
from stages.decoding.engine import Completion, Request, Round
from stages.errors import DraftlineError
from stages.gate.__main__ import make_cases
from stages.gate.cases import BLOCK_CASES, LIMITS, LONG_PROMPT, Case, block_cases, coverage, held_out, long_prompt, short_limits
from stages.params import Gate

EOS = 2


def sample(name: str, kind: str = "story", turns: int = 1, prompt: int = 6, answer: int = 5) -> TokenSample:
    ids = list(range(100, 100 + prompt + answer))
    return TokenSample(name, kind, ids, [0] * prompt + [1] * answer, prompt, turns, [])


def case(name: str = "a", prompt: int = 4, max_tokens: int = 32) -> Case:
    return Case(Request(name, list(range(prompt)), max_tokens), "story", "held-out", 1)


def test_the_choice_is_stable_and_holds_every_kind() -> None:
    samples = [sample(f"{kind}{index}", kind) for kind in ("story", "code", "math") for index in range(5)]
    chosen = choose_per_kind(samples, 2)
    assert {kind: len(group) for kind, group in chosen.items()} == {"code": 2, "math": 2, "story": 2}
    assert chosen == choose_per_kind(reversed(samples), 2)
    assert choose_per_kind([*samples, sample("story9")], 2)["code"] == chosen["code"]


def test_a_conversation_of_several_turns_is_added_when_the_choice_holds_none() -> None:
    samples = [sample("a"), sample("b"), sample("long talk", "dialogue", turns=3)]
    cases = held_out({"story": samples[:2]}, samples, 16)
    assert [(c.request.id, c.why, c.turns) for c in cases] == [("a", "held-out", 1), ("b", "held-out", 1), ("long talk", "multi-turn", 3)]
    assert [c.why for c in held_out({"dialogue": [samples[2]]}, samples, 16)] == ["held-out"]
    assert [c.why for c in held_out({"story": samples[:2]}, samples[:2], 16)] == ["held-out", "held-out"]


def test_the_long_prompt_is_longer_than_a_thousand_tokens_and_ends_with_a_real_prompt() -> None:
    samples = [sample("a", prompt=40, answer=60), sample("b", prompt=30, answer=90)]
    request = long_prompt(samples, 96, 2048).request
    assert len(request.prompt_ids) == LONG_PROMPT > 1000
    assert request.prompt_ids[-30:] == samples[1].prompt_ids


def test_the_long_prompt_leaves_a_short_engine_room_for_the_answer() -> None:
    request = long_prompt([sample("a", prompt=40, answer=60)], 96, 256).request
    assert len(request.prompt_ids) + request.max_tokens == 256


def test_two_blocks_fit_behind_every_case() -> None:
    """Where the next one does not fit behind one sequence of a batch, vLLM drafts for none of it: the others' drafts would be called wrong."""
    samples = [sample("a", prompt=40, answer=60), sample("near the end", prompt=150)]
    cases = make_cases(samples, Gate(max_tokens=96), 256, draft_tokens=7)
    # In the last pass of a sequence all but one of its tokens are committed; K drafts are verified, the next pass asks for K + 1 slots.
    assert max(len(case.request.prompt_ids) + case.request.max_tokens - 1 for case in cases) + 7 + 7 + 1 <= 256
    assert not any(case.request.id.startswith("near the end") for case in cases)
    with pytest.raises(DraftlineError, match=r"engine\.max_model_len = 128: .*\(40 tokens\).* need 150$"):
        make_cases(samples, Gate(max_tokens=96), 128, draft_tokens=7)


def test_short_limits_hold_ends_that_no_block_boundary_explains() -> None:
    cases = short_limits([case("a"), case("b")])
    assert [c.request.max_tokens for c in cases] == list(LIMITS)
    assert len({c.request.id for c in cases}) == len(LIMITS)
    assert short_limits([]) == []


def test_blocks_of_the_drafted_run_are_cut_on_an_accepted_draft() -> None:
    output = [10, 11, 12, 13, 14, 15, 16, 17]
    rounds = [
        Round(5, [11, 90, 91], 1, 2),  # commits 11, 12
        Round(7, [13, 14, 15], 3, 4),  # commits 13 14 15 16
        Round(11, [17, 1, 1], 1, 1),
    ]
    limit, stop = block_cases([case()], [Completion("a", output, "length", rounds)])
    assert (limit.why, limit.request.max_tokens) == ("block-limit", 4)
    assert output[:4] == [10, 11, 12, 13]
    assert (stop.why, stop.request.stop_token_ids, stop.request.max_tokens) == ("block-stop", (13,), 32)


def test_a_stop_token_that_occurs_before_the_block_is_not_used() -> None:
    output = [13, 14, 13, 14, 15, 16, 9]
    rounds = [Round(5, [14, 0, 0], 1, 2), Round(7, [14, 15, 16], 3, 4)]
    # The best block repeats 14 first, so 15 is the first token that stops inside it.
    stops = [c for c in block_cases([case()], [Completion("a", output, "length", [*rounds, Round(11, [], 0, 1)])]) if c.why == "block-stop"]
    assert [c.request.stop_token_ids for c in stops] == [(15,)]


def test_without_any_accepted_draft_the_verifiers_own_token_stops_with_drafts_behind_it() -> None:
    rounds = [Round(5, [90, 91], 0, 1), Round(6, [92, 93], 0, 1), Round(7, [94, 95], 0, 1)]
    made = block_cases([case()], [Completion("a", [10, 11, 12, 13], "length", rounds)])
    assert [(c.why, c.request.max_tokens, c.request.stop_token_ids) for c in made] == [("block-limit", 2, ()), ("block-stop", 32, (11,))]


def test_at_most_a_few_blocks_are_cut_and_prompts_without_rounds_give_none() -> None:
    rounds = [Round(5, [11, 12], 2, 3), Round(8, [1], 0, 1)]
    cases = [case(str(index)) for index in range(6)]
    completions = [Completion(str(index), [10, 11, 12, 13, 14], "length", rounds) for index in range(6)]
    made = block_cases(cases, completions)
    assert [c.why for c in made] == ["block-limit"] * BLOCK_CASES + ["block-stop"] * BLOCK_CASES
    assert block_cases([case()], [Completion("a", [10], "length", [])]) == []


def test_coverage_counts_what_the_rounds_show() -> None:
    cases = [case(name) for name in "abcde"]
    stop = Case(Request("f", [1] * 2000, 32, stop_token_ids=(12,)), "math", "block-stop", 2)
    completions = [
        Completion("a", [10, 11], "length", [Round(5, [11, 12, 13], 1, 1)]),  # cut on an accepted draft
        Completion("b", [10, 11], "length", [Round(5, [90, 91, 92], 0, 1)]),  # drafts behind the end, none accepted
        Completion("c", [10, 11, EOS], "stop", [Round(5, [11, EOS, 13], 2, 2)]),
        Completion("d", [10, 11, EOS], "stop", [Round(5, [11], 1, 2)]),  # bonus token: nothing drafted behind it
        Completion("e", [10], "length", []),
        Completion("f", [10, 12], "stop", [Round(2001, [90, 1], 0, 1)]),
    ]
    seen = coverage([*cases, stop], completions)
    assert seen == {
        "kinds": {"math": 1, "story": 5},
        "multi_turn": 1,
        "longest_prompt": 2000,
        "ends": {
            "eos": {"inside_block": 1, "on_accepted_draft": 1},
            "stop_token": {"inside_block": 1, "on_accepted_draft": 0},
            "max_tokens": {"inside_block": 2, "on_accepted_draft": 1},
        },
    }
