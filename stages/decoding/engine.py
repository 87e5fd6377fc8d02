"""vLLM inside this process, stepped by us, so that the drafts of every verify round are seen.

    engine = Engine(EngineConfig(model="dir", dtype="float32", max_model_len=256, max_num_seqs=4, kv_cache_bytes=1 << 28))
    completions = engine.generate([Request(id="a", prompt_ids=[1, 2, 3], max_tokens=16)])

A *round* is one pass of the verifier over a sequence that already has an output token: it scores the last committed
token and the drafted ones after it, and commits the drafted tokens it agrees with plus one of its own. The pass that
reads the prompt commits the first token and is no round.

How rounds are seen: between two calls of `LLMEngine.step`, vLLM's scheduler holds the drafts of the next pass in
`Request.spec_token_ids` (with asynchronous scheduling they would stay in the worker, so it is off). The engine's own
counters are not used: they count accepted drafts beyond an end of sequence or a `max_tokens` cut, which no user sees.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.environment import prepare_environment
from stages.errors import DraftlineError
from stages.params import Engine as EngineSettings


class EngineError(DraftlineError):
    """vLLM could not be started or could not decode; the message carries its cause."""


@dataclass(frozen=True)
class EngineConfig:
    """One engine. `speculative` is vLLM's speculative config; `extra` are further arguments of vLLM's `EngineArgs`."""

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    speculative: dict[str, Any] | None = None
    seed: int = 0
    trust_remote_code: bool = False
    max_num_batched_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def engine_config(model: Path, settings: EngineSettings, trust_remote_code: bool) -> EngineConfig:
    """The verifier in `model` alone, as params.yaml says."""
    return EngineConfig(
        model=str(model),
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_bytes=settings.kv_cache_bytes,
        trust_remote_code=trust_remote_code,
    )


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids. Ends at the model's own EOS ids (unless `ignore_eos`), at `stop_token_ids` or at `max_tokens`."""

    id: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass
class Round:
    """One verify pass.

    `context_length`: tokens committed before it (prompt + output); the last of them is the anchor.
    `drafted`: the drafted tokens that it verified; empty where the proposer had none (prompt lookup without a match).
    `accepted`: how many leading drafted tokens the pass committed to the output; what an EOS, a stop token or
    `max_tokens` cut off is not counted.
    `committed`: tokens that the pass added to the output: `accepted + 1`, or `accepted` where the cut fell on a drafted token.
    """

    context_length: int
    drafted: list[int]
    accepted: int
    committed: int


@dataclass
class Completion:
    """What was decoded: `token_ids` includes a final EOS or stop token. `finish_reason` is "stop" or "length".

    `logprobs`: for each output token, token id → log-probability of the most likely ones (and of the token itself).
    """

    id: str
    token_ids: list[int]
    finish_reason: str
    rounds: list[Round]
    logprobs: list[dict[int, float]] | None = None


def accepted_prefix(drafted: list[int], committed: list[int]) -> int:
    """Leading drafted tokens that were committed.

    Exact for greedy and for sampling: the token that the verifier puts in place of a rejected one is never that one
    (under sampling it is drawn from (p − q)₊, which is zero there).
    """
    count = 0
    for drafted_token, token in zip(drafted, committed, strict=False):
        if drafted_token != token:
            break
        count += 1
    return count


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """The arguments of vLLM's `EngineArgs` for `config`."""
    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "seed": config.seed,
        "trust_remote_code": config.trust_remote_code,
        "enforce_eager": True,
        # Every round must be computed: a cached prefix has no hidden states for the drafter's context.
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if config.speculative is not None:
        # vLLM writes into the dict it is given.
        arguments["speculative_config"] = dict(config.speculative)
    if config.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_num_batched_tokens
    return arguments | config.extra


