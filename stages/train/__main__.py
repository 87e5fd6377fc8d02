"""Train the drafter.    python -m stages.train

Writes outputs/train/drafter/ (weights, config, the confidence head's calibration, manifest) and outputs/train/metrics.json. Checkpoints of an unfinished
run live in outputs/train/work/<key>/, where the key covers everything that the weights depend on. With train.ranks above 1 it
starts its own ranks, or is one that torchrun has started.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tqdm import tqdm

from stages.artifacts import digest_json, read_json, staged_directory, write_json, write_manifest
from stages.dataset import TokenSample, read_split
from stages.drafters.algorithms import ALGORITHMS, Target
from stages.drafters.calibration import CALIBRATION_FILE
from stages.errors import DraftlineError
from stages.hidden_states.format import data_digest
from stages.hidden_states.shards import open_dump
from stages.hidden_states.source import States, mode_of, open_states
from stages.pairing.frozen import load_frozen
from stages.pairing.identity import VerifierIdentity, read_identity
from stages.pairing.store import verifier_directory
from stages.params import Params
from stages.process import OUTPUTS, stage_main
from stages.train.acceleration import require_possible
from stages.train.calibrate import calibrate
from stages.train.data import TrainingSet, choose_draft_vocabulary, trainable
from stages.train.launch import launch
from stages.train.loop import check, require_finite_metrics, set_threads, train
from stages.train.objectives import OBJECTIVES
from stages.train.precision import product_dtype
from stages.train.ranks import Ranks, joined, launched, leads, require_started_as_set
from stages.train.tracking import tracked

FINAL_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HARDWARE = ("ranks", "parallel", "accumulation", "activation_checkpointing", "compile", "attention")
"""Knobs of how a step is divided and computed."""


def check_mask_token(samples: list[TokenSample], mask_token_id: int) -> None:
    """A mask token that chats use would make a drafted position look like a known one."""
    found = sum(mask_token_id in sample.input_ids for sample in samples)
    if found:
        raise DraftlineError(
            f"params.yaml: drafter.mask_token_id = {mask_token_id}: occurs in {found} of {len(samples)} training samples; choose one that never does"
        )


def unfinished(work: Path) -> list[str]:
    """Checkpoint folders beside `work`, where that has no checkpoint itself."""
    if work.is_dir() or not work.parent.is_dir():
        return []
    return sorted(entry.name for entry in work.parent.iterdir() if entry.is_dir())


def round_parameters(drafter: torch.nn.Module, dtype: torch.dtype) -> None:
    """Make every trained value representable in `dtype`; the tensors stay what they are."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.to(dtype))


def run(params: Params, output: Path) -> None:
    """Train in this process, or, where params ask for several ranks and this is none of them, in as many others."""
    ranks = params.train.ranks
    if ALGORITHMS[params.drafter.algorithm].create is None:
        if leads():
            write_untrained(read_identity(), params, output)
        return
    require_started_as_set(params.train)
    require_possible(params.train, params.drafter.algorithm)
    if ranks > 1 and (mode := mode_of(OUTPUTS / "extract" / "manifest.json")) != "offline":
        raise DraftlineError(
            f"params.yaml: train.ranks = {ranks}: with extraction.mode = {mode!r} one process reads the stream; set train.ranks 1, or extraction.mode offline"
        )
    if ranks > 1 and not launched():
        # Once: what it remembers spares each rank the reading of the whole dump.
        open_dump(OUTPUTS / "extract" / "manifest.json", read_identity().digest)
        launch(ranks)
        return
    with joined(params.train) as joint:
        run_rank(params, output, joint)


def run_rank(params: Params, output: Path, ranks: Ranks) -> None:
    identity = read_identity()
    directory = verifier_directory(identity)
    samples = read_split(OUTPUTS / "prepare", "train")
    held_out = read_split(OUTPUTS / "prepare", "validation")
    tokens = {sample.id: sample.input_ids for sample in [*samples, *held_out]}
    with open_states(OUTPUTS / "extract" / "manifest.json", identity.digest, directory, tokens, output) as states:
        train_on(states, samples, held_out, identity, params, output, ranks)


def write_untrained(identity: VerifierIdentity, params: Params, output: Path) -> None:
    """A drafter that has nothing to train: its settings."""
    algorithm = ALGORITHMS[params.drafter.algorithm]
    directory = verifier_directory(identity)
    config = algorithm.configure(params.drafter, Target(identity, directory, read_json(directory / "config.json"), []))
    with staged_directory(output / "drafter") as staged:
        algorithm.save_trained(staged, config, FINAL_DTYPES[params.drafter.dtype])
        write_manifest(staged, identity.digest, {"draft_tokens": config.draft_tokens, "training_samples": 0})
    write_json(output / "metrics.json", {})
    print(f"train: {config.algorithm} has nothing to train")


