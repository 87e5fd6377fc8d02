"""Where training gets hidden states from: what `outputs/extract/manifest.json` says, opened.

Offline that is a dump. Online and hybrid the manifest is the plan alone, with everything that training needs to know to
stream by it; servers that it does not name are started here, and end with the block.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import tqdm

from stages.artifacts import read_json, write_json
from stages.errors import ArtifactError
from stages.hidden_states.cache import open_cache
from stages.hidden_states.engines import Engines
from stages.hidden_states.envelope import plan_origin
from stages.hidden_states.format import HiddenSample, Plan, data_digest
from stages.hidden_states.launch import EXTRA_POSITIONS, engine_arguments
from stages.hidden_states.producer import ProducerConfig
from stages.hidden_states.server import extracting_server, mooncake_master, server_command
from stages.hidden_states.shards import FORMAT, REDO, open_dump
from stages.hidden_states.spool import file_system, memory_spool
from stages.hidden_states.stores import Store, StoreError
from stages.hidden_states.stream import Pace, Stream
from stages.hidden_states.transport import Transport, open_store
from stages.installed import installed_device
from stages.params import Extraction
from stages.params_file import describe
from stages.servers import free_port

LOGS = "stream"
CACHE = "cache"
RUN_FILE = "run.json"
REQUESTS_PER_SEQUENCE = 2
"""Requests in flight for each sequence that an engine prefills at a time: one that it works on, one that waits there."""


MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


class States(Protocol):
    """Hidden states by sample id: a `Dump` or a `Stream`."""

    plan: Plan

    @property
    def ids(self) -> list[str]:
        """Ids of the samples that can be read, in data set order."""

    def read(self, sample: str, expected_token_ids: list[int] | None) -> HiddenSample:
        """States `[T, L+1, H]` of a sample. Raises UnusableSampleError where there are none."""


class StreamPlan(BaseModel):
    """`outputs/extract/manifest.json` of modes online and hybrid. `extraction`: that section of params.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: int = FORMAT
    verifier: str
    plan: dict[str, Any]
    extraction: Extraction
    kv_cache_bytes: int
    trust_remote_code: bool


def mode_of(manifest: Path) -> str:
    """`extraction.mode` that a manifest was made for. Raises ArtifactError: there is none."""
    if not manifest.is_file():
        raise ArtifactError(f"{manifest}: no such file; the extraction is not finished (dvc repro extract)")
    found = read_json(manifest)
    extraction = found.get("extraction", {}) if isinstance(found, dict) else None
    if not isinstance(extraction, dict):
        raise ArtifactError(f"{manifest}: not what extract writes; {REDO}")
    return str(extraction.get("mode", "offline"))


def read_stream_plan(manifest: Path) -> tuple[StreamPlan, Plan]:
    """A manifest of modes online and hybrid, and the plan in it. Raises ArtifactError: it is not what extract writes."""
    try:
        planned = StreamPlan.model_validate_json(json.dumps(read_json(manifest)))
        plan = Plan.from_json(planned.plan)
        plan_origin(plan)
        return planned, plan
    except ValidationError as error:
        raise ArtifactError(f"{describe(error, manifest)}; {REDO}") from None
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{manifest}: plan: {error}; {REDO}") from None


@contextmanager
def open_states(manifest: Path, verifier: str, model: Path, tokens: Mapping[str, list[int]], output: Path) -> Iterator[States]:
    """Open what an extraction has left or planned.

    Args:
        verifier: digest of the identity that the states must come from; `model` is its directory.
        tokens: id → token ids of all samples of training and validation.
        output: the training stage's folder: logs, the cache of mode hybrid.
    Raises:
        ArtifactError, EngineError, ServerError, StoreError: what is needed is missing, or cannot be reached.
    """
    if mode_of(manifest) == "offline":
        dump = open_dump(manifest, verifier)
        _require_made_for(tokens, manifest, dump.plan)
        yield dump
        return
    planned, plan = read_stream_plan(manifest)
    if planned.verifier != verifier:
        raise ArtifactError(f"{manifest}: plan for verifier {planned.verifier[:12]}, the current one is {verifier[:12]}; {REDO}")
    _require_made_for(tokens, manifest, plan)
    with open_stream(planned, model, tokens, output) as stream:
        yield stream


def _require_made_for(tokens: Mapping[str, list[int]], manifest: Path, plan: Plan) -> None:
    """Samples of another data set would be skipped as unusable, until a training has seen none at all."""
    if plan.data != data_digest(tokens.items()):
        raise ArtifactError(f"{manifest}: made for other samples than outputs/prepare holds now; {REDO}")


