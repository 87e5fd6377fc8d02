"""Several ranks train what one would: the same curve, from each other's checkpoints, until one of them dies."""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import chdir
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from stages.drafters.layers import Attention
from stages.errors import DraftlineError
from stages.params import Params, StageParams, Train, read_params
from stages.train import flex, loop
from stages.train.__main__ import run
from stages.train.data import blank_batch, make_batch
from stages.train.launch import cause
from stages.train.shares import divided, share
from tests.extract.workspace import last_line
from tests.train.ranked import STEPS, Case, params_of, result, train_case, train_cases, uneven, write_dump
from tests.train.streaming import STOP_SECONDS, Process, checkpoints, copy_workspace, make_template, reach, set_params, training
from tests.train.test_algorithms import build as build_other
from tests.train.test_loop import build, quiet, same, settings

SAME = 1e-5
WHOLE_SECONDS = 300.0
"""A whole training on a busy machine, most of it the start of its processes."""
TABLE = [
    Case(f"{parallel}-{name}", parallel, changes)
    for parallel in ("ddp", "fsdp2")
    for name, changes in {
        "plain": (),
        "accumulated": (("accumulation", 2),),
        "recomputed": (("activation_checkpointing", True), ("optimizer", "adamw")),
        "idle": (("sequences_per_step", 1), ("accumulation", 2)),
    }.items()
]
"""Three samples of a step for two ranks, or one; one sample of the data set has no states."""
REFERENCE = {"accumulated": "plain"}
"""What another case than that of the same name must agree with."""