def train_on(
    states: States, samples: list[TokenSample], held_out: list[TokenSample], identity: VerifierIdentity, params: Params, output: Path, ranks: Ranks
) -> None:
    """Train on the hidden states of the two splits; the leader writes the finished drafter."""
    algorithm = ALGORITHMS[params.drafter.algorithm]
    directory = verifier_directory(identity)
    target = Target(identity, directory, read_json(directory / "config.json"), list(states.plan.layer_ids[:-1]))
    config = algorithm.configure(params.drafter, target)
    assert algorithm.create is not None
    dtype = product_dtype(params.train.precision)
    set_threads(params.train.threads)
    frozen = load_frozen(directory, dtype)
    if algorithm.masks:
        check_mask_token(samples, config.mask_token_id)
    draft_ids = choose_draft_vocabulary(samples, config.draft_vocab_size, config.vocab_size, identity.eos_token_ids) if config.reduced_vocabulary else None
    # A drafter that taps no layer gets the states of the first one, and does not look at them.
    tapped = config.layer_ids or target.layer_ids[:1]
    first = OBJECTIVES[config.algorithm].first_anchor
    if not trainable(samples, states, first):
        raise DraftlineError("outputs/extract: no sample of split train has hidden states and a supervised token; look at outputs/prepare/report.md")
    if held_out and not trainable(held_out, states, first):
        if ranks.leader:
            tqdm.write("train: no sample of split validation has hidden states and a supervised token: going on without validation and calibration")
        held_out = []
    data = TrainingSet(samples, states, frozen, draft_ids, dtype, tapped, first, ranks.device)
    validation = TrainingSet(held_out, states, frozen, draft_ids, dtype, tapped, first, ranks.device) if held_out else None
    torch.manual_seed(params.train.seed)
    drafter = algorithm.create(config, frozen, draft_ids, target).to(ranks.device)
    # Everything that the weights depend on; cadence of checkpoints and validations does not change them, nor how the states travel,
    # nor how a step's work is divided and computed (but for the order of sums): a training can go on on other hardware.
    settings = params.train.model_dump(exclude={"checkpoint_every", "validation_every", "validation_samples", "threads", *HARDWARE})
    depends = {
        "drafter": config.model_dump(),
        "train": settings,
        "plan": states.plan.to_json(),
        # The plan's digest is of ids and tokens of both splits together: not of where one ends, nor of what is supervised.
        "samples": data_digest((sample.id, sample.loss_mask) for sample in samples),
        "products": str(dtype),
        "torch": torch.__version__,
    }
    work = output / "work" / digest_json(depends)[:16]
    if ranks.leader and (others := unfinished(work)):
        tqdm.write(f"train: begins at step 0; unfinished trainings with other settings stay in {work.parent}: {', '.join(others)}; remove what is not needed")
    knobs = {"drafter": params.drafter.model_dump(), "train": params.train.model_dump()}
    if not ranks.leader:
        train(drafter, data, validation, params.train, work, lambda metrics, step: None, ranks)
        return
    with tracked(params.mlflow, f"train {config.algorithm}", knobs, {"verifier": identity.digest, "drafter": config.algorithm}) as log:
        train(drafter, data, validation, params.train, work, log, ranks)
        # The finished weights are the rounded ones: metrics and everything after this stage speak of the same numbers.
        round_parameters(drafter, FINAL_DTYPES[params.drafter.dtype])
        metrics = check(drafter, validation, params.train) if validation is not None else {}
        require_finite_metrics(metrics, params.train)
        calibration = calibrate(drafter, validation, params.train) if validation is not None else None
        if calibration is not None:
            metrics |= {f"survival_error_{mode}": max((row["ece_after"] for row in entry.held_out), default=0.0) for mode, entry in calibration.modes.items()}
        log({f"final.{name}": value for name, value in metrics.items()}, params.train.steps)
    with staged_directory(output / "drafter") as staged:
        algorithm.save_trained(staged, drafter, FINAL_DTYPES[params.drafter.dtype])
        if calibration is not None:
            write_json(staged / CALIBRATION_FILE, calibration.model_dump(mode="json"))
        write_manifest(staged, identity.digest, {"draft_tokens": config.draft_tokens, "training_samples": data.usable})
    write_json(output / "metrics.json", metrics)
    shutil.rmtree(work)


if __name__ == "__main__":
    raise SystemExit(stage_main("train", run, alone=leads()))
