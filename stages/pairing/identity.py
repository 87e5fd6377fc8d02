"""The identity of a verifier: its content, never its path.

Moving, renaming, copying or touching a model does not change it; one changed weight byte, another quantization,
tokenizer, chat template or EOS id does. Works without torch and transformers, in milliseconds once the digests of the
large files are known (`signatures`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.artifacts import canonical_json, digest_json, read_json, sha256_bytes
from stages.errors import ArtifactError
from stages.pairing.quantization import IGNORED, normalise_quantization, simplified
from stages.pairing.signatures import DigestCache, Job
from stages.pairing.weights import json_object, shown, weight_files
from stages.process import OUTPUTS

IDENTITY_FILE = OUTPUTS / "verifier" / "identity.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "tiktoken.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
BOOKKEEPING = (
    "_name_or_path",
    "_model_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "_attn_implementation",
    "_attn_implementation_autoset",
)
"""Keys of config.json that say where the model lay, what wrote it, or what is recorded under quantization."""
TOKENIZER_BOOKKEEPING = (
    "chat_template",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "tokenizer_file",
    "special_tokens_map_file",
    "is_local",
    "local_files_only",
)
OBJECTS = ("text_config", "quantization_config", "compression_config", "rope_scaling", "rope_parameters", "auto_map")
"""Keys of config.json that hold an object, where they hold anything."""
TOKEN_IDS = ("bos_token_id", "pad_token_id", "decoder_start_token_id")


class Difference(NamedTuple):
    """One field that differs, and both values."""

    field: str
    expected: Any
    actual: Any


class VerifierIdentity(BaseModel):
    """What a drafter is valid for.

    Attributes:
        architecture: fields of config.json without bookkeeping; digests of Python files where the model ships code.
        quantization: see `quantization.normalise_quantization`.
        tokenizer: file name → digest of its content (JSON files: of their value).
        chat_template: digest of the template; "" without one.
        generation: EOS ids (ascending), BOS and PAD id.
        weights: digest over the contents of all weight files, whatever they are called.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: dict[str, Any]
    quantization: dict[str, Any]
    tokenizer: dict[str, str]
    chat_template: str
    generation: dict[str, Any]
    weights: str

    @property
    def digest(self) -> str:
        """The identity as one hex sha256."""
        return digest_json(self.model_dump(mode="json"))

    def _size(self, *names: str) -> int:
        for config in (self.architecture, self.architecture.get("text_config", {})):
            for name in names:
                if isinstance(config.get(name), int):
                    return int(config[name])
        raise ArtifactError(f"the verifier's config.json has no {names[0]}")

    @property
    def hidden_size(self) -> int:
        return self._size("hidden_size", "n_embd", "d_model")

    @property
    def num_layers(self) -> int:
        return self._size("num_hidden_layers", "n_layer", "num_layers")

    @property
    def vocab_size(self) -> int:
        return self._size("vocab_size")

    @property
    def eos_token_ids(self) -> list[int]:
        return list(self.generation["eos_token_ids"])


