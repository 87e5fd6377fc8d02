"""The chunked closed-form loss is the loss of the formula: values and gradients against fp64 autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.train import losses
from stages.train.losses import Targets, confidence_loss, log_normalisers, vocabulary_loss

H, R = 12, 4


def problem(seed: int, slots: int, rows: int, vocab: int, draft: int, agree: bool, missing: bool) -> tuple[dict[str, Tensor], Tensor, Targets]:
    """Random inputs in fp64; `agree`: the drafter is nearly the verifier, where q − p is tiny and its sign all that counts."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lm_head = normal(vocab, H)
    ids = torch.sort(torch.randperm(vocab, generator=g)[:draft]).values
    head = lm_head[ids]
    states = normal(rows, H)
    row = torch.randint(rows, (slots,), generator=g)
    hidden = states[row] + 1e-3 * normal(slots, H) if agree else normal(slots, H)
    labels = torch.randint(-1 if missing else 0, draft, (slots,), generator=g)
    weights = torch.rand(slots, generator=g, dtype=torch.float64)
    inputs = {"hidden": hidden, "features": normal(slots, R) * 0.1, "w2": normal(draft, R) * 0.1}
    log_z = torch.logsumexp(states @ lm_head.T, dim=-1) if draft < vocab else None
    return inputs, head, Targets(states, log_z, row, labels, weights / weights.sum())