@pytest.fixture(scope="module")
def trained(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table with two ranks, and its rows with one; a training that changes hands; two that are interrupted."""
    folder = tmp_path_factory.mktemp("ranks")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for case in TABLE[: len(TABLE) // 2]:
        changes = tuple(change for change in case.changes if change[0] != "accumulation")
        train_case(folder, tiny_verifier, Case(case.name.removeprefix("ddp-"), changes=changes))
    train_case(folder, tiny_verifier, Case("alone-accumulated", changes=(("accumulation", 2),)))
    train_case(folder, tiny_verifier, Case("first", stop=3, work="chain"))
    interrupted = [Case(f"{mode}-{part}", mode, (), stop, f"{mode}-again") for mode in ("ddp", "fsdp2") for part, stop in (("cut", 5), ("resumed", None))]
    train_cases(folder, tiny_verifier, 2, [*TABLE, *interrupted, Case("second", "ddp", stop=3, work="chain"), Case("third", "fsdp2", stop=3, work="chain")])
    train_case(folder, tiny_verifier, Case("fourth", work="chain"))
    torch.set_num_threads(threads)
    return folder


def difference(a: dict[int, float], b: dict[int, float]) -> float:
    return max(abs(a[step] - b[step]) / abs(b[step]) for step in a)


@pytest.mark.parametrize("name", ["alone-accumulated", *(case.name for case in TABLE)])
def test_two_ranks_and_parts_of_a_step_give_the_curve_of_one(name: str, trained: Path) -> None:
    row = name.partition("-")[2]
    losses, weights = result(trained, name)
    expected, expected_weights = result(trained, REFERENCE.get(row, row))
    assert list(losses) == list(expected)
    assert difference(losses, expected) < SAME
    for key, tensor in weights.items():
        assert torch.allclose(tensor, expected_weights[key], atol=1e-4), key


def test_a_step_without_any_usable_sample_is_left_out_by_all(trained: Path) -> None:
    losses, _ = result(trained, "idle")
    assert 0 < len(losses) < STEPS


def test_a_training_goes_on_with_other_ranks(trained: Path) -> None:
    """One rank to step 2, two by DDP to 4, two by FSDP2 to 6, one to the end."""
    losses, _ = result(trained, "fourth")
    expected, _ = result(trained, "plain")
    assert list(losses) == [6, 7]
    assert difference(losses, expected) < SAME


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_the_same_ranks_resume_bit_for_bit(mode: str, trained: Path) -> None:
    losses, weights = result(trained, f"{mode}-resumed")
    expected, expected_weights = result(trained, f"{mode}-plain")
    assert list(losses) == [4, 5, 6, 7]
    assert all(losses[step] == expected[step] for step in losses)
    assert all(torch.equal(weights[key], expected_weights[key]) for key in weights)


@pytest.mark.long
def test_three_ranks_resume_bit_for_bit(tiny_verifier: Path, tmp_path: Path) -> None:
    """With three, sums depend on their order."""
    cases = [Case("whole", "ddp"), Case("cut", "ddp", stop=5, work="again"), Case("resumed", "ddp", work="again")]
    train_cases(tmp_path, tiny_verifier, 3, cases)
    (_, weights), (_, expected) = result(tmp_path, "resumed"), result(tmp_path, "whole")
    assert all(torch.equal(weights[key], expected[key]) for key in weights)


costs = st.lists(st.integers(1, 1000), max_size=30)


@given(costs, st.integers(1, 5), st.integers(1, 3))
def test_every_sample_of_a_step_is_in_one_share(values: list[int], ranks: int, accumulation: int) -> None:
    items = [100 + place for place in range(len(values))]
    shares = [share(values, items, rank, ranks, accumulation) for rank in range(ranks)]
    assert len({len(parts) for parts in shares}) == 1, "ranks wait for each other after each part"
    assert len(shares[0]) <= accumulation
    assert all(any(row) for row in zip(*shares, strict=True)), "no part is empty on all ranks"
    assert sorted(item for parts in shares for part in parts for item in part) == items


@given(costs.filter(bool), st.integers(1, 6))
def test_shares_cost_about_the_same(values: list[int], parts: int) -> None:
    """No part costs more than the mean and one sample; the most expensive comes first."""
    loads = [sum(values[place] for place in part) for part in divided(values, parts)]
    assert loads == sorted(loads, reverse=True)
    assert loads[0] <= sum(values) / parts + max(values)


def test_one_rank_takes_a_step_as_it_is() -> None:
    assert share([1, 9, 5], [7, 3, 4], 0, 1, 1) == [[7, 3, 4]]


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3", "draft_model"])
def test_a_blank_batch_reaches_every_weight_and_adds_nothing(algorithm: str, tiny_verifier: Path) -> None:
    """A weight that it does not reach would leave the other ranks waiting."""
    drafter, data = build(tiny_verifier, 1, draft_vocab_size=300) if algorithm == "dspark" else build_other(algorithm, tiny_verifier, 1)
    batch = blank_batch(data, len(drafter.config.layer_ids), drafter.config.draft_tokens)
    (loop.objective(drafter, data.head, batch, settings().loss, torch.float32).loss * 0.0).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("algorithm", ["eagle3", "draft_model"])
def test_recomputed_layers_give_the_same_weights(algorithm: str, tiny_verifier: Path, tmp_path: Path) -> None:
    models = []
    for recomputed in (False, True):
        drafter, data = build_other(algorithm, tiny_verifier, 2)
        loop.train(drafter, data, None, settings(steps=3, activation_checkpointing=recomputed), tmp_path / str(recomputed), quiet)
        models.append(drafter)
    assert same(*models)


def test_flex_attention_is_the_same_attention(tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, so that it runs without CUDA."""
    monkeypatch.setattr(flex, "_compiled", lambda function: function)
    drafter, data = uneven(tiny_verifier)
    batch = make_batch(data, [0, 3, 5], 6, drafter.config.draft_tokens, 4.0, ("key",))
    assert batch is not None
    with torch.no_grad():
        expected = drafter.hidden(batch.blocks)
        for module in drafter.modules():
            if isinstance(module, Attention):
                module.attend = flex.attend_flex
        assert torch.allclose(drafter.hidden(batch.blocks), expected, atol=1e-5)


# The stage itself.


@pytest.fixture(scope="module")
def template(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template") / "workspace", tiny_verifier)


@pytest.fixture
def workspace(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "workspace", symlinks=True)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_a_dead_rank_ends_the_training_and_another_number_of_ranks_finishes_it(parallel: str, workspace: Path) -> None:
    write_dump(workspace, ranks=2, parallel=parallel, steps=60, checkpoint_every=1, validation_every=1000)
    with training(workspace) as process:
        reach(process, 3, WHOLE_SECONDS)
        family = psutil.Process(process.process.pid).children(recursive=True)
        ranks = [child for child in family if "spawn_main" in " ".join(child.cmdline())]
        assert len(ranks) == 2
        ranks[1].kill()
        died = time.monotonic()
        status, output = process.finish(STOP_SECONDS)
        print(f"ended after {time.monotonic() - died:.1f} s")
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
    assert status == 1
    assert last_line(output) == "draftline train: rank 1 was ended by SIGKILL; the last checkpoint is kept, run again to go on from there"
    assert "Traceback" not in output
    assert output.count("draftline") == 1
    done = max(checkpoints(workspace))
    set_params(workspace, train={"ranks": 1, "parallel": "none", "checkpoint_every": 1000})
    with training(workspace) as process:
        status, output = process.finish(WHOLE_SECONDS)
    assert status == 0, output
    assert f" {done}/60" in output, "it went on where the ranks had stopped"


@pytest.mark.long
def test_a_rank_that_fails_is_named_with_its_cause(workspace: Path) -> None:
    write_dump(workspace, wrong="train-7", ranks=2, parallel="ddp")
    with training(workspace) as process:
        status, output = process.finish(WHOLE_SECONDS)
    assert status == 1
    assert re.fullmatch(r"draftline train: rank [01]: .*: sample train-7 was extracted from other tokens than the data set's", last_line(output))
    assert "Traceback" not in output


@pytest.mark.long
def test_torchrun_starts_the_ranks_as_well(workspace: Path) -> None:
    write_dump(workspace, ranks=2, parallel="fsdp2", steps=4)
    with Process(workspace, "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "stages.train") as process:
        status, output = process.finish(WHOLE_SECONDS)
    assert status == 0, output
    assert (workspace / "outputs" / "train" / "drafter" / "manifest.json").is_file()
    assert not list((workspace / "outputs" / "train" / "work").iterdir())


def failure(folder: Path, status: int, message: object = None) -> ProcessFailure:
    file = folder / "error.json"
    if message is not None:
        file.write_text(json.dumps({"message": message}))
    return ProcessFailure(local_rank=0, pid=1, exitcode=status, error_file=str(file))


def test_a_cause_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = "; the last checkpoint is kept, run again to go on from there"
    assert cause(3, failure(tmp_path, -11)) == f"rank 3 was ended by SIGSEGV{kept}"
    assert cause(3, failure(tmp_path, 7)) == f"rank 3 ended with status 7{kept}"
    told = {"message": "DraftlineError: rank 3: what", "extraInfo": {"py_callstack": "stack", "timestamp": "1"}}
    assert cause(3, failure(tmp_path, 1, told)) == "rank 3: what"
    assert capsys.readouterr().err == ""
    told["message"] = "ValueError: a\nb"
    assert cause(3, failure(tmp_path, 1, told)) == f"rank 3: ValueError: a b{kept}"
    assert capsys.readouterr().err == "stack\n"


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


@pytest.mark.parametrize(
    ("train", "says"),
    [
        pytest.param({"compile": True}, "train.compile = True: needs CUDA, and there is none here; set False", marks=NO_CUDA),
        pytest.param({"attention": "flex"}, "train.attention = 'flex': needs CUDA, and there is none here; set 'sdpa'", marks=NO_CUDA),
        (
            {"ranks": 2, "parallel": "ddp"},
            "train.ranks = 2: with extraction.mode = 'online' one process reads the stream; set train.ranks 1, or extraction.mode offline",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_before_anything_starts(train: dict[str, Any], says: str, template: Path, tmp_path: Path) -> None:
    workspace = copy_workspace(template, tmp_path / "workspace", transport="file")
    set_params(workspace, train=train)
    with chdir(workspace), pytest.raises(DraftlineError) as refused:
        run(cast(Params, StageParams(read_params(), "train")), Path("outputs/train"))
    assert str(refused.value) == f"params.yaml: {says}"


def test_torchrun_with_another_number_of_ranks_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", "RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with chdir(workspace), pytest.raises(DraftlineError, match=r"^params\.yaml: train\.ranks = 1: torchrun started 3; make them the same$"):
        run(cast(Params, StageParams(read_params(), "train")), Path("outputs/train"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ranks": 0}, "greater than or equal to 1"),
        ({"ranks": 2}, "ranks = 2 with parallel = 'none': set parallel to ddp or fsdp2, or ranks to 1"),
        ({"parallel": "ddp2"}, "'none', 'ddp' or 'fsdp2'"),
        ({"accumulation": 0}, "greater than or equal to 1"),
        ({"attention": "dense"}, "'auto', 'sdpa' or 'flex'"),
        ({"threads": 100_000}, "less than or equal to 4096"),
        ({"loss": {"tv": 0, "ce": 0.0}}, "ce = 0 and tv = 0: nothing would teach the drafter what to draft"),
        ({"loss": {"ce": 1e30}}, "less than or equal to 10000"),
        ({"weight_decay": 1e6}, "weight_decay = 1e\\+06 with learning_rate = 0.0006: a step would take away all of each weight"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Train.model_validate({"steps": 1, **changes})


def test_the_default_is_one_rank_as_ever() -> None:
    params = params_of(Case("x"))
    assert (params.ranks, params.parallel, params.accumulation) == (1, "none", 1)
