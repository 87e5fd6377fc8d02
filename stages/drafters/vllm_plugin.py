"""vLLM general plug-in: DSpark drafters in vLLM's model runner V1, which has no DSpark of its own.

vLLM finds `register` through the entry-point group `vllm.general_plugins` and calls it in each of its processes,
whatever model they run; so it only names a class, which vLLM imports when a DSpark drafter is loaded.
"""

from __future__ import annotations

ARCHITECTURE = "Qwen3DSparkModel"
"""The name under which vLLM looks for the class of a speculators checkpoint of type `dspark`."""

DFLASH_ARCHITECTURE = "DFlashDraftModel"
"""The same for the type `dflash`."""


def register() -> None:
    """Serve DSpark checkpoints under `{"method": "dflash"}` wherever runner V1 is used.

    On a GPU that is where the user has switched V2 off (for `gated` and `rnn` Markov heads); otherwise vLLM's own class stays,
    which V2 serves under `{"method": "dspark"}`.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike() and getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", None) is not False:
        return
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, "stages.drafters.vllm_dspark:DSparkForCausalLM")
    if current_platform.is_cpu():
        # vLLM's own class norms the context's keys of every layer with the first layer's weights there.
        ModelRegistry.register_model(DFLASH_ARCHITECTURE, "stages.drafters.vllm_dspark:DFlashForCausalLM")
