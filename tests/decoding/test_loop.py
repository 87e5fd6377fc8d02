"""Speculation never changes greedy output: every proposer, over the cases in which a block can go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.decoding.engine import Completion
from stages.decoding.loop import Decoder
from stages.decoding.proposer import DecodingError, Offer, PositionError, Proposal, Sampling
from stages.decoding.stopping import Prompt, visible_text
from tests.decoding.loops import PROPOSERS, SHAPES, K, Pair, plain_greedy, prefix_until, random_prompts
from tests.tiny import EOS_TOKEN_ID

LIMIT = 24
PROMPTS = random_prompts(6, LIMIT)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def endless(pair: Pair) -> list[list[int]]:
    """What greedy decoding without any cache says to each of `PROMPTS` when nothing ends it: every other output is a prefix of it."""
    return [plain_greedy(pair.model, prompt.token_ids, 48) for prompt in PROMPTS]


def ended(output: list[int], max_tokens: int = LIMIT, ends: Sequence[int] = (EOS_TOKEN_ID,)) -> list[int]:
    """The part of an endless output before one of `ends`, that included, or before the limit."""
    return prefix_until(output[:max_tokens], lambda prefix: prefix[-1] in ends)


@pytest.fixture(scope="module")
def expected(endless: list[list[int]]) -> list[list[int]]:
    """Greedy output of `PROMPTS`."""
    return [ended(output) for output in endless]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [done.token_ids for done in completions]


def check_rounds(prompt: Prompt, done: Completion) -> None:
    """What holds for the rounds of any run: they add up to the output, and accepted drafts are what was committed."""
    sequence = prompt.token_ids + done.token_ids
    context = len(prompt.token_ids) + 1
    for number, entry in enumerate(done.rounds):
        assert entry.context_length == context
        assert entry.drafted[: entry.accepted] == sequence[context : context + entry.accepted]
        cut = entry.committed == entry.accepted
        assert cut or entry.committed == entry.accepted + 1
        assert not cut or number == len(done.rounds) - 1
        context += entry.committed
    assert context == len(sequence)


@pytest.mark.parametrize("batch_size", [1, 3, 6])
def test_the_verifier_alone_is_plain_greedy_decoding(pair: Pair, expected: list[list[int]], batch_size: int) -> None:
    done = pair.decoder(None).decode(PROMPTS, batch_size)
    assert tokens(done) == expected
    assert [entry.id for entry in done] == [prompt.id for prompt in PROMPTS]
    for prompt, entry in zip(PROMPTS, done, strict=True):
        check_rounds(prompt, entry)
        assert all(not each.drafted and each.committed == 1 for each in entry.rounds)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", PROPOSERS)
def test_no_proposer_changes_greedy_output(pair: Pair, expected: list[list[int]], name: str, batch_size: int) -> None:
    done = pair.decoder(name).decode(PROMPTS, batch_size)
    assert tokens(done) == expected
    for prompt, entry in zip(PROMPTS, done, strict=True):
        check_rounds(prompt, entry)
    accepted = {each.accepted for entry in done for each in entry.rounds}
    if name in ("dspark", "draft model"):
        assert min(accepted) == 0 < 2 <= max(accepted), "the pair was made to have drafts refused and drafts accepted"


def test_a_draft_model_that_is_the_verifier_is_always_right(pair: Pair) -> None:
    (done,) = pair.decoder("itself").decode([replace(PROMPTS[0], ignore_eos=True)])
    assert all(entry.accepted == K for entry in done.rounds[:-1])


def cases(expected: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Ends that fall into a block: option of the prompts → value. The first prompt's output tells which tokens come."""
    output = expected[0]
    return {
        "stop token": {"stop_token_ids": (output[7],)},
        "several stop tokens": {"stop_token_ids": (output[9], output[6], 5)},
        "stop at the first token": {"stop_token_ids": (output[0],)},
        "one token": {"max_tokens": 1},
        "two tokens": {"max_tokens": 2},
        "limit in a block": {"max_tokens": 9},
        "ignore eos": {"ignore_eos": True, "max_tokens": 40},
    }


