"""The training stage on a dump: what it refuses, what it says, and which unfinished training it goes on with."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from stages.artifacts import read_json
from stages.dataset import TokenSample, read_split, write_split
from stages.errors import DraftlineError
from stages.params import Params, StageParams, read_params
from stages.train.__main__ import run
from tests.extract.workspace import last_line
from tests.train.ranked import Case, stopping, write_dump
from tests.train.streaming import STOP_SECONDS, checkpoints, make_template, reach, set_params, training

PLAIN: dict[str, Any] = {"steps": 4, "validation_every": 1000}


@pytest.fixture(scope="module")
def template(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a dump."""
    folder = make_template(tmp_path_factory.mktemp("template") / "workspace", tiny_verifier)
    write_dump(folder, **PLAIN)
    return folder


@pytest.fixture
def workspace(template: Path, tmp_path: Path) -> Iterator[Path]:
    folder = shutil.copytree(template, tmp_path / "workspace", symlinks=True)
    # MLflow keeps one store per URI: a relative one would be the first workspace's for all.
    set_params(folder, mlflow={"tracking_uri": f"sqlite:///{folder}/mlflow.db"})
    threads = torch.get_num_threads()
    yield folder
    torch.set_num_threads(threads)


def train(workspace: Path, stop: int | None = None, **changes: Any) -> None:
    """Run the stage in this process; `stop` interrupts it in the middle of that step."""
    set_params(workspace, train=changes)
    with chdir(workspace), stopping(Case("", stop=stop)):
        run(cast(Params, StageParams(read_params(), "train")), Path("outputs/train"))


def edit(workspace: Path, split: str, change: Callable[[TokenSample], TokenSample]) -> None:
    """Prepare a split anew."""
    prepared = workspace / "outputs" / "prepare"
    write_split(prepared, split, [change(sample) for sample in read_split(prepared, split)])


def unsupervised(sample: TokenSample) -> TokenSample:
    return dataclasses.replace(sample, loss_mask=[0] * len(sample.input_ids))


def finished(workspace: Path) -> bool:
    return (workspace / "outputs" / "train" / "drafter").exists()


def test_a_dump_of_other_samples_is_refused(workspace: Path) -> None:
    """Samples that are not in it would be skipped, and a drafter that has seen none of them be written as trained."""
    edit(workspace, "train", lambda sample: dataclasses.replace(sample, id=f"new-{sample.id}"))
    with pytest.raises(DraftlineError, match=r"manifest\.json: made for other samples than outputs/prepare holds now; run `dvc repro"):
        train(workspace)
    assert not finished(workspace)


@pytest.mark.parametrize(
    ("change", "goes_on"),
    [
        pytest.param(lambda sample: dataclasses.replace(sample, loss_mask=[0, *sample.loss_mask[1:]]), False, id="what is supervised"),
        pytest.param(lambda sample: dataclasses.replace(sample, messages=[{"role": "user", "content": "x"}]), True, id="what training does not read"),
    ],
)
def test_a_training_goes_on_where_its_weights_would_be_the_same(
    change: Callable[[TokenSample], TokenSample], goes_on: bool, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(workspace, stop=3)
    assert checkpoints(workspace) == [1, 2]
    edit(workspace, "train", change)
    train(workspace, stop=1)
    work = sorted((workspace / "outputs" / "train" / "work").iterdir())
    assert len(work) == (1 if goes_on else 2)
    assert ("train: begins at step 0; unfinished trainings with other settings stay in outputs/train/work: " in capsys.readouterr().out) is not goes_on


def test_the_border_between_the_splits_counts(workspace: Path) -> None:
    """The dump is the same, what is trained on is not."""
    train(workspace, stop=2)
    prepared = workspace / "outputs" / "prepare"
    samples, held_out = read_split(prepared, "train"), read_split(prepared, "validation")
    write_split(prepared, "train", [*samples, held_out[0]])
    write_split(prepared, "validation", held_out[1:])
    train(workspace, stop=2)
    assert len(list((workspace / "outputs" / "train" / "work").iterdir())) == 2


def test_a_training_goes_on_with_another_number_of_threads(workspace: Path) -> None:
    train(workspace, stop=3, threads=1)
    train(workspace, stop=2, threads=2)
    assert checkpoints(workspace) == [2, 3]


@pytest.mark.parametrize(("split", "stops"), [("train", True), ("validation", False)])
def test_a_split_without_a_supervised_token_is_named(split: str, stops: bool, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(workspace, split, unsupervised)
    if stops:
        with pytest.raises(DraftlineError, match="no sample of split train has hidden states and a supervised token"):
            train(workspace)
    else:
        train(workspace)
        assert "no sample of split validation has hidden states and a supervised token: going on without" in capsys.readouterr().out
        assert read_json(workspace / "outputs" / "train" / "metrics.json") == {}
    assert finished(workspace) is not stops


def test_a_step_of_one_that_diverges_writes_nothing(workspace: Path) -> None:
    """Its loss is that of the weights before it, and the ones after it are finite."""
    with pytest.raises(DraftlineError, match=r"train\.learning_rate = 1e\+15: training diverged, .* is nan; lower it"):
        train(workspace, steps=1, learning_rate=1e15)
    assert not finished(workspace)


def test_samples_are_counted_that_have_hidden_states(workspace: Path) -> None:
    train(workspace)
    manifest = read_json(workspace / "outputs" / "train" / "drafter" / "manifest.json")
    trainable = [sample for sample in read_split(workspace / "outputs" / "prepare", "train") if sum(sample.loss_mask[1:])]
    assert manifest["training_samples"] == len(trainable)


@pytest.mark.long
def test_an_interrupted_training_of_two_ranks_says_so_once(workspace: Path) -> None:
    set_params(workspace, train={"ranks": 2, "parallel": "ddp", "steps": 2000, "checkpoint_every": 1})
    with training(workspace) as process:
        reach(process, 2, 300.0)
        began = time.monotonic()
        process.interrupt()
        status, output = process.finish(STOP_SECONDS)
    assert status == 128 + signal.SIGINT
    assert "Traceback" not in output, output
    assert "interrupted" in last_line(output)
    assert time.monotonic() - began < STOP_SECONDS
