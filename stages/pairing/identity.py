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
from stages.pairing.quantization import normalise_quantization, simplified
from stages.pairing.signatures import DigestCache, Job
from stages.pairing.weights import json_object, weight_files
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

    def shown(value: Any) -> str:
        if isinstance(value, str) and len(value) == 64:
            return value[:16]
        text = "absent" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 160 else text[:157] + "..."

    return "; ".join(f"{item.field}: {expected} {shown(item.expected)}, {actual} {shown(item.actual)}" for item in found)


def compute_identity(directory: Path, digest_cache: Path | None = None) -> VerifierIdentity:
    """The identity of the model in `directory`.

    Args:
        directory: a Hugging Face directory: config.json, tokenizer, safetensors weights.
        digest_cache: JSON file that remembers digests of large files by signature; None reads everything.

    Raises:
        ArtifactError: a file that a verifier needs is missing, broken or incomplete.
    """
    config = json_object(directory / "config.json", "a verifier is a Hugging Face directory with config.json, tokenizer and safetensors weights")
    tokenizer_config = json_object(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").is_file() else {}
    files = weight_files(directory)
    names = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not names:
        raise ArtifactError(f"{directory}: no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    jobs: list[Job] = [(directory / name, "json" if name.endswith(".json") else "raw") for name in names]
    digests = DigestCache(digest_cache).digests(jobs + [(file, "raw") for file in files])
    tokenizer = dict(zip(names, digests, strict=False))
    tokenizer["tokenizer_config.json"] = digest_json(simplified({k: v for k, v in tokenizer_config.items() if k not in TOKENIZER_BOOKKEEPING}))
    return VerifierIdentity(
        architecture=_architecture(directory, config),
        quantization=normalise_quantization(_declared_quantization(directory, config), _dtype(config)),
        tokenizer=dict(sorted(tokenizer.items())),
        chat_template=_chat_template(directory, tokenizer_config),
        generation=_generation(directory, config),
        weights=digest_json(sorted(digests[len(names) :])),
    )


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
    for level in (config, config.get("text_config") or {}):
        for name in ("quantization_config", "compression_config"):
            if level.get(name):
                return dict(level[name])
    if (directory / "hf_quant_config.json").is_file():  # NVIDIA ModelOpt
        declared = json_object(directory / "hf_quant_config.json")
        return dict(declared.get("quantization", declared))
    if (directory / "quantize_config.json").is_file():  # older AutoGPTQ
        return json_object(directory / "quantize_config.json")
    return None


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """Digest of the template(s) that transformers would use: a .jinja file wins over tokenizer_config.json."""
    templates: dict[str, str] = {}
    inline = tokenizer_config.get("chat_template")
    if inline is None and (directory / "chat_template.json").is_file():
        inline = json_object(directory / "chat_template.json").get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        templates = {str(item["name"]): str(item["template"]) for item in inline}
    elif isinstance(inline, Mapping):
        templates = {str(name): str(text) for name, text in inline.items()}
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    for file in (directory / "additional_chat_templates").glob("*.jinja"):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if not templates:
        return ""
    return sha256_bytes(templates["default"].encode("utf-8")) if set(templates) == {"default"} else digest_json(templates)


def _generation(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids that begin, end and fill a sequence: generation_config.json, where absent config.json."""
    path = directory / "generation_config.json"
    declared = json_object(path) if path.is_file() else {}
    levels = (declared, config, config.get("text_config") or {})

    def first(name: str) -> Any:
        return next((level[name] for level in levels if level.get(name) is not None), None)

    eos = first("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return {"eos_token_ids": sorted(set(ids)), **{name: value for name in TOKEN_IDS if (value := first(name)) is not None}}