def read_identity(path: Path = IDENTITY_FILE) -> VerifierIdentity:
    """Read an identity that the verifier stage wrote.

    Raises:
        ArtifactError: absent, or not an identity.
    """
    try:
        return VerifierIdentity.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise ArtifactError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; run dvc repro verifier") from None


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one flat mapping with dotted keys; lists are leaves."""
    if isinstance(value, Mapping) and value:
        return {key: leaf for name, item in value.items() for key, leaf in leaves(item, f"{prefix}.{name}" if prefix else str(name)).items()}
    return {prefix: value}


def differences(expected: VerifierIdentity, actual: VerifierIdentity) -> list[Difference]:
    """Every leaf that differs, in alphabetical order; a value that one side lacks is None."""
    left, right = leaves(expected.model_dump(mode="json")), leaves(actual.model_dump(mode="json"))
    names = sorted(left.keys() | right.keys())
    return [Difference(name, left.get(name), right.get(name)) for name in names if canonical_json(left.get(name)) != canonical_json(right.get(name))]


def describe_differences(found: Sequence[Difference], expected: str, actual: str) -> str:
    """`field: <expected> 4, <actual> 8; …` for one-line messages; digests are cut to 16 digits."""

    def short(value: Any) -> str:
        if isinstance(value, str) and len(value) == 64:
            return value[:16]
        text = "absent" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 160 else text[:157] + "..."

    return "; ".join(f"{item.field}: {expected} {short(item.expected)}, {actual} {short(item.actual)}" for item in found)


def compute_identity(directory: Path, digest_cache: Path | None = None) -> VerifierIdentity:
    """The identity of the model in `directory`.

    Args:
        directory: a Hugging Face directory: config.json, tokenizer, safetensors weights.
        digest_cache: JSON file that remembers digests of large files by signature; None reads everything.

    Raises:
        ArtifactError: a file that a verifier needs is missing, broken or incomplete.
    """
    config = json_object(directory / "config.json", "a verifier is a Hugging Face directory with config.json, tokenizer and safetensors weights")
    _check_objects(directory / "config.json", config)
    tokenizer_config = _tokenizer_config(directory)
    files = weight_files(directory)
    names = _tokenizer_files(directory)
    jobs: list[Job] = [(directory / name, _method(name)) for name in names]
    digests = DigestCache(digest_cache).digests(jobs + [(file, "raw") for file in files])
    return VerifierIdentity(
        architecture=_architecture(directory, config),
        quantization=normalise_quantization(_declared_quantization(directory, config), _dtype(config)),
        tokenizer=_tokenizer(dict(zip(names, digests, strict=False)), tokenizer_config),
        chat_template=_chat_template(directory, tokenizer_config),
        generation=_generation(directory, config),
        weights=digest_json(sorted(digests[len(names) :])),
    )


def tokenizer_digests(directory: Path) -> dict[str, str]:
    """`VerifierIdentity.tokenizer` of the model in `directory`.

    Raises:
        ArtifactError: it has no tokenizer, or a broken one.
    """
    names = _tokenizer_files(directory)
    digests = DigestCache(None).digests([(directory / name, _method(name)) for name in names])
    return _tokenizer(dict(zip(names, digests, strict=True)), _tokenizer_config(directory))


def _tokenizer_files(directory: Path) -> list[str]:
    names = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not names:
        raise ArtifactError(f"{directory}: no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    return names


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    return json_object(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").is_file() else {}


def _tokenizer(digests: dict[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    settings = digest_json(simplified({k: v for k, v in config.items() if k not in TOKENIZER_BOOKKEEPING}))
    return dict(sorted({**digests, "tokenizer_config.json": settings}.items()))


def _method(tokenizer_file: str) -> str:
    return "tokenizer" if tokenizer_file == "tokenizer.json" else "json" if tokenizer_file.endswith(".json") else "raw"


def _check_objects(path: Path, config: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse a config.json whose nested objects are something else."""
    for name in OBJECTS:
        if config.get(name) is not None and not isinstance(config[name], Mapping):
            raise _refused(path, prefix + name, config[name], "an object or null")
    if not prefix:
        _check_objects(path, config.get("text_config") or {}, "text_config.")


def _refused(path: Path, field: str, value: Any, allowed: str) -> ArtifactError:
    return ArtifactError(f"{path}: {field} = {shown(value)}: expected {allowed}")


def _without_bookkeeping(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _without_bookkeeping(value) if isinstance(value, Mapping) else value for key, value in config.items() if key not in BOOKKEEPING}


