"""Training resumes exactly, survives kill -9 during a checkpoint, and can overfit."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.drafters.draft import greedy_drafts
from stages.drafters.model import Drafter
from stages.errors import DraftlineError
from stages.hidden_states.format import UnusableSampleError
from stages.hidden_states.stream import StreamError
from stages.params import Train
from stages.train import loop, state
from stages.train.data import TrainingSet, choose_draft_vocabulary, make_batch, sample_order
from stages.train.precision import product_dtype
from tests.drafters.shapes import config, name_of
from tests.train.material import LAYER_IDS, make_material

SHAPE: dict[str, Any] = {"layer_ids": LAYER_IDS, "block_size": 8}


def quiet(metrics: dict[str, float], step: int) -> None:
    """A log that nobody reads."""


def build(verifier: Path, count: int, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Drafter, TrainingSet]:
    samples, dump, frozen = make_material(verifier, count)
    vocab = len(frozen.embedding)
    shape = config(vocab=vocab, **{"draft_vocab_size": vocab, **SHAPE, **changes})
    ids = choose_draft_vocabulary(samples, shape.draft_vocab_size, vocab, [2]) if shape.reduced_vocabulary else None
    torch.manual_seed(0)
    return Drafter(shape, frozen, ids), TrainingSet(samples, dump, frozen, ids, dtype)  # type: ignore[arg-type]


def settings(**changes: Any) -> Train:
    return Train.model_validate(
        {"steps": 40, "sequences_per_step": 2, "anchors_per_sequence": 6, "precision": "fp32", "checkpoint_every": 5, "validation_every": 1000, **changes}
    )


def stop_at_call(number: int, monkeypatch: pytest.MonkeyPatch, train: Callable[[], Any]) -> None:
    """Have a training interrupted when it computes its loss for the `number`th time."""
    original = loop.objective
    calls = itertools.count(1)

    def stops(*args: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(loop, "objective", stops)
    with pytest.raises(KeyboardInterrupt):
        train()
    monkeypatch.setattr(loop, "objective", original)


def same(a: Drafter, b: Drafter) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize(("steps", "said"), [(0, "why; no step is made yet, run again to begin"), (3, "why; the checkpoint of step 3 is kept, run again")])
def test_a_stream_that_ends_says_what_is_kept(steps: int, said: str, tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, data = build(tiny_verifier, 5)
    original, read = data.states.read, itertools.count()

    def ends(*args: Any) -> Any:
        if next(read) == 2 * steps:
            raise StreamError("why")
        return original(*args)

    monkeypatch.setattr(data.states, "read", ends)
    with pytest.raises(StreamError, match=f"^{said}"):
        loop.train(drafter, data, None, settings(), tmp_path / "work", quiet)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ([f"step-{steps:08d}.pt"] if steps else [])


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "adamw"), ("bf16", "adamw"), ("bf16", "muon")])
def test_interrupted_and_resumed_equals_uninterrupted(
    precision: str, optimizer: str, tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same losses, learning rates and weights, bit for bit: stopped after step 17, the state of step 15 is continued."""
    params = settings(precision=precision, optimizer=optimizer)
    whole, data = build(tiny_verifier, 5, product_dtype(precision), draft_vocab_size=300)
    curve = loop.train(whole, data, data, params, tmp_path / "whole", quiet)

    part, data = build(tiny_verifier, 5, product_dtype(precision), draft_vocab_size=300)
    stop_at_call(18, monkeypatch, lambda: loop.train(part, data, data, params, tmp_path / "part", quiet))
    resumed, data = build(tiny_verifier, 5, product_dtype(precision), draft_vocab_size=300)
    rest = loop.train(resumed, data, data, params, tmp_path / "part", quiet)
    assert [p.step for p in rest] == list(range(15, 40))
    assert rest == curve[15:]
    assert same(resumed, whole)