def distributions(inputs: dict[str, Tensor], head: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """The drafter's and the verifier's, q and p `[N, D]`, by the formula."""
    q = torch.softmax(inputs["hidden"] @ head.T + inputs["features"] @ inputs["w2"].T, dim=-1)
    logits = targets.states @ head.T
    p = torch.softmax(logits, -1) if targets.log_normaliser is None else torch.exp(logits - targets.log_normaliser[:, None])
    return q, p[targets.rows]


def reference(inputs: dict[str, Tensor], head: Tensor, targets: Targets, ce: float, tv: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The formula, spelled out with autograd."""
    x = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    q, p = distributions(x, head, targets)
    l1 = (q - p).abs().sum(-1) + (1 - p.sum(-1)).clamp(min=0)
    known = targets.labels >= 0
    picked = q[torch.arange(len(q)), targets.labels.clamp(min=0)]
    loss = ((ce * torch.where(known, -picked.log(), torch.zeros_like(picked)) + tv * l1) * targets.weights).sum()
    loss.backward()
    return loss.detach(), l1.detach(), {name: value.grad for name, value in x.items() if value.grad is not None}


def ours(inputs: dict[str, Tensor], head: Tensor, targets: Targets, dtype: torch.dtype, ce: float, tv: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = {name: value.to(dtype).clone().requires_grad_() for name, value in inputs.items()}
    cast = Targets(
        targets.states.to(dtype),
        None if targets.log_normaliser is None else targets.log_normaliser.float(),
        targets.rows,
        targets.labels,
        targets.weights.float(),
    )
    loss, l1 = vocabulary_loss(x["hidden"], x["features"], x["w2"], head.to(dtype), cast, ce, tv)
    (2 * loss).backward()
    return loss.detach(), l1, {name: value.grad / 2 for name, value in x.items() if value.grad is not None}


def close(a: Tensor, b: Tensor, tolerance: float, slack: float = 1e-12) -> None:
    assert (a.double() - b.double()).norm() <= tolerance * b.double().norm() + slack


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 90), rows=st.integers(1, 20), reduced=st.booleans(), agree=st.booleans(), missing=st.booleans())
def test_matches_fp64_autograd_in_fp32(seed: int, slots: int, rows: int, reduced: bool, agree: bool, missing: bool) -> None:
    inputs, head, targets = problem(seed, slots, rows, 67, 41 if reduced else 67, agree, missing)
    loss, l1, gradients = ours(inputs, head, targets, torch.float32, 0.1, 0.9)
    expected_loss, expected_l1, expected = reference(inputs, head, targets, 0.1, 0.9)
    noise = 10 * torch.finfo(torch.float32).eps
    close(loss, expected_loss, 1e-5, noise)
    tolerance = 1e-2 if agree else 1e-5
    close(l1, expected_l1, tolerance)
    q, p = distributions(inputs, head, targets)
    # A term q − p below fp32's resolution may take either sign; that turns the logits' gradient by at most 4 q.
    undecided = (torch.where((q - p).abs() < 1e-5 * q, q, 0.0).sum(-1) * targets.weights).sum()
    largest = max(matrix.norm() for matrix in (head, inputs["w2"], inputs["features"]))
    for name, gradient in gradients.items():
        close(gradient, expected[name], tolerance, float((4 * undecided + noise) * largest))


def test_bf16_products_stay_within_one_percent() -> None:
    inputs, head, targets = problem(3, 200, 50, 300, 200, agree=False, missing=True)
    # Same rounding of the inputs on both sides: what is measured is the arithmetic, not the storage.
    inputs = {name: value.bfloat16().double() for name, value in inputs.items()}
    head = head.bfloat16().double()
    targets = Targets(targets.states.bfloat16().double(), targets.log_normaliser, targets.rows, targets.labels, targets.weights)
    loss, _, gradients = ours(inputs, head, targets, torch.bfloat16, 0.1, 0.9)
    expected_loss, _, expected = reference(inputs, head, targets, 0.1, 0.9)
    close(loss, expected_loss, 1e-2)
    for name, gradient in gradients.items():
        close(gradient, expected[name], 2e-2)


def test_chunk_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, head, targets = problem(5, 130, 40, 80, 50, agree=False, missing=True)
    whole = ours(inputs, head, targets, torch.float64, 0.1, 0.9)
    monkeypatch.setattr(losses, "CPU_CHUNK", (7, 12))
    parts = ours(inputs, head, targets, torch.float64, 0.1, 0.9)
    close(parts[0], whole[0], 1e-12)
    for name in whole[2]:
        close(parts[2][name], whole[2][name], 1e-6)


def test_works_without_a_markov_head() -> None:
    inputs, head, targets = problem(7, 30, 9, 60, 60, agree=False, missing=False)
    inputs["features"], inputs["w2"] = torch.zeros_like(inputs["features"]), torch.zeros_like(inputs["w2"])
    expected_loss, _, expected = reference(inputs, head, targets, 0.3, 0.7)
    x = inputs["hidden"].float().requires_grad_()
    loss, _ = vocabulary_loss(
        x, None, None, head.float(), Targets(targets.states.float(), None, targets.rows, targets.labels, targets.weights.float()), 0.3, 0.7
    )
    loss.backward()
    close(loss.detach(), expected_loss, 1e-5)
    assert x.grad is not None
    close(x.grad, expected["hidden"], 1e-5)


def test_perfect_drafter_has_no_distance_and_full_survival() -> None:
    _, head, targets = problem(9, 20, 20, 60, 60, agree=False, missing=False)
    targets = Targets(targets.states, None, torch.arange(20), targets.labels, targets.weights)
    _, l1 = vocabulary_loss(targets.states, None, None, head, targets, 0.1, 0.9)
    assert l1.max() < 1e-12
    certain = confidence_loss(torch.full((20,), 40.0), l1, targets.weights.float())
    assert certain < 1e-6


def test_mass_outside_the_draft_vocabulary_costs_acceptance() -> None:
    inputs, head, targets = problem(11, 40, 40, 60, 20, agree=False, missing=False)
    assert targets.log_normaliser is not None
    _, l1, _ = reference(inputs, head, targets, 0.1, 0.9)
    inside = torch.exp(targets.states @ head.T - targets.log_normaliser[:, None]).sum(-1)[targets.rows]
    assert (1 - 0.5 * l1 <= inside + 1e-9).all()


def test_normalisers_are_exact_in_chunks() -> None:
    g = torch.Generator().manual_seed(0)
    states, head = torch.randn(300, H, generator=g), torch.randn(5000, H, generator=g)
    torch.testing.assert_close(log_normalisers(states, head), torch.logsumexp(states @ head.T, -1))