def _architecture(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = simplified(_without_bookkeeping(config))
    # Older files say rope_theta and rope_scaling where newer ones say rope_parameters: the same model.
    if "rope_theta" in fields and "rope_parameters" not in fields:
        scaling = dict(fields.pop("rope_scaling", {}))
        kind = scaling.pop("type", None)
        fields["rope_parameters"] = {"rope_type": kind or "default", **scaling, "rope_theta": fields.pop("rope_theta")}
    if "auto_map" in fields:
        # "org/name--modeling_x.Model" and "modeling_x.Model" are the same code in another place.
        fields["auto_map"] = {key: str(value).split("--")[-1] for key, value in fields["auto_map"].items()}
        fields["code"] = {file.name: sha256_bytes(file.read_bytes()) for file in sorted(directory.glob("*.py"))}
    return fields


def _dtype(config: Mapping[str, Any]) -> str:
    for level in (config, config.get("text_config") or {}):
        for name in ("dtype", "torch_dtype"):
            if level.get(name):
                return str(level[name]).removeprefix("torch.")
    return "unstated"


def _declared_quantization(directory: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    for prefix, level in (("", config), ("text_config.", config.get("text_config") or {})):
        for name in ("quantization_config", "compression_config"):
            if level.get(name):
                return _checked_quantization(directory / "config.json", prefix + name, level[name])
    if (path := directory / "hf_quant_config.json").is_file():  # NVIDIA ModelOpt
        declared = json_object(path)
        return _checked_quantization(path, "quantization", declared.get("quantization", declared))
    if (path := directory / "quantize_config.json").is_file():  # older AutoGPTQ
        return _checked_quantization(path, "", json_object(path))
    return None


def _checked_quantization(path: Path, field: str, declared: Any) -> dict[str, Any]:
    """The declared quantization, where what `normalise_quantization` looks into has the right type."""
    if not isinstance(declared, Mapping):
        raise _refused(path, field, declared, "an object")
    prefix = field + "." if field else ""
    for name in IGNORED:
        if declared.get(name) is not None and not isinstance(declared[name], list | str | Mapping):
            raise _refused(path, prefix + name, declared[name], "a list of module names")
    groups = declared.get("config_groups")
    if groups is not None and not isinstance(groups, Mapping):
        raise _refused(path, f"{prefix}config_groups", groups, "an object")
    for name, group in (groups or {}).items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if weights is not None and not isinstance(weights, Mapping):
            raise _refused(path, f"{prefix}config_groups.{name}.weights", weights, "an object or null")
    return dict(declared)


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """Digest of the template(s) that transformers would use: a .jinja file wins over tokenizer_config.json."""
    templates: dict[str, str] = {}
    where, inline = directory / "tokenizer_config.json", tokenizer_config.get("chat_template")
    if inline is None and (directory / "chat_template.json").is_file():
        where = directory / "chat_template.json"
        inline = json_object(where).get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        for place, item in enumerate(inline):
            if not isinstance(item, Mapping) or not all(isinstance(item.get(key), str) for key in ("name", "template")):
                raise _refused(where, f"chat_template[{place}]", item, "an object with the strings name and template")
            templates[item["name"]] = item["template"]
    elif isinstance(inline, Mapping):
        for name, text in inline.items():
            if not isinstance(text, str):
                raise _refused(where, f"chat_template.{name}", text, "a string")
            templates[name] = text
    elif inline is not None:
        raise _refused(where, "chat_template", inline, "a string, or a list of objects with name and template")
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = _template_file(directory / "chat_template.jinja")
    for file in (directory / "additional_chat_templates").glob("*.jinja"):
        templates[file.stem] = _template_file(file)
    if not templates:
        return ""
    return sha256_bytes(templates["default"].encode("utf-8")) if set(templates) == {"default"} else digest_json(templates)


def _template_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path}: the chat template is not UTF-8 (byte {error.start}: {error.reason}); save it as UTF-8") from None


def _generation(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids that begin, end and fill a sequence: generation_config.json, where absent config.json."""
    path = directory / "generation_config.json"
    declared = json_object(path) if path.is_file() else {}
    levels = ((path, "", declared), (directory / "config.json", "", config), (directory / "config.json", "text_config.", config.get("text_config") or {}))

    def first(name: str) -> tuple[Path, str, Any] | None:
        return next(((file, prefix + name, level[name]) for file, prefix, level in levels if level.get(name) is not None), None)

    found = first("eos_token_id")
    if found is None:
        raise ArtifactError(f"{path}: no eos_token_id, nor in config.json; state the id (or a list of ids) of the token that ends an answer")
    ids = found[2] if isinstance(found[2], list) else [found[2]]
    if not ids or not all(type(item) is int and item >= 0 for item in ids):
        raise _refused(*found, "a token id (an integer from 0) or a list of such")
    return {"eos_token_ids": sorted(set(ids)), **{name: value[2] for name in TOKEN_IDS if (value := first(name)) is not None}}
