"""EAGLE-3 and the draft model learn in the same loop: exactly resumed, on the right tokens, in as many slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.drafters.algorithms import ALGORITHMS
from stages.train import loop
from stages.train.data import TrainingSet, choose_draft_vocabulary, make_batch
from stages.train.objectives import OBJECTIVES, batch_shape
from stages.train.precision import product_dtype
from tests.drafters.kinds import make_drafter
from tests.train.material import LAYER_IDS, make_material
from tests.train.test_loop import build as build_block
from tests.train.test_loop import quiet, same, settings, stop_at_call


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads, many times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SHAPES: dict[str, dict[str, Any]] = {"eagle3": {"draft_tokens": 4}, "draft_model": {"num_layers": 2, "draft_tokens": 4}}


def build(algorithm: str, verifier: Path, count: int, dtype: torch.dtype = torch.float32, reduced: int | None = None) -> tuple[Any, TrainingSet]:
    """An untrained drafter, and `count` answers of the verifier to train it on."""
    samples, dump, frozen = make_material(verifier, count)
    ids = choose_draft_vocabulary(samples, reduced, len(frozen.embedding), [2]) if reduced else None
    drafter = make_drafter(algorithm, verifier, LAYER_IDS, ids, **SHAPES[algorithm])
    if algorithm == "eagle3":
        with torch.no_grad():
            for weight in drafter.parameters():
                weight.fill_(1.0) if weight.dim() == 1 else weight.mul_(0.02 * weight.shape[1] ** 0.5)
    return drafter, TrainingSet(samples, dump, frozen, ids, dtype, None, OBJECTIVES[algorithm].first_anchor)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["eagle3", "draft_model"])
@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "adamw"), ("bf16", "muon")])
def test_interrupted_and_resumed_equals_uninterrupted(
    algorithm: str, precision: str, optimizer: str, tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = settings(precision=precision, optimizer=optimizer, steps=12)
    reduced = 300 if algorithm == "eagle3" else None
    whole, data = build(algorithm, tiny_verifier, 4, product_dtype(precision), reduced)
    curve = loop.train(whole, data, data, params, tmp_path / "whole", quiet)

    part, data = build(algorithm, tiny_verifier, 4, product_dtype(precision), reduced)
    stop_at_call(8, monkeypatch, lambda: loop.train(part, data, data, params, tmp_path / "part", quiet))
    resumed, data = build(algorithm, tiny_verifier, 4, product_dtype(precision), reduced)
    rest = loop.train(resumed, data, data, params, tmp_path / "part", quiet)
    assert [p.step for p in rest] == list(range(5, 12))
    assert rest == curve[5:]
    assert same(resumed, whole)


@pytest.mark.parametrize("algorithm", ["eagle3", "draft_model"])
def test_overfitting_one_sample_drafts_nearly_every_token(algorithm: str, tiny_verifier: Path, tmp_path: Path) -> None:
    """A step trained on the wrong token or the wrong state shows here at once."""
    model, data = build(algorithm, tiny_verifier, 1)
    params = settings(steps=120, sequences_per_step=1, anchors_per_sequence=40, learning_rate=3e-3, loss={"ce": 1.0, "tv": 0.9}, checkpoint_every=1000)
    loop.train(model, data, None, params, tmp_path, quiet)
    sample = data.samples[0]
    states = data.states.read(sample.id, sample.input_ids).hidden_states[:, :-1].flatten(1)
    k = model.config.draft_tokens
    tokens = torch.tensor(sample.input_ids)
    anchors = torch.arange(sample.prompt_length - 1, len(tokens) - 1 - k)
    drafts = ALGORITHMS[algorithm].redraft(model, sample.input_ids, states, anchors).tokens
    truth = tokens[anchors[:, None] + torch.arange(1, k + 1)]
    assert 1 + (drafts == truth).int().cumprod(1).sum(1).float().mean().item() >= 0.9 * (k + 1)
    metrics = loop.check(model, data, params)
    assert metrics["acceptance_length"] > 1.0
    assert {f"acceptance_{position}" for position in range(1, k + 1)} <= metrics.keys()


def test_a_block_of_16_is_trained_like_a_shorter_one(tiny_verifier: Path, tmp_path: Path) -> None:
    model, data = build_block(tiny_verifier, 3, block_size=16)
    made = loop.train(model, data, data, settings(steps=6, anchors_per_sequence=8), tmp_path, quiet)
    assert made[-1].loss < made[0].loss
    assert {f"acceptance_{position}" for position in range(1, 16)} <= loop.check(model, data, settings()).keys()


def test_every_algorithm_takes_as_many_slots(tiny_verifier: Path) -> None:
    eagle, _ = build("eagle3", tiny_verifier, 1)
    causal, _ = build("draft_model", tiny_verifier, 1)
    assert batch_shape(eagle, 24) == (24, 4)
    assert batch_shape(causal, 24) == (96, 1)


def test_some_of_the_extracted_layers_are_tapped(tiny_verifier: Path) -> None:
    """Another subset than `convert` writes down would be trained unseen."""
    samples, dump, frozen = make_material(tiny_verifier, 1)

    class Planned:
        """A dump that says which layers it holds."""

        ids, read = dump.ids, dump.read
        plan = type("Plan", (), {"layer_ids": (*LAYER_IDS, 6)})

    data = TrainingSet(samples, Planned(), frozen, None, torch.float32, [1, 5])  # type: ignore[arg-type]
    batch = make_batch(data, [0], 4, 2, 4.0, ("key",))
    assert batch is not None
    rows = len(batch.blocks.context)
    assert torch.equal(batch.blocks.context, dump.states[samples[0].id][:rows, [0, 2]].flatten(1))


def test_the_first_token_is_no_anchor_of_eagle3(tiny_verifier: Path) -> None:
    """Nothing stands before it: there is no hidden state to draft from."""
    model, data = build("eagle3", tiny_verifier, 2)
    for sample in data.samples:
        sample.loss_mask[:] = [0] + [1] * (len(sample.loss_mask) - 1)
    batch = make_batch(data, [0, 1], 1000, 4, 4.0, ("key",))
    assert batch is not None
    assert int(batch.blocks.anchor_positions.min()) == 1
    assert loop.objective(model, data.head, batch, settings().loss, torch.float32).loss.isfinite()
