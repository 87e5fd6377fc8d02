"""DSpark inside vLLM: the Markov chain runs as trained, whatever the engine does around it; and the plug-in's own wheel."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages.decoding.isolated import EngineProcess
from stages.decoding.parity import draft_parity
from tests.decoding.pairs import after, engine_config, requests, write_drafter
from tests.paths import REPOSITORY

PACKAGING = REPOSITORY / "infra" / "vllm_plugin"
VOCAB = 512


def run(code: str, *paths: Path) -> str:
    """What a fresh interpreter prints."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(map(str, paths))}
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", check=True, capture_output=True, text=True).stdout.strip()


def test_engines_that_do_not_use_it_pay_nothing_for_it() -> None:
    """vLLM imports the module and calls `register` in each of its processes."""
    code = "import sys, stages.drafters.vllm_plugin; print(sorted({'torch', 'vllm', 'transformers', 'pydantic'} & set(sys.modules)))"
    assert run(code, REPOSITORY) == "[]"


def test_the_wheel_holds_all_that_the_plug_in_imports(tmp_path: Path) -> None:
    """The modules come from stages/drafters; in the wheel nothing may be left that names the rest of Draftline."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(PACKAGING)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("draftline_vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sources = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
        (entry,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "[vllm.general_plugins]\ndraftline = draftline_vllm.vllm_plugin:register" in entry
    assert set(sources) == {f"draftline_vllm/{name}.py" for name in ("__init__", "heads", "vllm_dspark", "vllm_plugin")}
    for name, source in sources.items():
        assert "stages." not in source, name
        modules = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
        own = {module for module in modules if module is not None and module.startswith("draftline_vllm")}
        assert own <= {"draftline_vllm.heads"}
    assert "draftline_vllm.vllm_dspark:DSparkForCausalLM" in sources["draftline_vllm/vllm_plugin.py"]


@pytest.mark.parametrize(("lengths", "spared"), [([1, 1], True), ([6, 6], False), ([1, 6], False), ([], False), (None, False)])
def test_a_forward_is_spared_only_where_no_request_drafts(lengths: list[int] | None, spared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`None`: vLLM's own dry run, which must reach the backbone."""
    from stages.drafters import vllm_dspark

    metadata = None if lengths is None else {str(layer): SimpleNamespace(max_query_len=length) for layer, length in enumerate(lengths)}
    monkeypatch.setattr(vllm_dspark, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
    assert vllm_dspark.nothing_to_draft() == spared


@pytest.mark.integration
@pytest.mark.parametrize("by", ["tokens", "logits"])
@pytest.mark.parametrize("draft_ids", [None, torch.arange(1, VOCAB, 2)], ids=["whole vocabulary", "reduced vocabulary"])
def test_the_planted_chain_is_drafted_token_by_token_whatever_the_batch(draft_ids: torch.Tensor | None, by: str, tiny_verifier: Path, tmp_path: Path) -> None:
    """Every draft follows from the one before it, the first from the anchor; K changes with the batch under dynamic speculation.

    The chain stays among the odd ids, so the reduced vocabulary can draft all of it.
    """
    checkpoint = write_drafter(tmp_path / "checkpoint", tiny_verifier, "chain", draft_ids, block_size=8)
    config = engine_config(tiny_verifier, checkpoint)
    assert config.speculative is not None
    config.speculative["use_local_argmax_reduction"] = by == "tokens"
    config.speculative["num_speculative_tokens_per_batch_size"] = [[1, 1, 7], [2, 4, 3]]
    prompts = requests(3, max_tokens=24)
    widths = set()
    with EngineProcess(config) as engine:
        for batch in ([prompts[0]], prompts):
            for request, done in zip(batch, engine.generate(batch), strict=True):
                sequence = request.prompt_ids + done.token_ids
                for entry in done.rounds:
                    expected = [after(sequence[entry.context_length - 1], VOCAB)]
                    while len(expected) < len(entry.drafted):
                        expected.append(after(expected[-1], VOCAB))
                    assert entry.drafted == expected
                    widths.add(len(entry.drafted))
    assert widths >= {3, 7}


@pytest.mark.integration
def test_rounds_without_drafts_leave_the_drafter_s_context_whole(tiny_verifier: Path, tmp_path: Path) -> None:
    """With 0 drafts the backbone is not run; what is drafted when the batch has thinned out must come from all the tokens committed meanwhile."""
    checkpoint = write_drafter(tmp_path / "checkpoint", tiny_verifier, "bigrams", block_size=6)
    config = engine_config(tiny_verifier, checkpoint)
    assert config.speculative is not None
    config.speculative["num_speculative_tokens_per_batch_size"] = [[1, 2, 5], [3, 8, 0]]
    prompts = [replace(request, max_tokens=12 + 12 * index) for index, request in enumerate(requests(4))]
    with EngineProcess(config) as engine, EngineProcess(engine_config(tiny_verifier)) as alone:
        completions = engine.generate(prompts)
        assert [done.token_ids for done in completions] == [done.token_ids for done in alone.generate(prompts)]
    # The last ones go on after at least 12 rounds in which nothing was drafted.
    drafted = [entry for done in completions[2:] for entry in done.rounds if entry.drafted]
    assert len(drafted) > 8
    assert sum(not entry.drafted for entry in completions[-1].rounds) >= 12
    parity = draft_parity(checkpoint, tiny_verifier, [request.prompt_ids for request in prompts], completions, 64)
    assert parity.rounds > 8
    assert parity.mismatches == [] or all(found.gap < 1e-3 for found in parity.mismatches)


@pytest.mark.integration
def test_a_dspark_checkpoint_without_markov_head_is_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    """vLLM itself would build a head of width zero. `convert` writes such a drafter as dflash."""
    from stages.artifacts import read_json, write_json
    from stages.decoding.engine import EngineError

    checkpoint = write_drafter(tmp_path / "checkpoint", tiny_verifier)
    exported = read_json(checkpoint / "config.json")
    write_json(checkpoint / "config.json", {**exported, "markov_rank": 0})
    with pytest.raises(EngineError, match="markov_rank = 0"), EngineProcess(engine_config(tiny_verifier, checkpoint)) as engine:
        engine.wait_ready()