@pytest.mark.parametrize("case", cases([[0] * 10]))
@pytest.mark.parametrize("name", PROPOSERS)
def test_an_end_inside_a_block_cuts_it(pair: Pair, endless: list[list[int]], name: str, case: str) -> None:
    options = cases(endless)[case]
    prompts = [replace(prompt, **options) for prompt in PROMPTS[:4]]
    wanted = []
    for prompt, output in zip(prompts, endless, strict=False):
        ends = (*prompt.stop_token_ids, *(() if prompt.ignore_eos else (EOS_TOKEN_ID,)))
        wanted.append(ended(output, prompt.max_tokens, ends))
    done = pair.decoder(name).decode(prompts, 4)
    assert tokens(done) == wanted
    for prompt, entry in zip(prompts, done, strict=True):
        check_rounds(prompt, entry)
        stopped = entry.token_ids[-1] in prompt.stop_token_ids or (entry.token_ids[-1] == EOS_TOKEN_ID and not prompt.ignore_eos)
        assert entry.finish_reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("name", PROPOSERS)
def test_every_eos_id_of_the_model_ends_the_output(pair: Pair, endless: list[list[int]], name: str) -> None:
    decoder = pair.decoder(name)
    decoder.eos_ids = (EOS_TOKEN_ID, endless[0][5], endless[1][8])
    done = decoder.decode(PROMPTS[:3], 3)
    assert tokens(done) == [ended(output, LIMIT, decoder.eos_ids) for output in endless[:3]]
    assert len(done[0].token_ids) <= 6


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_stop_string_that_lies_across_tokens_ends_the_output(pair: Pair, expected: list[list[int]], name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.directory)
    # The end of one token's text and the beginning of the next one's.
    first, second = (tokenizer.decode([token]) for token in expected[0][6:8])
    string = first[-1:] + second[:1]
    prompts = [replace(prompt, stop_strings=("never there", string)) for prompt in PROMPTS[:3]]
    wanted = [prefix_until(output, lambda prefix: string in tokenizer.decode(prefix)) for output in expected[:3]]
    done = pair.decoder(name, decode=tokenizer.decode).decode(prompts, 3)
    assert tokens(done) == wanted
    assert len(wanted[0]) <= 8
    assert done[0].finish_reason == "stop"
    assert string not in visible_text(tokenizer.decode(done[0].token_ids), prompts[0].stop_strings)
    for prompt, entry in zip(prompts, done, strict=True):
        check_rounds(prompt, entry)


@pytest.mark.parametrize("name", PROPOSERS)
def test_the_longest_sequence_ends_the_output_without_a_draft_beyond_it(pair: Pair, endless: list[list[int]], name: str) -> None:
    prompts = [replace(prompt, ignore_eos=True, max_tokens=1000) for prompt in PROMPTS[:3]]
    done = pair.decoder(name, max_length=48).decode(prompts, 2)
    for prompt, entry, output in zip(prompts, done, endless, strict=False):
        assert entry.token_ids == output[: 48 - len(prompt.token_ids)]
        assert entry.finish_reason == "length"
        check_rounds(prompt, entry)
        assert all(each.context_length + len(each.drafted) < 48 for each in entry.rounds)


@pytest.mark.parametrize("name", [*SHAPES, "draft model"])
@pytest.mark.parametrize("limit", [4, 20])
def test_beyond_the_drafters_positions_the_verifier_goes_on_alone(pair: Pair, expected: list[list[int]], name: str, limit: int) -> None:
    """Prompts longer than the limit, and outputs that grow past it."""
    decoder = pair.decoder(name)
    proposer: Any = decoder.proposer
    if name in SHAPES:
        proposer.config = proposer.config.model_copy(update={"max_position_embeddings": limit})
    else:
        proposer.model.max_positions = limit
    done = decoder.decode(PROMPTS, 3)
    assert tokens(done) == expected
    rounds = [each for entry in done for each in entry.rounds]
    assert all(not each.drafted for each in rounds if each.context_length > limit)
    assert limit == 4 or any(each.drafted for each in rounds)


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_mask_token_that_is_a_common_token_changes_nothing(pair: Pair, expected: list[list[int]], name: str) -> None:
    """The mask is an input of the drafter alone: in a prompt it is a token like any other."""
    decoder = pair.decoder(name)
    proposer: Any = decoder.proposer
    mask = expected[0][2]
    proposer.config = proposer.config.model_copy(update={"mask_token_id": mask})
    prompts = [replace(prompt, token_ids=[*prompt.token_ids, mask, mask], max_tokens=8) for prompt in PROMPTS[:2]]
    assert tokens(decoder.decode(prompts, 3)) == [ended(plain_greedy(pair.model, prompt.token_ids, 8)) for prompt in prompts]
    assert tokens(decoder.decode(PROMPTS[:1])) == expected[:1]


