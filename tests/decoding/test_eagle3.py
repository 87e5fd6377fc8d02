"""EAGLE-3 in the decoding loop: output stays the verifier's, and its cache is what a fresh pass would put there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from stages.decoding.eagle3 import Eagle3Proposer
from stages.decoding.loop import Decoder
from stages.decoding.proposer import DecodingError, Sampling
from stages.drafters.eagle3 import Eagle3, greedy_chains
from tests.decoding.loops import K, Pair, plain_greedy, prefix_until, random_prompts
from tests.decoding.test_kv_cache import drive, histories
from tests.drafters.kinds import make_drafter
from tests.tiny import EOS_TOKEN_ID

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES: dict[str, dict[str, Any]] = {"whole": {}, "reduced, one layer": {"draft_ids": torch.arange(1, 512, 2), "layer_ids": [4]}}
HISTORY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=SHAPES)
def drafter(request: pytest.FixtureRequest, pair: Pair) -> Eagle3:
    model = make_drafter("eagle3", pair.directory, **SHAPES[request.param])
    assert isinstance(model, Eagle3)
    return model


@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_output_stays_the_verifiers(pair: Pair, drafter: Eagle3, batch_size: int) -> None:
    prompts = random_prompts(4, 20)
    plain = [plain_greedy(pair.model, prompt.token_ids, 20) for prompt in prompts]
    expected = [prefix_until(output, lambda prefix: prefix[-1] == EOS_TOKEN_ID) for output in plain]
    done = Decoder(pair.model, Eagle3Proposer(drafter)).decode(prompts, batch_size)
    assert [entry.token_ids for entry in done] == expected


def test_sampled_drafts_come_with_the_distribution_they_are_from(pair: Pair, drafter: Eagle3) -> None:
    prompts = random_prompts(3, 16)
    runs = [Decoder(pair.model, Eagle3Proposer(drafter), Sampling(1.0, top_p=0.9), seed=7).decode(prompts, 3) for _ in range(2)]
    assert [entry.token_ids for entry in runs[0]] == [entry.token_ids for entry in runs[1]]
    assert all(1 <= len(entry.token_ids) <= 16 for entry in runs[0])


def test_beyond_the_drafters_positions_the_verifier_goes_on_alone(pair: Pair, drafter: Eagle3) -> None:
    proposer = Eagle3Proposer(drafter)
    proposer.config = drafter.config.model_copy(update={"max_position_embeddings": 12})
    prompts = random_prompts(3, 16, ignore_eos=True)
    done = Decoder(pair.model, proposer).decode(prompts, 3)
    assert [entry.token_ids for entry in done] == [plain_greedy(pair.model, prompt.token_ids, 16) for prompt in prompts]
    rounds = [each for entry in done for each in entry.rounds]
    assert all(not each.drafted for each in rounds if each.context_length > 14)
    assert any(each.drafted for each in rounds)


@HISTORY
@given(history=histories())
def test_its_cache_equals_a_fresh_one_and_its_drafts_those_of_one_pass(drafter: Eagle3, history: Any) -> None:
    proposer = Eagle3Proposer(drafter, K)
    texts, states = drive(proposer, history, len(drafter.config.layer_ids) * drafter.config.hidden_size)
    for row, text in enumerate(texts):
        position = len(text) - K - 1
        tokens = torch.tensor(text)
        drafts = greedy_chains(drafter, states[row][:position], tokens, torch.tensor([position]))
        assert drafts.tokens[0, :K].tolist() == text[-K:]
        with torch.no_grad():
            x, _ = drafter.layer.join(drafter.embedding[tokens[1 : position + 1]], drafter.fc(states[row][:position]))
            fresh = drafter.layer.self_attn.keys_values(x, drafter.rope(torch.arange(position)))
        assert proposer._store.keys is not None
        assert proposer._store.values is not None
        for ours, theirs in zip((proposer._store.keys, proposer._store.values), fresh, strict=True):
            torch.testing.assert_close(ours[row, :, :position], theirs.transpose(0, 1), rtol=1e-3, atol=1e-3)


def test_less_than_one_draft_is_refused(pair: Pair, drafter: Eagle3) -> None:
    with pytest.raises(DecodingError, match="0 draft tokens: EAGLE-3 drafts at least 1"):
        Eagle3Proposer(drafter, 0)
