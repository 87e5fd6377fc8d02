"""What a person can set wrong about a stream: each is one line that names file or knob, before any server is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import read_json, write_json
from stages.errors import ArtifactError
from stages.hidden_states.source import mode_of, open_states, read_stream_plan
from tests.train.streaming import copy_workspace, make_template


@pytest.fixture(scope="module")
def planned(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of an extraction in mode online."""
    folder = tmp_path_factory.mktemp("planned")
    template = make_template(folder / "template", tiny_verifier)
    return copy_workspace(template, folder / "workspace") / "outputs" / "extract" / "manifest.json"


def edited(planned: Path, folder: Path, *path: str, value: Any) -> Path:
    """A copy of the manifest with one value changed (or, without a value, removed)."""
    content = read_json(planned)
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    write_json(folder / "manifest.json", content)
    return folder / "manifest.json"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("extraction", "ttl_seconds"), "x", r"extraction\.ttl_seconds = 'x': Input should be a valid number"),
        (("extraction", "servers"), ["x"], r"extraction\.servers = \['x'\]: 'x' must be http"),
        (("plan", "layer_ids"), None, r"plan: 'layer_ids'"),
        (("plan", "unknown"), 1, r"plan: .*'unknown'"),
        (("plan", "dtype"), "int7", r"dtype = 'int7'"),
        (("kv_cache_bytes",), None, r"kv_cache_bytes: Field required"),
    ],
)
def test_an_edited_plan_is_one_line_with_the_field_and_what_to_do(planned: Path, tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    manifest = edited(planned, tmp_path, *path, value=value)
    with pytest.raises(ArtifactError, match=rf"manifest\.json: {message}.*; run `dvc repro --force --single-item extract`") as refused:
        read_stream_plan(manifest)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("content", ["[]", "null", '{"extraction": null}', '{"extraction": []}', "1"])
def test_json_that_is_no_manifest_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"manifest\.json: not what extract writes; run `dvc repro"):
        mode_of(tmp_path / "manifest.json")


def test_a_plan_for_other_samples_is_refused(planned: Path, tmp_path: Path) -> None:
    """A checkpoint and a cache are found by the plan: after a new `prepare` alone they would be those of other data."""
    verifier = read_stream_plan(planned)[0].verifier
    with (
        pytest.raises(ArtifactError, match=r"manifest\.json: made for other samples than outputs/prepare holds now"),
        open_states(planned, verifier, tmp_path, {"a": [1, 2]}, tmp_path / "train"),
    ):
        pass
    assert not (tmp_path / "train").exists(), "nothing is started for it"
