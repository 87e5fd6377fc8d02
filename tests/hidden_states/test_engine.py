"""The connector inside the real vLLM: every tapped layer equals transformers', whatever shares a forward pass with it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.hidden_states.format import HiddenSample
from stages.hidden_states.launch import MIN_BATCHED_TOKENS
from tests.hidden_states.engine_run import Batch, EngineRun, run_engine
from tests.hidden_states.samples import make_plan

pytestmark = pytest.mark.integration

LAYERS = 6
ALL_IDS = tuple(range(1, LAYERS + 1))
TOLERANCE = 1e-4
"""fp32, another order of summation: typical is 1e-6, the worst token of thousands 2e-5; neighbouring layers differ by far more."""
DRAW = random.Random(5)


def tokens(length: int) -> list[int]:
    return [DRAW.randrange(4, 400) for _ in range(length)]


# Lengths around the cache's block size (128 on a CPU), and single-token prompts.
THREE: Batch = [("short", tokens(9)), ("long", tokens(300)), ("block", tokens(128))]
ONE_BY_ONE: list[Batch] = [[sample] for sample in THREE]
PREFIX = tokens(64)
SHARED: Batch = [("first", PREFIX + tokens(40)), ("second", PREFIX + tokens(7)), ("same", [*PREFIX]), ("same again", [*PREFIX])]
# More than one forward pass holds: requests wait, and the one at the budget's edge is prefilled in two chunks.
MANY: Batch = [(f"many-{index}", tokens(250 + 7 * index)) for index in range(12)] + [("one", tokens(1)), ("block+1", tokens(129))]
BATCHES = [THREE, *ONE_BY_ONE, [THREE[0]], SHARED, SHARED, MANY]


@pytest.fixture(scope="module")
def engine(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """`BATCHES`, all through one engine."""
    assert sum(len(ids) for _, ids in MANY) > MIN_BATCHED_TOKENS
    plan = make_plan([len(ids) for _, ids in MANY], layer_ids=ALL_IDS, hidden_size=64)
    return run_engine(tmp_path_factory.mktemp("engine"), plan, tiny_verifier, BATCHES)


@pytest.fixture(scope="module")
def extracted(engine: EngineRun) -> list[dict[str, HiddenSample]]:
    """For each of `BATCHES`, id → sample."""
    return engine.batches


@pytest.fixture(scope="module")
def reference(tiny_verifier: Path) -> Callable[[list[int]], torch.Tensor]:
    """Token ids → `[T, 6, H]`: what transformers calls `hidden_states[id]`, the last one before the final norm."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32).eval()
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))

    def states(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            output = model(torch.tensor([token_ids]), output_hidden_states=True)
        return torch.stack([*(output.hidden_states[layer][0] for layer in ALL_IDS[:-1]), last.pop()[0]], dim=1)

    return states


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of a token's state at any layer, relative to that state's norm."""
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def test_every_layer_of_every_sample_equals_transformers(extracted: list[dict[str, HiddenSample]], reference: Callable[[list[int]], torch.Tensor]) -> None:
    for batch, samples in zip(BATCHES, extracted, strict=True):
        for name, token_ids in batch:
            assert samples[name].token_ids.tolist() == token_ids
            expected = reference(token_ids)
            assert samples[name].hidden_states.shape == expected.shape
            assert relative_error(samples[name].hidden_states, expected) < TOLERANCE, name


def test_the_layers_are_told_apart(reference: Callable[[list[int]], torch.Tensor]) -> None:
    """Otherwise the test above could not see ids that are off by one."""
    states = reference(THREE[0][1])
    for layer in range(LAYERS - 1):
        assert relative_error(states[:, layer], states[:, layer + 1]) > 0.1


def test_a_sample_does_not_depend_on_what_is_extracted_with_it(extracted: list[dict[str, HiddenSample]]) -> None:
    together, *alone, first_again = extracted[:5]
    for (name, _), single in zip(THREE, alone, strict=True):
        assert relative_error(single[name].hidden_states, together[name].hidden_states) < TOLERANCE
    # The same batch again, after others have used the blocks: bit for bit.
    assert torch.equal(first_again["short"].hidden_states, alone[0]["short"].hidden_states)
    for name, _ in SHARED:
        assert torch.equal(extracted[5][name].hidden_states, extracted[6][name].hidden_states)


def test_a_shared_prefix_is_computed_for_each_sample(extracted: list[dict[str, HiddenSample]]) -> None:
    samples = extracted[5]
    for name, token_ids in SHARED:
        assert len(samples[name].hidden_states) == len(token_ids)
        assert relative_error(samples[name].hidden_states[:64], samples["same"].hidden_states) < TOLERANCE


def test_an_engine_with_prefix_caching_is_refused_by_the_connector(engine: EngineRun) -> None:
    """Cached tokens would be missing from the states; vLLM itself accepts the combination."""
    assert "prefix caching must be off" in engine.prefix_caching


def test_a_cache_that_is_too_small_is_one_line_with_its_knob_and_what_it_must_hold(engine: EngineRun) -> None:
    assert re.fullmatch(r"params\.yaml: engine\.kv_cache_bytes = 1048576: the extracting engine needs about \d+ bytes .*", engine.small_cache)