class Fixed:
    """A scheduler of given lengths, round after round; remembers what it was told."""

    def __init__(self, wanted: list[int], limits: list[int] | None = None) -> None:
        self.wanted, self.limits = wanted, limits or [K]
        self.offers: list[Offer] = []
        self.calls = 0

    def limit(self, context_lengths: torch.Tensor, draft_tokens: int) -> int:
        self.calls += 1
        return min(self.limits[self.calls % len(self.limits)], draft_tokens)

    def lengths(self, offer: Offer) -> torch.Tensor:
        self.offers.append(offer)
        rows = torch.arange(len(offer.available))
        return torch.minimum(offer.available, torch.tensor(self.wanted)[(rows + len(self.offers)) % len(self.wanted)])


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("limits", [[K], [0, 0, 0, K, 2], [0]])
def test_any_schedule_of_lengths_gives_the_same_output(pair: Pair, expected: list[list[int]], name: str, limits: list[int]) -> None:
    """Lengths differ from row to row and from round to round; 0 is a plain step of the verifier, a limit of 0 does not even draft."""
    scheduler = Fixed([0, 3, 1, 4, 2], limits)
    done = pair.decoder(name, scheduler=scheduler).decode(PROMPTS, 4)
    assert tokens(done) == expected
    for prompt, entry in zip(PROMPTS, done, strict=True):
        check_rounds(prompt, entry)
    if limits == [0]:
        assert not scheduler.offers
    elif name.startswith("dspark"):
        assert all(offer.confidence is not None and offer.confidence.shape == (len(offer.available), offer.confidence.shape[1]) for offer in scheduler.offers)


def test_a_schedule_of_zero_costs_no_draft(pair: Pair) -> None:
    decoder = pair.decoder("dspark", scheduler=Fixed([0], [0]))
    plain = pair.decoder(None)
    assert decoder.decode(PROMPTS, 2) == plain.decode(PROMPTS, 2)


def test_a_scheduler_that_asks_for_too_much_is_named(pair: Pair) -> None:
    class Greedy(Fixed):
        def lengths(self, offer: Offer) -> torch.Tensor:
            return offer.available + 1

    with pytest.raises(DecodingError, match=r"verify lengths \[5\] of \[4\] drafts"):
        pair.decoder("dspark", scheduler=Greedy([0])).decode(PROMPTS[:1])


def test_models_at_different_positions_are_found_out(pair: Pair) -> None:
    decoder = pair.decoder("dspark")
    proposer: Any = decoder.proposer
    positions = proposer.positions
    proposer.positions = lambda: positions() + 1
    with pytest.raises(PositionError, match="before the anchors lie"):
        decoder.decode(PROMPTS[:1])


def test_fewer_drafts_than_trained_are_the_first_of_the_block(pair: Pair, expected: list[list[int]]) -> None:
    whole = pair.decoder("dspark").decode(PROMPTS[:1])[0]
    short = Decoder(pair.model, pair.proposer("dspark", 2)).decode(PROMPTS[:1])[0]
    assert short.token_ids == whole.token_ids == expected[0]
    assert short.rounds[0].drafted == whole.rounds[0].drafted[:2]


