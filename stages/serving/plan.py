"""What the server is started with: exact argument list and environment, no shell string.

The device decides how a drafter is served (`stages.decoding.speculative`): vLLM's CUDA build drafts DSpark itself where
the Markov head is `vanilla`; its CPU build refuses the method and no build knows `gated` and `rnn` heads, so there our
vLLM plug-in runs the same checkpoint under the method `dflash`.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.decoding.speculative import spec_config
from stages.environment import EAGER, ENGINE, LOCAL, THREADS
from stages.installed import DISTRIBUTIONS, Device, installed_device
from stages.params import Params
from stages.servers import vllm_command


def installed_engine() -> str:
    """`<distribution> <version>` of the installed vLLM, without importing it.

    Raises:
        DraftlineError: no vLLM is installed.
    """
    device = installed_device()
    distribution = next(name for name, built_for in DISTRIBUTIONS.items() if built_for == device)
    return f"{distribution} {version(distribution)}"


def build_plan(
    params: Params,
    device: Device,
    verifier: Path,
    checkpoint: Path | None = None,
    config: dict[str, Any] | None = None,
    ranges: list[list[int]] | None = None,
) -> dict[str, Any]:
    """How the pair, or the verifier alone, is served: `served_by` ("engine" or "plug-in"), `argv`, `env`, `notes`.

    Args:
        verifier: the verifier's directory.
        checkpoint: the drafter's directory, `config` its config.json; without them the verifier is served alone.
        ranges: draft tokens by batch size (`stages.serving.speculation`); None: always as many as the drafter makes.
    """
    speculative = spec_config(checkpoint, config, device) if checkpoint is not None and config is not None else None
    if speculative is not None and ranges:
        speculative["num_speculative_tokens_per_batch_size"] = ranges
    # A Markov head under the method dflash is known to our class alone.
    markov = config["markov_head_type"] if config is not None and config.get("speculators_model_type") == "dspark" else None
    plug_in = markov is not None and speculative is not None and speculative["method"] == "dflash"
    env = ENGINE | LOCAL
    notes = []
    argv = [
        *vllm_command(device, verifier),
        *("--served-model-name", params.verifier.name),
        *("--host", params.deploy.host),
        *("--port", str(params.deploy.port)),
        *("--dtype", params.engine.dtype),
        *("--max-model-len", str(params.engine.max_model_len)),
        *("--max-num-seqs", str(params.deploy.max_num_seqs)),
    ]
    if speculative is not None:
        argv += ["--speculative-config", json.dumps(speculative, sort_keys=True)]
    if device == "cpu":
        # The other devices size their cache by the memory they have.
        argv += ["--kv-cache-memory-bytes", str(params.engine.kv_cache_bytes)]
        env |= THREADS | EAGER
    if device == "cpu" or plug_in:
        argv.append("--enforce-eager")
    if params.verifier.trust_remote_code:
        argv.append("--trust-remote-code")
    if plug_in:
        notes.append(f"the {markov} Markov head runs in Draftline's vLLM plug-in, which must be installed beside vLLM")
        if device == "cuda":
            env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
            notes.append("vLLM itself drafts vanilla Markov heads only: served eagerly by its model runner V1, where the plug-in works")
    return {"served_by": "plug-in" if plug_in else "engine", "argv": argv, "env": env, "notes": notes}
