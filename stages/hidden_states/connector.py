"""The vLLM KV connector that takes hidden states out of an engine: one class for CPU and CUDA.

vLLM's speculative method `extract_hidden_states` drafts nothing: its "draft model" is one attention layer that only
caches. The tapped states `[T, L, H]` lie in that layer's paged cache with the layer axis as heads and the hidden axis
as head size. (Read in vLLM 0.32: `v1/spec_decode/extract_hidden_states.py`,
`model_executor/models/extract_hidden_states.py`, `kv_connector/v1/base.py`.)

The scheduler's half names, per step, the requests whose whole prompt will have been computed at the step's end, with
their block ids. The worker's half copies them in `wait_for_save`, which vLLM calls once per step after target and
"draft" have run. The copy is ordered before anything that later writes to those blocks (on a CPU it is synchronous, on
CUDA it is enqueued on the compute stream), so that blocks are freed as without a connector: no request outlives its
last step, and which requests share a step depends on the requests alone.

A writer thread does the rest: checks that all values are finite, hands the sample to the sink. Its queue is bounded; a
slow sink pauses the engine and costs no memory. What cannot be written is marked as refused, so that nobody waits for
it, and the engine's next step fails.

`kv_connector_extra_config` is a `ProducerConfig`. A request may name its run in `kv_transfer_params["hidden_states"]["run"]`;
the keys of its samples start with it. The handle of a finished request is
`kv_transfer_params["hidden_states"] = {"key", "tokens", "location"}`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, UniformTypeKVCacheSpecs

from stages.hidden_states.envelope import NOBODY, Origin, make_key
from stages.hidden_states.producer import ProducerConfig, open_publisher
from stages.hidden_states.writer import Writer, copy_out

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

HANDLE = "hidden_states"


@dataclass
class Save:
    """One request whose prompt is complete after this step: `key` names the sample, `block_ids` hold its states."""

    key: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class Saves(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half tells the worker's half, once per step."""

    saves: list[Save] = field(default_factory=list)


def hidden_group(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Index and block size of the cache group that holds the hidden states (a group of their own, or one shared with layers of equal block size)."""
    found = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        parts = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        found += [(index, part.block_size) for part in parts if isinstance(part, HiddenStateCacheSpec)]
    if not found and len(kv_cache_config.kv_cache_groups) == 1:
        # The scheduler's copy of a shared group shows one of its layers only; block ids and block size are common to all.
        return 0, kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    if len(found) != 1:
        raise ValueError(f"{len(found)} KV cache layers hold hidden states, expected 1: start the engine with the speculative method extract_hidden_states")
    return found[0]


class DraftlineHiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module's docstring. Store-only: nothing is ever loaded."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("prefix caching must be off (--no-enable-prefix-caching): tokens found in the cache are not computed and have no states")
        self._group, self._block_size = hidden_group(kv_cache_config)
        self._config = ProducerConfig.model_validate(dict(self._kv_transfer_config.kv_connector_extra_config or {}))
        # Scheduler's half: prompts whose states are not complete yet; None once they are saved.
        self._prompts: dict[str, list[int] | None] = {}
        self._keys: dict[str, str] = {}
        self._lengths: dict[str, int] = {}
        # Worker's half.
        self._cache: torch.Tensor | None = None
        self._writer: Writer | None = None
        self._copy_stream: Any = None

    # The scheduler's half.

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        computed: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            if new.prompt_token_ids is not None:
                # A preempted request may come as a new one again; what was saved stays saved.
                self._prompts.setdefault(new.req_id, list(new.prompt_token_ids))
                self._keys.setdefault(new.req_id, make_key(_run(new.sampling_params), new.req_id))
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        saves = []
        for request, scheduled in scheduler_output.num_scheduled_tokens.items():
            prompt = self._prompts.get(request)
            if prompt is None or computed[request] + scheduled < len(prompt):
                continue
            blocks = scheduler_output.kv_connector_block_state.get_block_ids(request)[self._group]
            saves.append(Save(self._keys[request], prompt, list(blocks[: -(-len(prompt) // self._block_size)])))
            self._prompts[request] = None
            self._lengths[request] = len(prompt)
        return Saves(saves)

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request.request_id)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request.request_id)

    def _finished(self, request: str) -> tuple[bool, dict[str, Any] | None]:
        self._prompts.pop(request, None)
        key = self._keys.pop(request, None)
        tokens = self._lengths.pop(request, None)
        if tokens is None:  # aborted before its prompt was complete
            return False, None
        return False, {HANDLE: {"key": key, "tokens": tokens, "location": self._config.transport.place}}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        return

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # Tokens before heads, so that the states of a token lie together: less to gather. The CPU kernels have one layout only.
        return None if current_platform.is_cpu() else "LBNHC"

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = list(get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)))
        if len(layers) != 1:
            raise ValueError(f"{len(layers)} cache-only layers, expected 1: start the engine with the speculative method extract_hidden_states")
        cache = kv_caches[layers[0]]
        if cache.shape[2] != self._block_size:
            raise ValueError(f"the hidden-state cache has blocks of {cache.shape[2]} tokens, its group says {self._block_size}")
        # The residual stream is the same on all tensor-parallel ranks: one of them writes.
        if get_tensor_model_parallel_rank() == 0:
            self._cache = cache
            self._copy_stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None  # type: ignore[no-untyped-call]
            origin = Origin(verifier=self._config.verifier, layer_ids=_layer_ids(self._vllm_config), dtype=str(cache.dtype).removeprefix("torch."))
            publisher = open_publisher(self._config, origin)
            self._writer = Writer(publisher, self._config.queue_samples, tolerant=self._config.budget_bytes is not None)

    def wait_for_save(self) -> None:
        if self._writer is None or not self.has_connector_metadata():
            return
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Saves)
        for save in metadata.saves:
            assert self._cache is not None
            states, ready = copy_out(self._cache, save.block_ids, len(save.token_ids), self._copy_stream)
            self._writer.submit(save.key, states, save.token_ids, ready)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return  # the cache-only layer has not written yet when the target's layers ask; see wait_for_save

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _run(sampling_params: Any) -> str:
    """The run that a request names; any client may have written it."""
    asked = ((getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params") or {}).get(HANDLE)
    run = asked.get("run") if isinstance(asked, dict) else None
    return run if isinstance(run, str) else NOBODY


def _layer_ids(vllm_config: VllmConfig) -> list[int]:
    """The stored ids, in the order in which they are stacked."""
    return list(vllm_config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)


def handle(kv_transfer_params: dict[str, Any] | None) -> dict[str, Any] | None:
    """The handle in a finished request's `kv_transfer_params`, or None."""
    return (kv_transfer_params or {}).get(HANDLE)