def test_seconds_are_split_and_add_up(pair: Pair) -> None:
    decoder = pair.decoder("dspark")
    done = decoder.decode(PROMPTS, 6)
    seconds = decoder.seconds
    assert seconds.rounds == max(len(entry.rounds) for entry in done)
    assert min(seconds.prompts, seconds.verifier, seconds.drafter, seconds.head, seconds.other) > 0.0
    assert seconds.head < seconds.drafter
    assert seconds.round_seconds == seconds.verifier + seconds.drafter + seconds.other
    assert 0.0 < seconds.overhead < 1.0
    assert seconds.report()["head_share"] == seconds.head / seconds.round_seconds
    alone = pair.decoder(None)
    alone.decode(PROMPTS[:1])
    assert (alone.seconds.drafter, alone.seconds.head) == (0.0, 0.0)


def test_equal_seeds_sample_equal_tokens(pair: Pair) -> None:
    first, again, other = (pair.decoder("dspark", Sampling(1.0, top_p=0.9), seed=seed).decode(PROMPTS, 3) for seed in (7, 7, 8))
    assert first == again
    assert first != other


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"token_ids": []}, "prompt a: it has no tokens"),
    "too long": ({"token_ids": [5] * 64}, "prompt a: 64 tokens; the verifier's 64 positions hold one token less"),
    "unknown token": ({"token_ids": [5, 512]}, "prompt a: token ids must lie in 0 to 511"),
    "nothing to decode": ({"max_tokens": 0}, "prompt a: max_tokens = 0; at least 1"),
    "stop string without tokenizer": ({"stop_strings": ("x",)}, "prompt a: stop strings must not be empty, and need the verifier's tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_prompt_is_refused_in_one_line_before_anything_is_decoded(pair: Pair, case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(DecodingError) as caught:
        pair.decoder("dspark", max_length=64).decode([replace(Prompt("a", [5, 6], 4), **changes)])
    assert str(caught.value) == message


def test_bad_settings_are_refused_in_one_line(pair: Pair, tmp_path: Path) -> None:
    from stages.decoding.draft_model import DraftModelProposer, check_same_tokenizer
    from stages.decoding.ngram import NgramProposer
    from tests.tiny import make_verifier

    with pytest.raises(DecodingError, match=r"^5 draft tokens: the drafter was trained for 1 to 4 \(block_size 5\)$"):
        pair.proposer("dspark", K + 1)
    with pytest.raises(DecodingError, match=r"allowed are temperature >= 0, top_k >= 0, 0 < top_p <= 1"):
        Sampling(1.0, top_p=0.0)
    with pytest.raises(DecodingError, match=r"^prompt lookup: 4 drafts, n-grams of 3 to 2; "):
        NgramProposer(4, 3, 2)
    with pytest.raises(DecodingError, match=r"^draft_tokens = 0: "):
        DraftModelProposer(pair.draft_model, 0)
    with pytest.raises(DecodingError, match=r"^draft model: vocabulary of 512 tokens, the verifier's has 600$"):
        DraftModelProposer(pair.draft_model, 4, 600)
    other = make_verifier(tmp_path / "other", vocab=400)
    with pytest.raises(DecodingError, match=r"^draft model .*other: its tokenizer is not the verifier's .*: '.*' is unknown there and \d+ here$"):
        check_same_tokenizer(pair.directory, other)


def test_a_proposal_says_what_it_is(pair: Pair) -> None:
    """Greedy drafts are certain, sampled ones carry the distributions they were drawn from, over the draft vocabulary."""
    seen: list[Proposal] = []
    decoder = pair.decoder("dspark, reduced vocabulary", Sampling(1.0))
    proposer: Any = decoder.proposer
    propose = proposer.propose
    proposer.propose = lambda batch, limit: seen.append(propose(batch, limit)) or seen[-1]
    decoder.decode(PROMPTS[:2], 2)
    draws = seen[0].draws
    assert draws is not None
    assert draws.token_ids is not None
    assert draws.probabilities.shape == (2, K, 256)
    torch.testing.assert_close(draws.probabilities.sum(-1), torch.ones(2, K))
    columns = torch.searchsorted(draws.token_ids, seen[0].tokens)
    assert torch.equal(draws.probabilities.gather(2, columns[..., None])[..., 0], draws.drafted)
    assert torch.equal(draws.token_ids[columns], seen[0].tokens)