@contextmanager
def open_stream(planned: StreamPlan, model: Path, tokens: Mapping[str, list[int]], output: Path) -> Iterator[Stream]:
    """A stream by a plan, with the servers that it needs. Arguments and errors as for `open_states`."""
    plan, extraction = Plan.from_json(planned.plan), planned.extraction
    with ExitStack() as stack:
        transport, watched = _transport(extraction, stack, output / LOGS)
        urls = extraction.servers
        if not urls:
            port = free_port()
            producer = producer_config(extraction, transport, planned.verifier)
            arguments = engine_arguments(
                model,
                plan.dtype,
                list(plan.stored_ids),
                plan.max_seq_len + EXTRA_POSITIONS,
                plan.max_num_seqs,
                producer,
                planned.kv_cache_bytes,
                planned.trust_remote_code,
            )
            argv, env = server_command(arguments, "127.0.0.1", port)
            server = stack.enter_context(extracting_server(argv, env, port, extraction.startup_seconds, output / LOGS / "server.log"))
            watched.append(server.ended)
            urls = [f"http://127.0.0.1:{port}"]
        if (where := disk_of(transport)) is not None:
            tqdm.write(where)
        # After all servers: a process that has a Mooncake client must not fork.
        store = open_store(transport)
        stack.callback(store.close)
        engines = Engines(urls)
        for absent in engines.connect(plan.max_seq_len):
            tqdm.write(f"extract: {absent}; going on without it for now")
        cache = open_cache(output / CACHE, plan, extraction.cache_bytes) if extraction.mode == "hybrid" else None
        pace = Pace(
            ahead=extraction.ahead_samples,
            budget_bytes=extraction.budget_bytes,
            requests=min(extraction.ahead_samples, REQUESTS_PER_SEQUENCE * extraction.max_num_seqs * len(urls)),
            timeout_seconds=extraction.timeout_seconds,
            ttl_seconds=extraction.ttl_seconds,
            turns=not extraction.servers and installed_device() == "cpu",
        )
        stream = Stream(plan, tokens, store, engines, pace, ended=lambda: next((why for ended in watched if (why := ended()) is not None), None), cache=cache)
        _replace_run(output / LOGS / RUN_FILE, store, stream.run)
        with stream:
            yield stream
        tqdm.write(f"extract: {stream.ledger}")


def producer_config(extraction: Extraction, transport: Transport, verifier: str) -> ProducerConfig:
    """What an extracting server is told for a section of params.yaml."""
    return ProducerConfig(
        transport=transport,
        verifier=verifier,
        queue_samples=extraction.max_num_seqs,
        budget_bytes=extraction.budget_bytes,
        ttl_seconds=extraction.ttl_seconds,
        # Half, so that a refusal still reaches who waits for the sample.
        wait_seconds=extraction.timeout_seconds / 2,
    )


def named_transport(extraction: Extraction) -> Transport:
    """The transport as params.yaml names it."""
    if extraction.transport == "file":
        return Transport(kind="file", spool=extraction.spool)
    return Transport(kind="mooncake", master=extraction.master, protocol=extraction.protocol, rdma_devices=extraction.rdma_devices)


def disk_of(transport: Transport) -> str | None:
    """A warning where samples would go to a disk; None where they stay in memory."""
    if transport.spool is None or (kind := file_system(Path(transport.spool))) in MEMORY:
        return None
    return f"extract: params.yaml: extraction.spool = {transport.spool!r}: on {kind}, not in memory: every streamed sample is written to a disk"


def _transport(extraction: Extraction, stack: ExitStack, logs: Path) -> tuple[Transport, list[Callable[[], str | None]]]:
    """The transport, made where params.yaml leaves it open, and what tells that it has ended."""
    named = named_transport(extraction)
    if named.kind == "file" and named.spool is None:
        return Transport(kind="file", spool=str(stack.enter_context(memory_spool(extraction.budget_bytes)))), []
    if named.kind == "mooncake" and named.master is None:
        address, master = stack.enter_context(mooncake_master(logs / "master.log"))
        return named.model_copy(update={"master": address}), [master.ended]
    return named, []


def _replace_run(path: Path, store: Store, run: str) -> None:
    """Note which run reads here now, and free what its predecessor was promised and did not read: it may have been killed."""
    if path.is_file():
        with suppress(ArtifactError, StoreError, KeyError):
            store.remove_run(str(read_json(path)["run"]))
    write_json(path, {"run": run})


def expect(states: States, samples: Iterable[str]) -> None:
    """Tell a stream the order in which samples will be read; a dump need not know."""
    if isinstance(states, Stream):
        states.expect(samples)


def step_made(states: States, seconds: float) -> None:
    """Tell a stream how long a step of training takes. Raises StreamError: longer than an unread sample may live."""
    if isinstance(states, Stream):
        states.check_step(seconds)


def stream_metrics(states: States) -> dict[str, float]:
    """A stream's metrics (see `Stream.metrics`); none of a dump."""
    return states.metrics() if isinstance(states, Stream) else {}
