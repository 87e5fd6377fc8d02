"""`dvc repro` over the whole graph, with a tiny verifier and the real engine: what re-runs, what does not, and what kills do.

Two clones: one runs undisturbed, the other is killed at every stage boundary and inside extract and train; what both
made must be the same bytes. The first then changes its verifier's quantization and is killed at the later boundaries. (What
kills a run is `long`: tests/flows/test_house.py kills runs of the same graph, and changes the quantization, for every change.)
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from stages.artifacts import read_json
from stages.tracking import connect
from tests.gate.pair import make_chatting_verifier
from tests.pipeline.clone import Clone, Reproduction

STAGES = ["verifier", "inputs", "prepare", "extract", "train", "convert", "lock", "gate", "evaluate", "register", "deploy"]
REPRODUCIBLE = (
    "outputs/verifier/identity.json",
    "outputs/prepare/train",
    "outputs/prepare/validation",
    "outputs/prepare/evaluation",
    "outputs/extract/manifest.json",
    "outputs/extract/dumps",
    "outputs/train/drafter",
    "outputs/train/metrics.json",
    "outputs/convert/checkpoint",
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatting_verifier(tmp_path_factory.mktemp("pipeline") / "verifier")


class Whole(NamedTuple):
    """A clone after a run that nothing disturbed, and the digests of what that run made."""

    clone: Clone
    run: Reproduction
    digests: dict[str, str]


@pytest.fixture(scope="module")
def undisturbed(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    clone = Clone(tmp_path_factory.mktemp("clone") / "repository", verifier)
    run = clone.repro()
    return Whole(clone, run, clone.digests(*REPRODUCIBLE))


def versions(clone: Clone) -> list[tuple[str, str]]:
    """(content, acceptance length) of every registered version, oldest first."""
    client = connect(f"sqlite:///{clone.root}/mlflow.db")
    found = sorted(client.search_model_versions("name = 'drafter.tiny'"), key=lambda version: int(version.version))
    return [(version.tags["content"], version.tags["acceptance_length"]) for version in found]


class TestTheGraph:
    """In order, on one clone: each test starts from what the one before it left."""

    def test_from_a_verifier_to_a_serving_plan(self, undisturbed: Whole) -> None:
        clone, run, _ = undisturbed
        assert run.status == 0, run.output[-4000:]
        assert run.ran == STAGES
        outputs = clone.root / "outputs"
        identity = read_json(outputs / "deploy" / "plan.json")["verifier"]["digest"]
        assert read_json(outputs / "lock" / "report.json")["verdict"] == "match"
        assert read_json(outputs / "gate" / "report.json")["verdict"] == "pass"
        assert read_json(outputs / "register" / "version.json")["version"] == 1
        assert read_json(outputs / "register" / "version.json")["verifier"] == identity
        (only,) = versions(clone)
        assert float(only[1]) == pytest.approx(read_json(outputs / "evaluate" / "report.json")["acceptance_length"]["macro"], abs=1e-4)
        # Everything that git sees is what the user has written, and the lock file that DVC wants committed.
        assert clone.git_status() == ["?? dvc.lock"]

    def test_nothing_changed_runs_nothing(self, undisturbed: Whole) -> None:
        clone = undisturbed.clone
        again = clone.repro()
        assert (again.status, again.ran) == (0, ["verifier", "inputs"]), "the verifier and the inputs are asked every time; nothing else"
        # CPU seconds: what it takes on a machine with nothing else to do; three starts of Python are most of it.
        assert again.cpu_seconds < 10.0

    def test_a_knob_re_runs_the_stages_that_list_it(self, undisturbed: Whole) -> None:
        clone = undisturbed.clone
        clone.set("deploy", max_num_seqs=3)
        assert clone.repro().ran == ["verifier", "inputs", "deploy"]
        clone.set("deploy", max_num_seqs=8)
        assert clone.repro().ran == ["verifier", "inputs"], "DVC's cache has the plan of before"

    @pytest.mark.long
    def test_another_quantization_is_another_verifier_also_when_killed_at_every_later_boundary(self, undisturbed: Whole) -> None:
        clone = undisturbed.clone
        clone.set("verifier", quantization="w8a8")
        for stage in ("gate", "evaluate", "register", "deploy"):
            clone.kill_repro(lambda text, stage=stage: f"Running stage '{stage}'" in text)
        run = clone.repro()
        assert run.status == 0, run.output[-4000:]
        assert run.ran == ["verifier", "inputs", "deploy"], "what was finished when the kill came is not done again"
        first, second = versions(clone)
        assert first[0] != second[0]
        assert read_json(clone.root / "outputs" / "register" / "version.json")["version"] == 2

    @pytest.mark.long
    def test_changed_back_it_trains_nothing(self, undisturbed: Whole, verifier: Path) -> None:
        clone = undisturbed.clone
        clone.set("verifier", quantization="as-is")
        run = clone.repro()
        assert (run.status, run.ran) == (0, ["verifier", "inputs"])
        assert read_json(clone.root / "outputs" / "register" / "version.json")["version"] == 1
        assert len(versions(clone)) == 2

    @pytest.mark.long
    def test_params_alone_switch_between_dump_and_stream(self, undisturbed: Whole) -> None:
        """The graph keeps its shape: extraction leaves its plan, training streams by it, and the dump is still there for the way back."""
        clone = undisturbed.clone
        for mode in ("online", "hybrid"):
            clone.set("extraction", mode=mode)
            run = clone.repro("train")
            # With a target DVC starts the two roots in either order.
            assert (run.status, sorted(run.ran)) == (0, ["extract", "inputs", "train", "verifier"]), run.output[-4000:]
            assert read_json(clone.root / "outputs" / "extract" / "manifest.json")["extraction"]["mode"] == mode
            assert clone.exists("outputs/train/cache/*.data") == (mode == "hybrid")
        clone.set("extraction", mode="offline")
        assert sorted(clone.repro("train").ran) == ["inputs", "verifier"], "DVC's cache has what the dump gave"


@pytest.mark.long
def test_kills_at_every_boundary_and_inside_extract_and_train_change_no_byte(undisturbed: Whole, verifier: Path, tmp_path: Path) -> None:
    assert undisturbed.run.status == 0
    clone = Clone(tmp_path / "repository", verifier)
    for stage in ("verifier", "inputs", "prepare", "extract"):
        clone.kill_repro(lambda text, stage=stage: f"Running stage '{stage}'" in text)
    clone.kill_repro(lambda _: clone.exists("outputs/extract/dumps/*/*.safetensors"))
    assert not clone.exists("outputs/extract/manifest.json"), "killed inside: the dump is not readable yet"
    clone.kill_repro(lambda text: "Running stage 'train'" in text)
    clone.kill_repro(lambda _: clone.exists("outputs/train/work/*/*"))
    assert not clone.exists("outputs/train/drafter"), "killed inside"
    clone.kill_repro(lambda text: "Running stage 'convert'" in text)
    rest = clone.repro("convert")
    assert rest.status == 0, rest.output[-4000:]
    assert clone.digests(*REPRODUCIBLE) == undisturbed.digests
