"""Shape of a drafter, and the same thing as the `config.json` of a speculators checkpoint."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from stages.errors import ArtifactError

SPECULATORS_VERSION = "0.9.0"
ARCHITECTURES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}


class LayerShape(BaseModel):
    """What the layers of a drafter take over from its verifier.

    Attributes:
        vocab_size: the verifier's vocabulary `V`.
        rope_parameters: the verifier's, so that positions mean the same to both.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]


def layer_fields(shape: LayerShape, num_layers: int) -> dict[str, Any]:
    """`transformer_layer_config` of a speculators checkpoint, but for what the kind of layer adds."""
    out: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": shape.rope_parameters,
        "tie_word_embeddings": False,
    }
    # Readers before transformers 5 know only these two.
    if "rope_theta" in shape.rope_parameters:
        out["rope_theta"] = shape.rope_parameters["rope_theta"]
    if shape.rope_parameters.get("rope_type", "default") != "default":
        out["rope_scaling"] = shape.rope_parameters
    return out


def read_layer_fields(layers: dict[str, Any]) -> dict[str, Any]:
    """The same back from a `transformer_layer_config`. Raises KeyError: a key is missing."""
    return {
        "vocab_size": layers["vocab_size"],
        "hidden_size": layers["hidden_size"],
        "intermediate_size": layers["intermediate_size"],
        "num_heads": layers["num_attention_heads"],
        "num_kv_heads": layers["num_key_value_heads"],
        "head_dim": layers["head_dim"],
        "rms_norm_eps": layers["rms_norm_eps"],
        "max_position_embeddings": layers["max_position_embeddings"],
        "rope_parameters": layers["rope_parameters"],
    }


def speculators_header(algorithm: str, architecture: str, draft_tokens: int, verifier_name: str, verifier_architectures: list[str]) -> dict[str, Any]:
    """What every speculators `config.json` begins with.

    Args:
        draft_tokens: without this number vLLM drafts block_size tokens, one too many when the anchor predicts nothing.
        verifier_name: what `vllm serve <checkpoint>` loads as verifier; nothing compares it with anything.
        verifier_architectures: `architectures` of the verifier's own config.
    """
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier_name, "architectures": verifier_architectures},
        },
    }


class DrafterConfig(LayerShape):
    """Everything needed to build a block drafter (DSpark, DFlash) without its verifier's files.

    Attributes:
        layer_ids: tapped verifier layers, ascending; id `i` enters layer `i` (`L` of them).
        draft_vocab_size: `D`, at most `V`.
    """

    algorithm: Literal["dspark", "dflash"]
    block_size: int
    num_layers: int
    sample_from_anchor: bool
    draft_vocab_size: int
    mask_token_id: int
    markov_rank: int
    markov_head_type: Literal["vanilla", "gated", "rnn"]
    confidence_head: bool
    confidence_head_with_markov: bool
    layer_ids: list[int]

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted per round, `K`."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    @property
    def exported_algorithm(self) -> Literal["dspark", "dflash"]:
        """A DSpark drafter without any head of its own is a DFlash drafter.

        vLLM would build a zero-width Markov head for rank 0 under the type `dspark`.
        """
        return "dflash" if self.markov_rank == 0 else self.algorithm

    def layer_config(self) -> dict[str, Any]:
        """The backbone as a Qwen3 configuration; its `vocab_size` is the verifier's."""
        return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, **layer_fields(self, self.num_layers)}

    def to_speculators(self, verifier_name: str, verifier_architectures: list[str]) -> dict[str, Any]:
        """The checkpoint's `config.json`; arguments as `speculators_header`."""
        algorithm = self.exported_algorithm
        out: dict[str, Any] = {
            **speculators_header(algorithm, ARCHITECTURES[algorithm], self.draft_tokens, verifier_name, verifier_architectures),
            "transformer_layer_config": self.layer_config(),
            "aux_hidden_state_layer_ids": self.layer_ids,
            "draft_vocab_size": self.draft_vocab_size,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            # vLLM takes a missing key for false, speculators' DSpark for true: always written.
            "sample_from_anchor": self.sample_from_anchor,
            "target_hidden_size": self.hidden_size,
            # vLLM derives the causality of every DFlash layer from this key; ours attend both ways within a block.
            "sliding_window_non_causal": True,
            "tie_word_embeddings": False,
        }
        if algorithm == "dspark":
            out |= {
                "markov_rank": self.markov_rank,
                "markov_head_type": self.markov_head_type,
                "enable_confidence_head": self.confidence_head,
                "confidence_head_with_markov": self.confidence_head_with_markov,
            }
        return out

    @classmethod
    def from_speculators(cls, config: dict[str, Any], where: str = "config.json") -> DrafterConfig:
        """Read a checkpoint's `config.json` back.

        Raises:
            ArtifactError: a key is missing.
        """
        try:
            layers = config["transformer_layer_config"]
            algorithm = config["speculators_model_type"]
            dspark = algorithm == "dspark"
            return cls(
                algorithm=algorithm,
                block_size=config["block_size"],
                num_layers=layers["num_hidden_layers"],
                sample_from_anchor=config["sample_from_anchor"],
                draft_vocab_size=config["draft_vocab_size"],
                mask_token_id=config["mask_token_id"],
                markov_rank=config["markov_rank"] if dspark else 0,
                markov_head_type=config["markov_head_type"] if dspark else "vanilla",
                confidence_head=config["enable_confidence_head"] if dspark else False,
                confidence_head_with_markov=config["confidence_head_with_markov"] if dspark else False,
                layer_ids=config["aux_hidden_state_layer_ids"],
                **read_layer_fields(layers),
            )
        except KeyError as error:
            raise ArtifactError(f"{where}: key {error.args[0]!r} is missing") from None
