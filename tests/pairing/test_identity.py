"""The identity follows the content and nothing else: what would silently serve a drafter to another verifier changes it,
what merely moves or rewrites the same model does not (that would cost a needless retraining)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.errors import ArtifactError
from stages.pairing.identity import VerifierIdentity, compute_identity, differences, read_identity
from tests.pairing.edits import Edit, copy_model, edit_json, flip_weight_byte
from tests.tiny import CHATML, make_verifier

QUANTIZED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
KV_CACHE_ALONE = {"quant_method": "fp8", "kv_cache_scheme": {"type": "float", "num_bits": 8}}


@pytest.fixture(scope="module")
def identity(tiny_verifier: Path) -> VerifierIdentity:
    return compute_identity(tiny_verifier)


@pytest.fixture
def model(tiny_verifier: Path, tmp_path: Path) -> Path:
    return copy_model(tiny_verifier, tmp_path / "model")


def _move(directory: Path) -> Path:
    return Path(shutil.move(directory, directory.with_name("elsewhere")))


def _symlink(directory: Path) -> Path:
    link = directory.with_name("link")
    link.symlink_to(directory)
    return link


def _touch(directory: Path) -> None:
    for file in directory.iterdir():
        os.utime(file, (1, 1))


def _rename_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "weights.safetensors")


def _reformat(directory: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        content = json.loads((directory / name).read_text(encoding="utf-8"))
        (directory / name).write_text(json.dumps(content, indent=7, sort_keys=name != "config.json", ensure_ascii=True), encoding="utf-8")


def _resave(directory: Path) -> None:
    """As another version of transformers would write the same model."""
    edit_json(directory, "config.json", lambda c: c.update(transformers_version="4.0.0", _name_or_path="/somewhere", rope_scaling=None))
    edit_json(directory, "config.json", lambda c: c.update(torch_dtype=c.pop("dtype"), rope_theta=c.pop("rope_parameters")["rope_theta"]))


def _legacy_tokenizer(directory: Path) -> None:
    edit_json(directory, "tokenizer.json", lambda c: c["model"].update(merges=[" ".join(pair) for pair in c["model"]["merges"]]))


def _inline_template(directory: Path) -> None:
    template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").unlink()
    edit_json(directory, "tokenizer_config.json", lambda c: c.update(chat_template=template, name_or_path="/somewhere"))


def _unrelated_files(directory: Path) -> None:
    (directory / "README.md").write_text("# A model")
    (directory / ".gitattributes").write_text("*.safetensors lfs")


SAME: dict[str, Edit] = {
    "moved": _move,
    "symlinked": _symlink,
    "copied": lambda d: copy_model(d, d.with_name("copy")),
    "touched": _touch,
    "weights renamed": _rename_weights,
    "JSON reformatted": _reformat,
    "config re-saved by another version": _resave,
    "merges spelt the older way": _legacy_tokenizer,
    "template in tokenizer_config.json": _inline_template,
    "unrelated files added": _unrelated_files,
}

DIFFERENT: dict[str, tuple[Edit, set[str]]] = {
    "last weight byte": (lambda d: flip_weight_byte(d), {"weights"}),
    "weight byte in the middle": (lambda d: flip_weight_byte(d, -300_000), {"weights"}),
    "quantization declared": (
        lambda d: edit_json(d, "config.json", lambda c: c.update(quantization_config=QUANTIZED)),
        {"quantization.method", "quantization.bits", "quantization.group_size"},
    ),
    "KV cache dtype": (
        lambda d: edit_json(d, "config.json", lambda c: c.update(quantization_config=KV_CACHE_ALONE)),
        {"quantization.kv_cache_dtype"},
    ),
    "serving dtype": (lambda d: edit_json(d, "config.json", lambda c: c.update(dtype="bfloat16")), {"quantization.dtype", "quantization.bits"}),
    "template": (lambda d: (d / "chat_template.jinja").write_text(CHATML + " ") and None, {"chat_template"}),
    "template gone": (lambda d: (d / "chat_template.jinja").unlink(), {"chat_template"}),
    "second template": (lambda d: _add_template(d), {"chat_template"}),
    "tokenizer vocabulary": (lambda d: edit_json(d, "tokenizer.json", _swap_two_tokens), {"tokenizer.tokenizer.json"}),
    "tokenizer merges": (lambda d: edit_json(d, "tokenizer.json", lambda c: c["model"]["merges"].reverse()), {"tokenizer.tokenizer.json"}),
    "tokenizer setting": (lambda d: edit_json(d, "tokenizer_config.json", lambda c: c.update(add_bos_token=True)), {"tokenizer.tokenizer_config.json"}),
    "further tokenizer file": (lambda d: (d / "added_tokens.json").write_text('{"<new>": 511}') and None, {"tokenizer.added_tokens.json"}),
    "EOS id": (lambda d: edit_json(d, "generation_config.json", lambda c: c.update(eos_token_id=[2, 0])), {"generation.eos_token_ids"}),
    "RoPE theta": (lambda d: edit_json(d, "config.json", lambda c: c["rope_parameters"].update(rope_theta=5e5)), {"architecture.rope_parameters.rope_theta"}),
    "norm epsilon": (lambda d: edit_json(d, "config.json", lambda c: c.update(rms_norm_eps=1e-5)), {"architecture.rms_norm_eps"}),
    "unknown architecture field": (lambda d: edit_json(d, "config.json", lambda c: c.update(sink_tokens=4)), {"architecture.sink_tokens"}),
}


def _add_template(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")


def _swap_two_tokens(content: dict[str, dict[str, dict[str, int]]]) -> None:
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


@pytest.mark.parametrize("name", SAME)
def test_the_same_content_keeps_its_identity(name: str, identity: VerifierIdentity, model: Path) -> None:
    where = SAME[name](model) or model
    assert differences(identity, compute_identity(where)) == []
    assert compute_identity(where).digest == identity.digest


@pytest.mark.parametrize("name", DIFFERENT)
def test_changed_content_changes_it_and_the_difference_names_the_field(name: str, identity: VerifierIdentity, model: Path) -> None:
    edit, fields = DIFFERENT[name]
    edit(model)
    changed = compute_identity(model)
    assert changed.digest != identity.digest
    found = {item.field: item for item in differences(identity, changed)}
    assert fields <= found.keys()
    top = {field.split(".")[0] for field in fields}
    assert {field.split(".")[0] for field in found} == top, "no other part of the identity moved"
    assert all(item.expected != item.actual for item in found.values())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(min_value=1, max_value=1_000_000))
def test_any_flipped_weight_byte_changes_the_weights_digest_alone(position: int, identity: VerifierIdentity, model: Path) -> None:
    flip_weight_byte(model, -position)
    assert [item.field for item in differences(identity, compute_identity(model))] == ["weights"]
    flip_weight_byte(model, -position)
    assert compute_identity(model).digest == identity.digest


def test_the_identity_survives_its_file(identity: VerifierIdentity, tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    path.write_text(json.dumps(identity.model_dump(mode="json")))
    assert read_identity(path).digest == identity.digest
    path.write_text(json.dumps({**identity.model_dump(mode="json"), "weigths": "x"}))
    with pytest.raises(ArtifactError, match="weigths"):
        read_identity(path)


def test_convenience_numbers(identity: VerifierIdentity) -> None:
    assert (identity.hidden_size, identity.num_layers, identity.vocab_size, identity.eos_token_ids) == (64, 6, 512, [2])


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_verifier(tmp_path_factory.mktemp("sharded") / "model", max_shard_size="300KB")


def test_a_missing_shard_is_one_clear_error(sharded: Path, tmp_path: Path) -> None:
    model = copy_model(sharded, tmp_path / "model")
    shards = sorted(model.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(ArtifactError) as error:
        compute_identity(model)
    assert shards[1].name in str(error.value)
    assert f"1 of {len(shards)}" in str(error.value)
    assert "\n" not in str(error.value)
    # Engines glob for weights: without the index nothing else would notice the gap.
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(ArtifactError, match=shards[1].name):
        compute_identity(model)


def test_shard_files_count_by_content_not_by_name(sharded: Path, tmp_path: Path) -> None:
    model = copy_model(sharded, tmp_path / "model")
    names = {file.name: file.name.replace("model-", "weights-") for file in model.glob("*.safetensors")}
    for old, new in names.items():
        (model / old).rename(model / new)
    edit_json(model, "model.safetensors.index.json", lambda c: c.update(weight_map={k: names[v] for k, v in c["weight_map"].items()}))
    assert compute_identity(model).digest == compute_identity(sharded).digest


def _cut(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-10])


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (_cut, "model.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"junk"), "model.safetensors"),
        (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer.json"),
    ],
)
def test_a_broken_model_is_one_clear_error(edit: Edit, named: str, model: Path) -> None:
    edit(model)
    with pytest.raises(ArtifactError, match=named) as error:
        compute_identity(model)
    assert "\n" not in str(error.value)


def _set(name: str, **values: object) -> Edit:
    return lambda d: edit_json(d, name, lambda c: c.update(values))


def _header(header: object) -> Edit:
    """Replace the weights by a safetensors file with this header and no data."""
    text = json.dumps(header).encode()
    return lambda d: (d / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text) and None


def _index(weight_map: object) -> Edit:
    return lambda d: (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map})) and None


def _no_eos(directory: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        edit_json(directory, name, lambda c: c.pop("eos_token_id", None))


def _template(data: bytes, name: str = "chat_template.jinja") -> Edit:
    def write(directory: Path) -> None:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)

    return write


def _second_copy(name: str) -> Edit:
    def copy(directory: Path) -> None:
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copy(directory / "model.safetensors", directory / name)

    return copy


TENSOR = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
INT4 = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_header([]), "model.safetensors: not a safetensors file (its header is of type list, expected an object)"),
        (_header({"x": 3}), "model.safetensors: header: x = 3: expected an object"),
        (_header({"x": {"dtype": "F32", "shape": [0]}}), "model.safetensors: header: x.data_offsets = null: expected two integers"),
        (_header({"x": {**TENSOR, "data_offsets": [0, "1"]}}), 'x.data_offsets = [0, "1"]: expected two integers'),
        (_header({"x": {**TENSOR, "shape": "x"}}), 'x.shape = "x": expected a list of integers'),
        (_header({"x": {**TENSOR, "dtype": 3}}), "x.dtype = 3: expected a string"),
        (_index({"x": 3}), "model.safetensors.index.json: weight_map.x = 3: expected the name of a .safetensors file"),
        (_index({"x": "../model.safetensors"}), 'weight_map.x = "../model.safetensors": expected the name of a .safetensors file beside it'),
        (_index([]), "model.safetensors.index.json: weight_map = []: expected an object"),
        (_second_copy("consolidated.safetensors"), "consolidated.safetensors: weights in Mistral's own layout, which vLLM prefers"),
        (_second_copy("original/consolidated-00001-of-00001.safetensors"), "original/consolidated-00001-of-00001.safetensors: weights in Mistral's own"),
        (_template(b"\xff{{ x }}"), "chat_template.jinja: the chat template is not UTF-8 (byte 0"),
        (_template(b"a\xff", "additional_chat_templates/tool.jinja"), "additional_chat_templates/tool.jinja: the chat template is not UTF-8 (byte 1"),
        (_set("tokenizer_config.json", chat_template=[{"name": "x"}]), 'tokenizer_config.json: chat_template[0] = {"name": "x"}: expected an object with'),
        (_set("tokenizer_config.json", chat_template={"default": 3}), "tokenizer_config.json: chat_template.default = 3: expected a string"),
        (_set("tokenizer_config.json", chat_template=3), "tokenizer_config.json: chat_template = 3: expected a string, or a list"),
        (_set("config.json", quantization_config="x"), 'config.json: quantization_config = "x": expected an object or null'),
        (_set("config.json", quantization_config={**INT4, "ignore": 3}), "config.json: quantization_config.ignore = 3: expected a list of module names"),
        (_set("config.json", quantization_config={**INT4, "config_groups": 3}), "config.json: quantization_config.config_groups = 3: expected an object"),
        (
            _set("config.json", quantization_config={**INT4, "config_groups": {"a": {"weights": 3}}}),
            "config.json: quantization_config.config_groups.a.weights = 3: expected an object or null",
        ),
        (_set("config.json", rope_scaling=3), "config.json: rope_scaling = 3: expected an object or null"),
        (_set("config.json", text_config=3), "config.json: text_config = 3: expected an object or null"),
        (_set("config.json", text_config={"rope_parameters": "x"}), 'config.json: text_config.rope_parameters = "x": expected an object or null'),
        (_set("config.json", auto_map="x"), 'config.json: auto_map = "x": expected an object or null'),
        (lambda d: (d / "hf_quant_config.json").write_text('{"quantization": 3}') and None, "hf_quant_config.json: quantization = 3: expected an object"),
        (lambda d: (d / "tokenizer.json").write_text("{}") and None, "tokenizer.json: model is absent: expected an object"),
        (lambda d: edit_json(d, "tokenizer.json", lambda c: c.pop("added_tokens")), "tokenizer.json: added_tokens is absent: expected a list"),
        (_set("tokenizer.json", added_tokens=3), "tokenizer.json: added_tokens is a value of type int: expected a list"),
        (_set("generation_config.json", eos_token_id="x"), 'generation_config.json: eos_token_id = "x": expected a token id'),
        (_set("generation_config.json", eos_token_id=[2, "x"]), 'generation_config.json: eos_token_id = [2, "x"]: expected a token id'),
        (_set("generation_config.json", eos_token_id=[]), "generation_config.json: eos_token_id = []: expected a token id"),
        (_no_eos, "generation_config.json: no eos_token_id, nor in config.json"),
    ],
)
def test_a_wrong_value_is_one_line_with_file_field_and_what_is_allowed(edit: Edit, says: str, model: Path) -> None:
    edit(model)
    with pytest.raises(ArtifactError) as error:
        compute_identity(model)
    assert says in str(error.value)
    assert str(model) in str(error.value)
    assert "\n" not in str(error.value)


def test_code_that_the_model_ships_is_part_of_it(identity: VerifierIdentity, model: Path) -> None:
    (model / "modeling_x.py").write_text("class Model: pass")
    assert compute_identity(model).digest == identity.digest, "without auto_map nobody runs it"
    edit_json(model, "config.json", lambda c: c.update(auto_map={"AutoModel": "modeling_x.Model"}))
    before = compute_identity(model)
    edit_json(model, "config.json", lambda c: c.update(auto_map={"AutoModel": "org/name--modeling_x.Model"}))
    assert compute_identity(model).digest == before.digest
    (model / "modeling_x.py").write_text("class Model: x = 1")
    assert [item.field for item in differences(before, compute_identity(model))] == ["architecture.code.modeling_x.py"]


def test_identity_and_lock_need_no_torch() -> None:
    """The check runs before anything heavy, and on machines that only schedule."""
    code = "import sys, stages.pairing.lock, stages.pairing.store; sys.exit(bool({'torch', 'transformers', 'safetensors', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