def check_requests(config: EngineConfig, requests: list[Request]) -> None:
    """Refuse prompts that the engine would refuse, before it is started.

    Raises:
        EngineError: a prompt is empty or leaves no room for one token.
    """
    for request in requests:
        if not request.prompt_ids:
            raise EngineError(f"request {request.id}: the prompt has no tokens")
        if len(request.prompt_ids) >= config.max_model_len:
            raise EngineError(
                f"request {request.id}: prompt of {len(request.prompt_ids)} tokens; engine.max_model_len = {config.max_model_len} holds one token less"
            )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection inside: importing vLLM makes millions of objects that stay, and looking through them costs 2 s of 10."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class _Active:
    """A request that is being decoded."""

    index: int
    request: Request
    output: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)


class Engine:
    """One vLLM engine in this process. `seconds` is the wall clock of the last `generate`."""

    def __init__(self, config: EngineConfig) -> None:
        prepare_environment(config.model)
        self.config = config
        self.seconds = 0.0
        with _collector_paused():
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(config)))
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler

    def close(self) -> None:
        """Give the model's memory back; the engine cannot be used after it."""
        self._scheduler = None
        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()

    def _add(self, key: str, request: Request) -> str:
        """Queue a request; returns the engine's internal id of it."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            logprobs=request.logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        internal: str = self._engine.add_request(key, {"prompt_token_ids": list(request.prompt_ids)}, params)
        return internal

    def _drafts(self, longest: int) -> dict[str, list[int]]:
        """Internal request id → drafts that the next step will verify.

        Args:
            longest: tokens of the longest sequence of the step that drafted them.
        """
        drafts = {internal: list(state.spec_token_ids) for internal, state in self._scheduler.requests.items()}
        slots = max(map(len, drafts.values()), default=0)
        near_end = longest + 2 * slots + 1 > self.config.max_model_len
        if near_end and not any(token for tokens in drafts.values() for token in tokens):
            # Where one block would pass the model's length vLLM drafts for none of the batch, and verifies zeros.
            return {}
        return drafts

    def _commit(self, active: _Active, drafts: list[int], delta: Any) -> None:
        """Book the tokens of one step for one request."""
        tokens = [int(token) for token in delta.token_ids]
        if not tokens:
            return
        if active.output:
            context = len(active.request.prompt_ids) + len(active.output)
            # The scheduler cuts a block that would run past the model's length.
            drafted = drafts[: max(0, self.config.max_model_len - context - 1)]
            active.rounds.append(Round(context, drafted, accepted_prefix(drafted, tokens), len(tokens)))
        active.output.extend(tokens)
        if delta.logprobs:
            active.logprobs.extend({int(token): float(entry.logprob) for token, entry in position.items()} for position in delta.logprobs)

    def generate(self, requests: list[Request], on_finished: Callable[[Completion], None] | None = None, desc: str | None = None) -> list[Completion]:
        """Decode all requests, at most `max_num_seqs` at a time.

        Args:
            on_finished: called with each completion as soon as it is done (in the order they finish).
            desc: name of the progress bar on stderr; None: no bar.
        Returns:
            The completions in the order of `requests`.
        Raises:
            EngineError: a prompt that is empty or does not fit the engine.
        """
        check_requests(self.config, requests)
        started = time.perf_counter()
        active: dict[str, _Active] = {}
        internals: dict[str, str] = {}
        for index, request in enumerate(requests):
            key = str(index)
            internals[key] = self._add(key, request)
            active[key] = _Active(index, request)
        done: dict[int, Completion] = {}
        with tqdm(total=len(requests), desc=desc, unit="prompt", disable=desc is None) as bar:
            longest = 0
            while active:
                drafts = self._drafts(longest)
                longest = max(len(state.request.prompt_ids) + len(state.output) for state in active.values())
                for output in self._engine.step():
                    state = active[output.request_id]
                    self._commit(state, drafts.get(internals[output.request_id], []), output.outputs[0])
                    if not output.finished:
                        continue
                    del active[output.request_id]
                    request = state.request
                    completion = Completion(
                        request.id,
                        state.output,
                        str(output.outputs[0].finish_reason),
                        state.rounds,
                        state.logprobs if request.logprobs is not None else None,
                    )
                    done[state.index] = completion
                    bar.update()
                    if on_finished is not None:
                        on_finished(completion)
        self.seconds = time.perf_counter() - started
        return [done[index] for index in range(len(requests))]
