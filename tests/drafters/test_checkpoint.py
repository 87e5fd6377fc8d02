"""A drafter comes back from its directory alone, bit for bit, and code that nobody here wrote reads it the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.drafters.checkpoint import load_drafter, load_trained, save_checkpoint, save_trained, tensor_names
from stages.drafters.draft import greedy_drafts
from stages.drafters.model import Drafter
from stages.errors import ArtifactError
from stages.pairing.frozen import load_frozen
from tests.drafters.shapes import KINDS, config, drafter, frozen, name_of
from tests.tiny import make_verifier


def logits(model: Drafter) -> torch.Tensor:
    g = torch.Generator().manual_seed(4)
    context = torch.randn(9, len(model.config.layer_ids) * model.config.hidden_size, generator=g)
    return greedy_drafts(model, context, torch.tensor([12, 50]), torch.tensor([4, 9])).logits


@pytest.mark.parametrize("changes", KINDS, ids=name_of)
def test_read_back_from_disk_alone_gives_the_same_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    model = drafter(config(**changes))
    save_trained(tmp_path / "trained", model, torch.bfloat16)
    trained = load_trained(tmp_path / "trained", frozen(), torch.float32)
    assert torch.equal(logits(trained), logits(model))
    save_checkpoint(tmp_path / "checkpoint", trained, "org/name", ["LlamaForCausalLM"], torch.bfloat16)
    again = load_drafter(tmp_path / "checkpoint", frozen(), torch.float32)
    assert torch.equal(logits(again), logits(model))
    assert again.config.model_dump() == model.config.model_copy(update={"algorithm": model.config.exported_algorithm}).model_dump()


def test_rank_zero_is_exported_as_dflash_that_attends_both_ways(tmp_path: Path) -> None:
    """vLLM builds a zero-width Markov head for rank 0, and serves a DFlash drafter causally unless told otherwise."""
    model = drafter(config(markov_rank=0, confidence_head=False, confidence_head_with_markov=False))
    exported = save_checkpoint(tmp_path, model, "org/name", [], torch.bfloat16)
    assert exported["speculators_model_type"] == "dflash"
    assert exported["sliding_window_non_causal"] is True
    assert exported["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == model.config.block_size - 1
    assert exported["sample_from_anchor"] is False


def test_full_vocabulary_leaves_the_verifiers_matrices_out(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "full", drafter(config()), "v", [], torch.bfloat16)
    assert not {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"} & set(tensor_names(tmp_path / "full"))
    save_checkpoint(tmp_path / "reduced", drafter(config(draft_vocab_size=40)), "v", [], torch.bfloat16)
    assert {"lm_head.weight", "d2t", "t2d"} <= set(tensor_names(tmp_path / "reduced"))
    tensors = load_file(tmp_path / "reduced" / "model.safetensors")
    assert torch.equal(torch.nonzero(tensors["t2d"])[:, 0], tensors["d2t"] + torch.arange(40))


@pytest.mark.parametrize(("broken", "named"), [("fc.weight", "fc.weight"), ("d2t", "d2t"), ("lm_head.weight", "lm_head.weight")])
def test_a_missing_tensor_is_named(broken: str, named: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, drafter(config(draft_vocab_size=40)), "v", [], torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[broken]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match=named):
        load_drafter(tmp_path, frozen(), torch.float32)


def test_a_missing_config_key_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, drafter(config()), "v", [], torch.bfloat16)
    data = json.loads((tmp_path / "config.json").read_text())
    del data["sample_from_anchor"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match="sample_from_anchor"):
        load_drafter(tmp_path, frozen(), torch.float32)


@pytest.mark.parametrize("changes", [k for k in KINDS if k.get("algorithm") != "dspark" or k.get("markov_rank")], ids=name_of)
def test_speculators_drafts_the_same_tokens(changes: dict[str, Any], tmp_path: Path) -> None:
    """Conformance: the `speculators` package loads the checkpoint and its own forward gives our logits (fp32)."""
    speculators = pytest.importorskip("speculators", reason="test-only dependency")
    verifier = make_verifier(tmp_path / "verifier")
    ends = load_frozen(verifier, torch.float32)
    vocab = len(ends.embedding)
    model = drafter(config(vocab=vocab, **{"draft_vocab_size": vocab, **changes}), ends=ends)
    save_checkpoint(tmp_path / "checkpoint", model, str(verifier), ["LlamaForCausalLM"], torch.bfloat16)
    theirs = speculators.SpeculatorModel.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    theirs.config.transformer_layer_config._attn_implementation = "eager"
    theirs.load_verifier_weights()
    theirs.eval()
    theirs_state = {name: value for name, value in theirs.state_dict().items()}
    for name, value in model.state_dict().items():
        assert torch.equal(theirs_state[name].float(), value), name

    g = torch.Generator().manual_seed(2)
    length, block = 30, model.config.block_size
    context = torch.randn(length, len(model.config.layer_ids) * model.config.hidden_size, generator=g)
    tokens = torch.randint(10, vocab, (length,), generator=g)
    anchors = torch.tensor([6, 15])
    captured: dict[str, torch.Tensor] = {}
    theirs.norm.register_forward_hook(lambda module, args, output: captured.__setitem__("hidden", output))
    their_hidden = their_backbone(theirs, context, tokens, anchors)
    from stages.drafters.model import Blocks, make_segments

    ours = model.hidden(Blocks(context, torch.arange(length), tokens[anchors], anchors, make_segments([length], [anchors])))
    theirs_slots = their_hidden.view(len(anchors), block, -1)
    theirs_slots = theirs_slots if model.config.sample_from_anchor else theirs_slots[:, 1:]
    torch.testing.assert_close(ours, theirs_slots, rtol=1e-4, atol=1e-4)
    drafts = greedy_drafts(model, context, tokens[anchors], anchors)
    assert torch.equal(their_drafts(theirs, theirs_slots, tokens[anchors]), drafts.tokens)


def their_backbone(theirs: Any, context: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Run the speculators model's own modules on two blocks: `[2·block, H]`."""
    block = theirs.config.block_size
    length = len(context)
    mask = theirs.config.mask_token_id
    ids = torch.full((len(anchors), block), mask)
    ids[:, 0] = tokens[anchors]
    positions = torch.cat([torch.arange(length), (anchors[:, None] + torch.arange(block)).reshape(-1)])[None]
    noise = theirs.embed_tokens(ids.reshape(1, -1))
    target = theirs.hidden_norm(theirs.fc(context[None]))
    rope = theirs.rotary_emb(noise, positions)
    q_len = len(anchors) * block
    allowed = torch.zeros(q_len, length + q_len, dtype=torch.bool)
    for j, anchor in enumerate(anchors.tolist()):
        rows = slice(j * block, (j + 1) * block)
        allowed[rows, :anchor] = True
        allowed[rows, length + j * block : length + (j + 1) * block] = True
    bias = torch.zeros(1, 1, *allowed.shape).masked_fill(~allowed, float("-inf"))
    hidden = noise
    for layer in theirs.layers:
        layer.self_attn.config._attn_implementation = "eager"
        hidden = layer(target_hidden=target, hidden_states=hidden, attention_mask=bias, position_embeddings=rope)
    out: torch.Tensor = theirs.norm(hidden)[0]
    return out


def their_drafts(theirs: Any, hidden: torch.Tensor, anchor_tokens: torch.Tensor) -> torch.Tensor:
    """Greedy tokens from the speculators model's own heads, left to right."""
    previous, chosen = anchor_tokens, []
    fed: list[torch.Tensor] = []
    for k in range(hidden.shape[1]):
        fed.append(previous)
        logits = theirs.lm_head(hidden[:, k])
        head = getattr(theirs, "markov_head", None)
        if head is not None:
            logits = logits + head.block_bias(prev_token_ids=torch.stack(fed, 1), hidden_states=hidden[:, : k + 1])[:, -1]
        draft = logits.argmax(-1)
        previous = draft if theirs.d2t is None else draft + theirs.d2t[draft]
        chosen.append(previous)
    return torch.stack(chosen, 1)
