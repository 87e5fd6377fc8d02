"""The comparison of drafts can tell a wrong drafter from a near-tie, and reads the verifier at the right places."""

from __future__ import annotations

from pathlib import Path

import torch

from stages.decoding.engine import Completion, Round
from stages.decoding.parity import aux_hidden_states, choose_rounds, compare_rounds
from stages.drafters.draft import greedy_drafts
from tests.drafters.shapes import config, drafter


def completion(rounds: int, name: str = "a", drafted: list[int] | None = None) -> Completion:
    return Completion(name, [1] * (rounds + 1), "length", [Round(3 + index, [7, 8] if drafted is None else drafted, 0, 1) for index in range(rounds)])


def test_rounds_are_taken_evenly_over_all_completions() -> None:
    chosen = choose_rounds([completion(10), completion(30)], 8)
    assert [len(rounds) for rounds in chosen] == [2, 6]
    assert len({entry.context_length for entry in chosen[1]}) == 6
    assert [len(rounds) for rounds in choose_rounds([completion(2), completion(3)], 64)] == [2, 3]
    # A pass without drafts has nothing to compare.
    assert choose_rounds([completion(4, drafted=[])], 8) == [[]]


def test_a_differing_draft_is_found_with_its_slot_and_distance() -> None:
    model = drafter(config(draft_vocab_size=40))
    context = torch.randn(12, 3 * 64, generator=torch.Generator().manual_seed(0))
    tokens = list(range(20, 32))
    drafts = greedy_drafts(model, context, torch.tensor([tokens[5], tokens[9]]), torch.tensor([5, 9]))
    right = [Round(6, drafts.tokens[0].tolist(), 0, 1), Round(10, drafts.tokens[1].tolist(), 0, 1)]
    assert compare_rounds(drafts, model.draft_ids, right, "a") == []
    assert drafts.logits is not None

    second = int(model.draft_ids[drafts.logits[1, 2].topk(2).indices[1]])
    swapped = [*right[1].drafted[:2], second, right[1].drafted[3]]
    (found,) = compare_rounds(drafts, model.draft_ids, [right[0], Round(10, swapped, 0, 1)], "a")
    assert (found.request, found.context_length, found.slot, found.engine, found.ours) == ("a", 10, 2, second, right[1].drafted[2])
    assert found.gap == found.margin > 0
    assert f"engine {second}" in found.line()

    outside = next(token for token in range(96) if token not in model.draft_ids.tolist())
    (found,) = compare_rounds(drafts, model.draft_ids, [Round(6, [outside], 0, 1)], "a")
    assert found.gap == float("inf")


def test_fewer_drafts_than_ours_are_compared_as_far_as_they_go() -> None:
    """With `sample_from_anchor: true` the engine drafts one token fewer."""
    model = drafter(config(sample_from_anchor=True))
    context = torch.randn(6, 3 * 64, generator=torch.Generator().manual_seed(0))
    drafts = greedy_drafts(model, context, torch.tensor([9]), torch.tensor([5]))
    assert compare_rounds(drafts, model.draft_ids, [Round(6, drafts.tokens[0, :-1].tolist(), 0, 1)], "a") == []


def test_layer_ids_are_inputs_of_layers_and_the_last_one_is_not_normed(tiny_verifier: Path) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_verifier, dtype=torch.float32).eval()
    inputs: dict[int, torch.Tensor] = {}
    hooks = [layer.register_forward_pre_hook(lambda _m, args, i=index: inputs.__setitem__(i, args[0][0])) for index, layer in enumerate(model.layers)]
    hooks.append(model.layers[-1].register_forward_hook(lambda _m, _a, out: inputs.__setitem__(6, (out[0] if isinstance(out, tuple) else out)[0])))
    with torch.no_grad():
        states = aux_hidden_states(model, [5, 6, 7, 8], [1, 4, 6])
    for hook in hooks:
        hook.remove()
    assert torch.equal(states, torch.cat([inputs[1], inputs[4], inputs[6]], dim=-1))