@pytest.mark.parametrize(
    ("at", "spoilt", "says", "kept"),
    [
        (7, "loss", "the loss of step 7 is nan", ["step-00000004.pt"]),  # found by the check of every tenth step
        (8, "loss", "the loss of step 8 is nan", ["step-00000004.pt"]),  # found before the checkpoint
        (8, "weights", "weights are not finite after step 8", ["step-00000004.pt"]),
        (13, "loss", "the loss of step 13 is nan", ["step-00000008.pt", "step-00000012.pt"]),  # found at the end
        (13, "weights", "weights are not finite after step 13", ["step-00000008.pt", "step-00000012.pt"]),
    ],
)
def test_a_diverged_training_stops_and_writes_nothing(
    at: int, spoilt: str, says: str, kept: list[str], tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written, the weights would pass for a drafter that is merely bad, and a resumed run would start from them."""
    model, data = build(tiny_verifier, 2)
    original = loop.objective
    calls = 0

    def spoils(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        out = original(*args)
        if calls == at and spoilt == "loss":
            out.loss.data.fill_(math.nan)
        if calls == at and spoilt == "weights":
            next(model.parameters()).register_hook(lambda gradient: gradient * math.nan)
        return out

    monkeypatch.setattr(loop, "objective", spoils)
    logged: list[float] = []
    with pytest.raises(DraftlineError) as stopped:
        loop.train(model, data, None, settings(steps=13, checkpoint_every=4), tmp_path, lambda metrics, step: logged.extend(metrics.values()))
    assert str(stopped.value) == f"params.yaml: train.learning_rate = 0.0006: training diverged, {says}; lower it"
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert all(map(math.isfinite, logged))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_learning_rate_that_is_far_too_high_is_named(optimizer: str, tiny_verifier: Path, tmp_path: Path) -> None:
    model, data = build(tiny_verifier, 2)
    with pytest.raises(DraftlineError, match=r"train\.learning_rate = 1e\+30: training diverged, .* step \d+"):
        loop.train(model, data, None, settings(optimizer=optimizer, learning_rate=1e30), tmp_path, quiet)


def test_kill_9_while_a_checkpoint_is_written_leaves_the_previous_one(tmp_path: Path) -> None:
    """The newest readable state is always whole."""
    script = textwrap.dedent(
        """
        import sys, torch
        from pathlib import Path
        from stages.train import state
        model = torch.nn.Linear(600, 600)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 600)).sum().backward(); optimizer.step()
        step = 0
        while True:
            step += 1
            state.save(Path(sys.argv[1]), step, model, [optimizer])
            print(step, flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    time.sleep(0.013)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    model = torch.nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    assert state.restore(tmp_path, model, [optimizer]) >= 3


def spoil(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if damage == "flipped":
        content[middle] ^= 4
    elif damage == "zeroed":
        content[:] = bytes(len(content))
    elif damage == "cut":
        del content[middle:]
    elif damage == "empty":
        content.clear()
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["flipped", "zeroed", "cut", "empty"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong bit loads as readily as a right one; and what cannot be loaded must not bar the way to what can."""
    model = torch.nn.Linear(60, 60)
    optimizer = torch.optim.AdamW(model.parameters())
    expected = {}
    for step in (5, 10):
        model(torch.ones(1, 60)).sum().backward()
        optimizer.step()
        state.save(tmp_path, step, model, [optimizer])
        expected[step] = model.weight.detach().clone()

    spoil(tmp_path / "step-00000010.pt", damage)
    model = torch.nn.Linear(60, 60)
    optimizer = torch.optim.AdamW(model.parameters())
    assert state.restore(tmp_path, model, [optimizer]) == 5
    assert torch.equal(model.weight, expected[5])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"train: {tmp_path}/step-00000010.pt: checkpoint is damaged (")
    assert said[1:] == ["train: going on from step 5"]

    spoil(tmp_path / "step-00000005.pt", damage)
    assert state.restore(tmp_path, model, [optimizer]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "train: beginning anew, there is no other checkpoint"
    state.save(tmp_path, 3, model, [optimizer])
    assert state.restore(tmp_path, model, [optimizer]) == 3, "those that were damaged do not outlive it"


def test_a_training_that_made_no_step_is_none(tiny_verifier: Path, tmp_path: Path) -> None:
    """Its weights, written, would pass for a drafter that is merely bad."""
    drafter, data = build(tiny_verifier, 3)

    def refuses(sample: str, expected: list[int] | None = None) -> Any:
        raise UnusableSampleError(sample)

    data.states.read = refuses  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(DraftlineError, match="no sample of the steps had usable hidden states, nothing was trained"):
            loop.train(drafter, data, None, settings(), tmp_path, quiet)


def test_an_anchor_at_the_very_start_has_an_empty_context(tiny_verifier: Path) -> None:
    """Of a conversation that the assistant opens with a single token."""
    _, data = build(tiny_verifier, 2)
    data.samples[0].loss_mask[:] = [0, 1] + [0] * (len(data.samples[0].input_ids) - 2)
    batch = make_batch(data, [0], 6, 7, 4.0, ("key",))
    assert batch is not None
    assert batch.blocks.anchor_positions.tolist() == [0]
    assert len(batch.blocks.context) == 0


def test_each_epoch_uses_every_sample_once() -> None:
    order = [index for step in sample_order(7, 3, 14, seed=1) for index in step]
    for epoch in range(6):
        assert sorted(order[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert sample_order(7, 3, 5, 1) == sample_order(7, 3, 14, 1)[:5]


def test_learning_rate_warms_up_and_ends_at_nothing() -> None:
    params = settings(steps=100, warmup_fraction=0.1, learning_rate=1.0)
    rates = [loop.learning_rate(step, params) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] < 0.01
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)


def test_draft_vocabulary_is_padded_deterministically(tiny_verifier: Path) -> None:
    """Ten samples use far fewer tokens than asked for: the rest are the lowest unused ids, EOS is always in."""
    samples, _, frozen = make_material(tiny_verifier, 3)
    vocab = len(frozen.embedding)
    large = choose_draft_vocabulary(samples, 400, vocab, [2])
    assert large.tolist() == sorted(set(large.tolist()))
    assert len(large) == 400
    assert 2 in large
    used = {token for s in samples for token, m in zip(s.input_ids, s.loss_mask, strict=True) if m}
    assert used <= set(large.tolist())
    small = choose_draft_vocabulary(samples, 4, vocab, [2])
    assert len(small) == 4
    assert 2 in small


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sample_from_anchor": True},
        {"algorithm": "dflash", "markov_rank": 0, "confidence_head": False, "confidence_head_with_markov": False},
        {
            "algorithm": "dflash",
            "markov_rank": 0,
            "confidence_head": False,
            "confidence_head_with_markov": False,
            "sample_from_anchor": True,
        },
    ],
    ids=name_of,
)
def test_overfitting_one_sample_drafts_nearly_the_whole_block(changes: dict[str, Any], tiny_verifier: Path, tmp_path: Path) -> None:
    """A slot that is trained on the wrong token or weighted 0, or a Markov head fed the wrong one, shows here at once."""
    model, data = build(tiny_verifier, 1, **changes)
    params = settings(steps=250, sequences_per_step=1, anchors_per_sequence=40, learning_rate=3e-3, loss={"ce": 1.0, "tv": 0.9}, checkpoint_every=1000)
    loop.train(model, data, None, params, tmp_path, quiet)
    sample = data.samples[0]
    tokens = torch.tensor(sample.input_ids)
    states = data.states.read(sample.id, sample.input_ids).hidden_states[:, :-1].flatten(1)
    k = model.config.draft_tokens
    anchors = torch.arange(sample.prompt_length - 1, len(tokens) - 1 - k)
    drafts = greedy_drafts(model, states, tokens[anchors], anchors).tokens
    truth = tokens[anchors[:, None] + torch.arange(1, k + 1)]
    length = 1 + (drafts == truth).int().cumprod(1).sum(1).float().mean().item()
    assert length >= 0.9 * model.config.block_size
