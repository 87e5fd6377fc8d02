"""A draft model is a causal LM that transformers reads, begun with layers of its verifier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.drafters.draft_model import greedy_continuations, spread
from stages.drafters.ngram import NgramConfig, look_up
from stages.errors import ArtifactError
from stages.pairing.identity import compute_identity
from stages.verifier.w8a8 import quantise_directory
from tests.drafters.kinds import make_drafter, write_checkpoint


def test_layers_are_taken_evenly_from_the_first_to_the_last() -> None:
    assert [spread(count, 30) for count in (1, 2, 4)] == [[0], [0, 29], [0, 10, 19, 29]]
    assert spread(6, 6) == [0, 1, 2, 3, 4, 5]
    assert all(len(set(spread(count, 7))) == count for count in range(1, 8))


@torch.no_grad()
def test_transformers_reads_the_checkpoint_and_gives_our_logits(tiny_verifier: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_drafter("draft_model", tiny_verifier)
    write_checkpoint(tmp_path, "draft_model", tiny_verifier, model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert len(theirs.model.layers) == 2
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == AutoTokenizer.from_pretrained(tiny_verifier).get_vocab()
    tokens = torch.randint(4, 500, (1, 30), generator=torch.Generator().manual_seed(0))
    ours = model.hidden(tokens) @ model.head.T
    torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-3, atol=1e-4)
    assert torch.equal(ours, model.hidden(tokens) @ model.head.T)
    expected = theirs.generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 30:]
    assert torch.equal(greedy_continuations(model, tokens[0], torch.tensor([29])).tokens[0], expected)


@torch.no_grad()
def test_all_layers_of_the_verifier_are_the_verifier(tiny_verifier: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_drafter("draft_model", tiny_verifier, num_layers=6)
    verifier = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32).eval()
    tokens = torch.randint(4, 500, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.hidden(tokens) @ model.head.T, verifier(tokens).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padding_changes_no_sequence(tiny_verifier: Path) -> None:
    model = make_drafter("draft_model", tiny_verifier)
    g = torch.Generator().manual_seed(0)
    sequences = [torch.randint(4, 500, (length,), generator=g) for length in (30, 9)]
    anchors = [torch.tensor([3, 20]), torch.tensor([2, 7])]
    together = model.supervised(sequences, anchors, 3)
    assert together.shape == (4, 3, 64)
    for place in (0, 1):
        alone = model.supervised(sequences[place : place + 1], anchors[place : place + 1], 3)
        torch.testing.assert_close(together[2 * place : 2 * place + 2], alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone[0, 1], model.hidden(sequences[place][None])[0, int(anchors[place][0]) + 1], rtol=1e-4, atol=1e-4)


def test_layers_of_a_w8a8_verifier_are_rounded_ones(tiny_verifier: Path, tmp_path: Path) -> None:
    quantise_directory(tiny_verifier, tmp_path / "w8a8", compute_identity(tiny_verifier))
    whole, rounded = (make_drafter("draft_model", directory).state_dict() for directory in (tiny_verifier, tmp_path / "w8a8"))
    assert whole.keys() == rounded.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(rounded[name], tensor, rtol=0, atol=float(tensor.abs().max()) / 127)


def test_layers_of_another_quantization_are_one_clear_line(tiny_verifier: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tests.pairing.edits import copy_model

    copy_model(tiny_verifier, tmp_path / "packed")
    weights = load_file(tmp_path / "packed" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2, dtype=torch.int32)
    save_file(weights, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"model\.layers\.0\.mlp\.up_proj\.weight is quantised \(torch\.int32\): no draft model can be made"):
        make_drafter("draft_model", tmp_path / "packed")


def test_prompt_lookup_takes_the_longest_match_and_the_earliest() -> None:
    config = NgramConfig(draft_tokens=3, ngram_min=1, ngram_max=2, vocab_size=99)
    assert look_up([1, 2, 9, 5, 2, 8, 1, 2], config) == [9, 5, 2]
    assert look_up([7, 4, 3, 4, 6, 4], config) == [3, 4, 6]
    assert look_up([7, 4, 4], config) == [4]
    assert look_up([7, 4, 5], config) == []
    assert look_up([7], config) == []
    assert look_up([7, 4, 5, 4], NgramConfig(draft_tokens=3, ngram_min=2, ngram_max=2, vocab_size=99)) == []


@pytest.mark.integration
def test_prompt_lookup_finds_what_vllm_finds() -> None:
    import random

    import numpy as np
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as find

    generator = random.Random(0)
    for _ in range(2000):
        tokens = [generator.randrange(3) for _ in range(generator.randrange(1, 30))]
        shortest = generator.randrange(1, 4)
        config = NgramConfig(draft_tokens=generator.randrange(1, 6), ngram_min=shortest, ngram_max=generator.randrange(shortest, 5), vocab_size=3)
        expected = find(np.array(tokens, dtype=np.int32), config.ngram_min, config.ngram_max, 1000, config.draft_tokens).tolist()
        assert look_up(tokens, config) == expected
