"""Train the drafter.    python -m stages.train

Writes outputs/train/drafter/ (weights, config, the confidence head's calibration, manifest) and outputs/train/metrics.json. Checkpoints of an unfinished
run live in outputs/train/work/<key>/, where the key covers everything that the weights depend on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from stages.artifacts import digest_json, read_json, staged_directory, write_json, write_manifest
from stages.dataset import TokenSample, read_split
from stages.drafters.calibration import CALIBRATION_FILE
from stages.drafters.checkpoint import save_trained
from stages.drafters.config import DrafterConfig
from stages.drafters.model import Drafter
from stages.errors import DraftlineError
from stages.hidden_states.source import States, open_states
from stages.pairing.frozen import load_frozen
from stages.pairing.identity import VerifierIdentity, read_identity
from stages.pairing.store import verifier_directory
from stages.params import Drafter as DrafterParams
from stages.params import Params
from stages.process import OUTPUTS, stage_main
from stages.train.calibrate import calibrate
from stages.train.data import TrainingSet, choose_draft_vocabulary
from stages.train.loop import DTYPES, check, set_threads, train
from stages.train.tracking import tracked

FINAL_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def drafter_config(params: DrafterParams, identity: VerifierIdentity, layer_ids: list[int], model_config: dict[str, object]) -> DrafterConfig:
    """Join the knobs of params.yaml with the verifier's shape.

    Raises:
        DraftlineError: a knob that this verifier cannot satisfy.
    """
    vocab = identity.vocab_size
    if params.draft_vocab_size is not None and params.draft_vocab_size > vocab:
        raise DraftlineError(f"params.yaml: drafter.draft_vocab_size = {params.draft_vocab_size}: must be at most the verifier's vocabulary, {vocab}")
    if params.mask_token_id >= vocab:
        raise DraftlineError(f"params.yaml: drafter.mask_token_id = {params.mask_token_id}: must be below the verifier's vocabulary, {vocab}")
    config = {**model_config}
    heads = int(str(config["num_attention_heads"]))
    hidden = identity.hidden_size
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    return DrafterConfig.model_validate(
        {
            **params.model_dump(exclude={"dtype", "intermediate_size", "draft_vocab_size"}),
            "draft_vocab_size": params.draft_vocab_size or vocab,
            "vocab_size": vocab,
            "layer_ids": layer_ids,
            "hidden_size": hidden,
            "intermediate_size": params.intermediate_size or config["intermediate_size"],
            "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or hidden // heads,
            "rms_norm_eps": config["rms_norm_eps"],
            "max_position_embeddings": config["max_position_embeddings"],
            "rope_parameters": rope,
        }
    )


def check_mask_token(samples: list[TokenSample], mask_token_id: int) -> None:
    """A mask token that chats use would make a drafted position look like a known one."""
    found = sum(mask_token_id in sample.input_ids for sample in samples)
    if found:
        raise DraftlineError(
            f"params.yaml: drafter.mask_token_id = {mask_token_id}: occurs in {found} of {len(samples)} training samples; choose one that never does"
        )


def round_parameters(drafter: Drafter, dtype: torch.dtype) -> None:
    """Make every trained value representable in `dtype`; the tensors stay what they are."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.to(dtype))


def run(params: Params, output: Path) -> None:
    identity = read_identity()
    directory = verifier_directory(identity)
    samples = read_split(OUTPUTS / "prepare", "train")
    held_out = read_split(OUTPUTS / "prepare", "validation")
    tokens = {sample.id: sample.input_ids for sample in [*samples, *held_out]}
    with open_states(OUTPUTS / "extract" / "manifest.json", identity.digest, directory, tokens, output) as states:
        train_on(states, samples, held_out, identity, params, output)


def train_on(states: States, samples: list[TokenSample], held_out: list[TokenSample], identity: VerifierIdentity, params: Params, output: Path) -> None:
    """Train on the hidden states of the two splits and write the finished drafter."""
    directory = verifier_directory(identity)
    config = drafter_config(params.drafter, identity, list(states.plan.layer_ids[:-1]), read_json(directory / "config.json"))
    dtype = DTYPES[params.train.precision]
    threads = set_threads(params.train.threads)
    frozen = load_frozen(directory, dtype)
    check_mask_token(samples, config.mask_token_id)
    draft_ids = choose_draft_vocabulary(samples, config.draft_vocab_size, config.vocab_size, identity.eos_token_ids) if config.reduced_vocabulary else None
    data = TrainingSet(samples, states, frozen, draft_ids, dtype)
    validation = TrainingSet(held_out, states, frozen, draft_ids, dtype) if held_out else None
    torch.manual_seed(params.train.seed)
    drafter = Drafter(config, frozen, draft_ids)
    # Everything that the weights depend on; cadence of checkpoints and validations does not change them, nor how the states travel.
    settings = params.train.model_dump(exclude={"checkpoint_every", "validation_every", "validation_samples", "threads"})
    depends = {"drafter": config.model_dump(), "train": settings, "plan": states.plan.to_json(), "threads": threads, "torch": torch.__version__}
    work = output / "work" / digest_json(depends)[:16]
    knobs = {"drafter": params.drafter.model_dump(), "train": params.train.model_dump()}
    with tracked(params.mlflow, f"train {config.algorithm}", knobs, {"verifier": identity.digest, "drafter": config.algorithm}) as log:
        train(drafter, data, validation, params.train, work, log)
        # The finished weights are the rounded ones: metrics and everything after this stage speak of the same numbers.
        round_parameters(drafter, FINAL_DTYPES[params.drafter.dtype])
        metrics = check(drafter, validation, params.train) if validation is not None else {}
        calibration = calibrate(drafter, validation, params.train) if validation is not None else None
        if calibration is not None:
            metrics |= {f"survival_error_{mode}": max((row["ece_after"] for row in entry.held_out), default=0.0) for mode, entry in calibration.modes.items()}
        log({f"final.{name}": value for name, value in metrics.items()}, params.train.steps)
    with staged_directory(output / "drafter") as staged:
        save_trained(staged, drafter, FINAL_DTYPES[params.drafter.dtype])
        if calibration is not None:
            write_json(staged / CALIBRATION_FILE, calibration.model_dump(mode="json"))
        write_manifest(staged, identity.digest, {"draft_tokens": config.draft_tokens, "training_samples": len(data)})
    write_json(output / "metrics.json", metrics)
    shutil.rmtree(work)


if __name__ == "__main__":
    raise SystemExit(stage_main("train", run))
