"""The train section of params.yaml."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from stages.params_file import Section, Seed


class LossWeights(Section):
    """Weights of the three losses (DSpark paper)."""

    ce: float = Field(0.1, ge=0.0, le=1e4, description="Cross-entropy with the data's token.")
    tv: float = Field(0.9, ge=0.0, le=1e4, description="L1 distance between drafter and verifier distributions.")
    confidence: float = Field(1.0, ge=0.0, le=1e4, description="Binary cross-entropy of the confidence head.")

    @model_validator(mode="after")
    def _something_is_learnt(self) -> LossWeights:
        if not self.ce and not self.tv:
            raise ValueError("ce = 0 and tv = 0: nothing would teach the drafter what to draft; set one of them above 0")
        return self


class Train(Section):
    """The drafter's training."""

    seed: Seed = Field(0, description="Seed of the weights' start, of the order of the samples and of the anchors.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    sequences_per_step: int = Field(4, ge=1, description="Sequences of one optimizer step.")
    anchors_per_sequence: int = Field(48, ge=1, description="Random anchors of one sequence; fewer where it has fewer.")
    optimizer: Literal["muon", "adamw"] = Field("muon", description="muon: for the backbone's matrices, AdamW for the rest; adamw: for all.")
    learning_rate: float = Field(6e-4, gt=0.0, description="Peak of the cosine schedule.")
    warmup_fraction: float = Field(0.04, ge=0.0, lt=1.0, description="Share of the steps that warm up linearly.")
    weight_decay: float = Field(0.0, ge=0.0, description="Decoupled decay, per step and unit of learning rate.")
    grad_clip: float = Field(1.0, gt=0.0, description="Largest gradient norm.")
    decay_gamma: float = Field(4.0, gt=0.0, description="Slot k weighs exp(-k/gamma).")
    loss: LossWeights = Field(default_factory=LossWeights)
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="Matrix products; weights and moments stay fp32. auto: bf16 on a GPU and where the processor has instructions for it, else fp32."
    )
    threads: int | None = Field(None, ge=1, le=4096, description="CPU threads; null: all cores. Another number may change the last bits of a result.")
    ranks: int = Field(1, ge=1, le=4096, description="Processes that train together, each on its share of a step; started by the stage, or by torchrun.")
    parallel: Literal["none", "ddp", "fsdp2"] = Field(
        "none", description="How ranks share a step: ddp: each holds all weights; fsdp2: weights, gradients and moments are divided among them."
    )
    accumulation: int = Field(1, ge=1, le=4096, description="Parts that a rank makes its share of a step in, one after another: less memory, the same step.")
    activation_checkpointing: bool = Field(False, description="Layers are computed again for the gradient instead of kept: less memory, more time.")
    compile: bool = Field(False, description="torch.compile the layers (CUDA).")
    attention: Literal["auto", "sdpa", "flex"] = Field(
        "auto", description="dspark, dflash: sdpa: products of each sequence; flex: one fused kernel over all (CUDA); auto: flex where there is CUDA."
    )
    checkpoint_every: int = Field(100, ge=1, description="Steps between checkpoints.")
    validation_every: int = Field(200, ge=1, description="Steps between validations.")
    validation_samples: int = Field(32, ge=1, description="Sequences of one validation.")

    @model_validator(mode="after")
    def _decay_leaves_something(self) -> Train:
        if self.weight_decay and self.weight_decay * self.learning_rate >= 1:
            raise ValueError(
                f"weight_decay = {self.weight_decay:g} with learning_rate = {self.learning_rate:g}: a step would take away all of each weight, or more; "
                "their product must be below 1"
            )
        return self

    @model_validator(mode="after")
    def _several_ranks_share_somehow(self) -> Train:
        if self.ranks > 1 and self.parallel == "none":
            raise ValueError(f"ranks = {self.ranks} with parallel = 'none': set parallel to ddp or fsdp2, or ranks to 1")
        return self
