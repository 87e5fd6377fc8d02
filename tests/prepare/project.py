"""A folder with what the prepare stage reads: params.yaml, chats, and a verifier that the verifier stage would have left there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from stages.artifacts import write_json
from stages.pairing.identity import compute_identity
from stages.pairing.store import publish_link
from stages.params import Params, StageParams, read_params
from stages.prepare.__main__ import run
from stages.prepare.lines import batches
from stages.prepare.rows import Asks, Row, Tally, read_batch

Chats = Mapping[str, Sequence[Mapping[str, Any]] | bytes]


def make_project(verifier: Path, chats: Chats, *, engine: Mapping[str, Any] | None = None, **prepare: Any) -> None:
    """Fill the current directory. `chats`: path → rows, or bytes as they are."""
    identity = compute_identity(verifier)
    publish_link(verifier.resolve(), identity)
    write_json(Path("outputs/verifier/identity.json"), identity.model_dump(mode="json"))
    for name, rows in chats.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows).encode())
    settings = {"inputs": list(chats), "max_seq_len": 200, "regeneration": {"enabled": False}, **prepare}
    params = {
        "verifier": {"name": "tiny", "source": "tiny"},
        "engine": {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "kv_cache_bytes": 1 << 26, **(engine or {})},
        "prepare": settings,
        "extraction": {"layer_ids": [1]},
        "drafter": {"mask_token_id": 3},
        "train": {"steps": 1},
    }
    Path("params.yaml").write_text(json.dumps(params), encoding="utf-8")  # JSON is YAML


def prepare() -> dict[str, Any]:
    """Run the stage here; returns its report."""
    output = Path("outputs/prepare")
    run(cast(Params, StageParams(read_params(), "prepare")), output)
    report: dict[str, Any] = json.loads((output / "manifest.json").read_text(encoding="utf-8"))["report"]
    return report


def chat(number: int, answer: str = "Fine, thank you.", **extra: Any) -> dict[str, Any]:
    return {"id": f"q-{number}", "messages": [{"role": "user", "content": f"How are you, {number}?"}, {"role": "assistant", "content": answer}], **extra}


def read_rows(files: list[Path], tally: Tally, on_error: Literal["fail", "skip"] = "fail", asks: Asks = "all") -> Iterator[Row]:
    """The rows of all files."""
    return (row for batch in batches(files) for _, row in read_batch(batch, tally, on_error, asks))
