"""The extracting engine: vLLM in this process, prefilling samples and giving their hidden states away.

    with Extractor(plan, model, spool, kv_cache_bytes) as extractor:
        for sample in extractor.extract([("a", [1, 2, 3])]): ...

One `extract` call is one batch: all its samples are queued before the first forward pass, so which ones share a pass
depends on the call alone.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from stages.environment import prepare_environment
from stages.errors import DraftlineError
from stages.hidden_states.envelope import TornError, plan_origin
from stages.hidden_states.format import HiddenSample, Plan, refusal
from stages.hidden_states.producer import ProducerConfig
from stages.hidden_states.receive import LateError, LostError, RefusedError, take
from stages.hidden_states.transport import Transport, open_store

MIN_BATCHED_TOKENS = 2048
EXTRA_POSITIONS = 2
"""One token is decoded after each prompt, and the cache-only layer wants one more position (its "draft" token)."""
TAKE_SECONDS = 60.0
"""Longest wait for a sample that the engine has finished: the writer thread is at most a queue behind."""


class ExtractionError(DraftlineError):
    """The engine could not be started, or gave too many unusable samples."""


@dataclass(frozen=True)
class Refused:
    """A sample that cannot be used, alone: the others of its batch are not affected."""

    id: str
    reason: str


def engine_arguments(
    model: Path,
    dtype: str,
    layer_ids: list[int],
    max_model_len: int,
    max_num_seqs: int,
    producer: ProducerConfig,
    kv_cache_bytes: int,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """The arguments of vLLM's `EngineArgs` for an extracting engine.

    Args:
        layer_ids: the stored ids, ascending.
        producer: where the samples go.
    """
    return {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, max_model_len),
        "kv_cache_memory_bytes": kv_cache_bytes,
        "seed": 0,
        "trust_remote_code": trust_remote_code,
        "enforce_eager": True,
        # Tokens found in a prefix cache are not computed: their states would be missing.
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "DraftlineHiddenStatesConnector",
            "kv_connector_module_path": "stages.hidden_states.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": producer.model_dump(),
        },
    }


def start_error(error: Exception, kv_cache_bytes: int) -> ExtractionError:
    """vLLM's reason for not starting, in one line that names the knob where there is one."""
    text = " ".join(str(error).split())
    needed = re.search(r"([\d.]+) GiB KV cache is needed", text)
    if needed is not None or "No available memory for the cache blocks" in text:
        amount = f"about {int((float(needed[1]) + 0.01) * 2**30)} bytes" if needed is not None else "far more"
        return ExtractionError(
            f"params.yaml: engine.kv_cache_bytes = {kv_cache_bytes}: the extracting engine needs {amount} "
            "for its longest sample, whose hidden states lie in the same cache"
        )
    return ExtractionError(f"the extracting engine did not start: {type(error).__name__}: {text}")


class Extractor:
    """A running extracting engine. Use it as a context manager: it holds the model's memory until it is closed."""

    def __init__(self, plan: Plan, model: Path, spool: Path, kv_cache_bytes: int, trust_remote_code: bool = False) -> None:
        """
        Args:
            model: directory of the verifier.
            spool: directory through which the samples come; made if absent, must be this engine's own.
        Raises:
            ExtractionError: the engine does not start.
        """
        prepare_environment(str(model))
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._plan = plan
        transport = Transport(spool=str(spool))
        self._origin = plan_origin(plan)
        self._spool = spool
        self._store = open_store(transport)
        try:
            producer = ProducerConfig(transport=transport, verifier=plan.verifier, queue_samples=plan.max_num_seqs)
            length = plan.max_seq_len + EXTRA_POSITIONS
            arguments = engine_arguments(model, plan.dtype, list(plan.stored_ids), length, plan.max_num_seqs, producer, kv_cache_bytes, trust_remote_code)
            self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
            raise start_error(error, kv_cache_bytes) from error

    def extract(self, samples: list[tuple[str, list[int]]], on_done: Callable[[int], object] | None = None) -> Iterator[HiddenSample | Refused]:
        """Prefill `samples` as one batch and yield what came of each, in their order.

        Args:
            samples: (id, token ids); no longer than the plan's `max_seq_len`.
            on_done: called with the number of tokens of each sample that has left the engine.
        Yields:
            `HiddenSample` with states `[T, stored ids, H]`, checked against the sample's tokens, or `Refused`.
        """
        handles = self._prefill(samples, on_done)
        for position, (sample, tokens) in enumerate(samples):
            handle = handles[position]
            if handle is None:
                yield Refused(sample, "the engine returned no handle")
                continue
            try:
                states, token_ids, _ = take(self._store, handle["key"], self._origin, TAKE_SECONDS)
            except RefusedError as error:
                if error.number is not None:
                    raise OSError(error.number, os.strerror(error.number), str(self._spool)) from error
                yield Refused(sample, str(error))
                continue
            except (LateError, LostError, TornError) as error:
                yield Refused(sample, str(error))
                continue
            reason = refusal(sample, token_ids, states, tokens, self._plan)
            yield HiddenSample(sample, token_ids, states) if reason is None else Refused(sample, reason)

    def _prefill(self, samples: list[tuple[str, list[int]]], on_done: Callable[[int], object] | None) -> list[dict[str, Any] | None]:
        """Run the engine dry over `samples`; the handle of each."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from stages.hidden_states.connector import handle

        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        for position, (_, tokens) in enumerate(samples):
            self._engine.add_request(str(position), {"prompt_token_ids": list(tokens)}, parameters)
        handles: list[dict[str, Any] | None] = [None] * len(samples)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    position = int(output.request_id)
                    handles[position] = handle(output.kv_transfer_params)
                    if on_done is not None:
                        on_done(len(samples[position][1]))
        return handles

    def close(self) -> None:
        """End the engine and give its memory back."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.engine_core.shutdown()
            del engine
            gc.collect()

    def __enter__(self) -> Extractor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
