"""The serving plan: an argument list per device, and who drafts on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.environment import EAGER, ENGINE, LOCAL, THREADS
from stages.params import Params, read_params
from stages.serving.plan import build_plan, installed_engine
from stages.serving.server import base_url
from tests.paths import REPOSITORY

CHECKPOINT = Path("outputs/deploy/served/0123")
VERIFIER = Path("outputs/verifier/models/4567")


def config(kind: str = "dspark", head: str = "vanilla", tokens: int = 7) -> dict[str, Any]:
    return {
        "speculators_model_type": kind,
        "markov_head_type": head,
        "block_size": 8,
        "sample_from_anchor": tokens == 8,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]},
    }


@pytest.fixture
def params() -> Params:
    return read_params(REPOSITORY / "params.yaml")


def plan(params: Params, device: Any, drafter: dict[str, Any]) -> dict[str, Any]:
    out = build_plan(params, device, VERIFIER, CHECKPOINT, drafter)
    assert all(isinstance(word, str) for word in out["argv"])
    return out


def speculative(out: dict[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(out["argv"][out["argv"].index("--speculative-config") + 1])
    return value


def test_the_cpu_wheel_is_started_through_its_module_and_drafts_in_the_plug_in(params: Params) -> None:
    """Its `vllm` command dies, its engine refuses the method dspark."""
    out = plan(params, "cpu", config())
    assert out["argv"][:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(VERIFIER)]
    expected = {"method": "dflash", "model": str(CHECKPOINT), "num_speculative_tokens": 7, "use_local_argmax_reduction": True}
    assert speculative(out) == expected
    assert out["served_by"] == "plug-in"
    assert "--enforce-eager" in out["argv"]


def test_a_gpu_drafts_vanilla_heads_itself(params: Params) -> None:
    out = plan(params, "cuda", config())
    assert out["argv"][:3] == ["vllm", "serve", str(VERIFIER)]
    assert speculative(out) == {"method": "dspark", "model": str(CHECKPOINT), "num_speculative_tokens": 7}
    assert (out["served_by"], out["notes"]) == ("engine", [])
    assert "--enforce-eager" not in out["argv"]


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_other_heads_are_served_by_the_plug_in_only_and_the_plan_says_so(params: Params, head: str) -> None:
    out = plan(params, "cuda", config(head=head))
    assert speculative(out)["method"] == "dflash"
    assert out["served_by"] == "plug-in"
    assert out["env"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "--enforce-eager" in out["argv"]
    assert f"the {head} Markov head runs in Draftline's vLLM plug-in" in out["notes"][0]


@pytest.mark.parametrize(("device", "there"), [("cpu", True), ("cuda", False), ("ascend", False)])
def test_a_cpu_server_finds_no_compiler_and_busy_cores(params: Params, device: str, there: bool) -> None:
    """vLLM compiles log-probabilities with g++ even under --enforce-eager, and OpenMP's threads spin; both are read before any of our code runs."""
    env = plan(params, device, config())["env"]
    assert ("TORCH_COMPILE_DISABLE" in env, "GOMP_SPINCOUNT" in env) == (there, there)
    if there:
        assert env.items() >= (THREADS | EAGER).items()
    assert env.items() >= (ENGINE | LOCAL).items()


def test_plain_dflash_needs_no_plug_in(params: Params) -> None:
    out = plan(params, "cpu", config(kind="dflash"))
    assert (out["served_by"], out["notes"]) == ("engine", [])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_verifier_alone_is_the_pair_without_its_drafter(params: Params, device: Any) -> None:
    alone = build_plan(params, device, VERIFIER)
    pair = plan(params, device, config(kind="dflash"))["argv"]
    where = pair.index("--speculative-config")
    assert alone["argv"] == pair[:where] + pair[where + 2 :]
    assert (alone["served_by"], alone["notes"]) == ("engine", [])


def test_the_number_of_draft_tokens_is_never_left_to_the_engine(params: Params) -> None:
    """It would take block_size, one too many in the fill-in layout."""
    assert speculative(plan(params, "cpu", config(tokens=8)))["num_speculative_tokens"] == 7
    assert speculative(plan(params, "cuda", config(tokens=8)))["num_speculative_tokens"] == 8


def test_the_params_reach_the_command_line(params: Params) -> None:
    served = params.model_copy(
        update={
            "verifier": params.verifier.model_copy(update={"trust_remote_code": True}),
            "engine": params.engine.model_copy(update={"dtype": "float32", "max_model_len": 512, "kv_cache_bytes": 1 << 25}),
            "deploy": params.deploy.model_copy(update={"host": "0.0.0.0", "port": 8123, "max_num_seqs": 3}),
        }
    )
    argv = plan(served, "cpu", config())["argv"]
    words = dict(zip(argv[3::2], argv[4::2], strict=False))
    assert words["--served-model-name"] == "smollm2-135m"
    assert (words["--dtype"], words["--max-model-len"], words["--kv-cache-memory-bytes"]) == ("float32", "512", str(1 << 25))
    assert (words["--host"], words["--port"], words["--max-num-seqs"]) == ("0.0.0.0", "8123", "3")
    assert "--trust-remote-code" in argv


def test_clients_on_this_machine_find_a_server_that_listens_everywhere() -> None:
    assert base_url({"host": "0.0.0.0", "port": 80}) == "http://127.0.0.1:80"
    assert base_url({"host": "::", "port": 80}) == "http://[::1]:80"
    assert base_url({"host": "10.0.0.7", "port": 8000}) == "http://10.0.0.7:8000"


def test_the_installed_engine_is_named_without_importing_it() -> None:
    assert installed_engine().startswith("vllm")
