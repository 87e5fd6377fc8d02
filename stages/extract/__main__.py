"""Hidden states out of vLLM: dumped to shards before training, or planned, to be streamed while it runs.

    python -m stages.extract

Reads the verifier's identity and the train and validation splits.

Mode offline writes `outputs/extract/dumps/<plan>/` and, last, `outputs/extract/manifest.json`. A dump that is already there
in full is used again without starting an engine; an interrupted one goes on at its first unfinished shard.

Modes online and hybrid write the manifest alone: the plan by which training streams. `python -m stages.extract.serve`
starts an extracting server for it, on this node or another; without one training starts its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from stages.artifacts import write_json
from stages.dataset import TokenSample, read_split
from stages.extract.dumps import check_room, largest_shard_bytes, prune
from stages.hidden_states.format import HiddenSample, Plan, allowed_rejections, data_digest, estimate_bytes
from stages.hidden_states.launch import ExtractionError, Extractor, Refused
from stages.hidden_states.publisher import budget_for
from stages.hidden_states.shards import ShardWriter
from stages.hidden_states.source import StreamPlan
from stages.hidden_states.spool import spool_directory
from stages.hidden_states.stream import sample_bytes
from stages.pairing.identity import VerifierIdentity, read_identity
from stages.pairing.lock import check_layer_ids
from stages.pairing.store import revalidate
from stages.params import Extraction, Params
from stages.process import OUTPUTS, stage_main

SPLITS = ("train", "validation")


def make_plan(identity: VerifierIdentity, samples: list[TokenSample], extraction: Extraction) -> Plan:
    """The plan of a dump of `samples`."""
    lengths = [len(sample.input_ids) for sample in samples]
    return Plan(
        verifier=identity.digest,
        layer_ids=(*extraction.layer_ids, identity.num_layers),
        hidden_size=identity.hidden_size,
        dtype=extraction.dtype,
        max_seq_len=max(lengths),
        data=data_digest((sample.id, sample.input_ids) for sample in samples),
        samples=len(samples),
        tokens=sum(lengths),
        samples_per_shard=extraction.samples_per_shard,
        max_num_seqs=extraction.max_num_seqs,
    )


class Source(Protocol):
    """What gives hidden states: an engine (`Extractor`)."""

    def extract(self, samples: list[tuple[str, list[int]]], on_done: Callable[[int], object] | None = None) -> Iterator[HiddenSample | Refused]:
        """See `Extractor.extract`."""


def dump(writer: ShardWriter, samples: list[TokenSample], source: Source) -> None:
    """Extract the shards that `writer` does not have yet, one batch per shard.

    Raises:
        ExtractionError: more samples are unusable than `allowed_rejections`; what is final stays.
    """
    plan = writer.plan
    allowed = allowed_rejections(plan.samples)
    rejected = sum(len(entry.rejected) for entry in writer.finished.values())
    done = sum(len(samples[position].input_ids) for index in writer.finished for position in plan.shard_range(index))
    with tqdm(total=plan.tokens, initial=done, desc="extract", unit="tok", unit_scale=True) as bar:
        for index in range(plan.shards):
            if index in writer.finished:
                continue
            batch = [(samples[position].id, samples[position].input_ids) for position in plan.shard_range(index)]
            good: list[HiddenSample] = []
            bad: dict[str, str] = {}
            for result in source.extract(batch, bar.update):
                if isinstance(result, Refused):
                    bad[result.id] = result.reason
                else:
                    good.append(result)
            rejected += len(bad)
            if rejected > allowed:
                raise ExtractionError(
                    f"{rejected} of {plan.samples} samples gave unusable hidden states, at most {allowed} may; the last: {next(reversed(bad.values()))}"
                )
            writer.write(index, good, bad)


def run(params: Params, output: Path) -> None:
    extraction = params.extraction
    identity = read_identity()
    check_layer_ids(extraction.layer_ids, identity.num_layers)
    samples = [sample for split in SPLITS for sample in read_split(OUTPUTS / "prepare", split)]
    plan = make_plan(identity, samples, extraction)
    manifest = output / "manifest.json"
    if extraction.mode == "offline":
        extract_dump(plan, samples, identity, params, output, manifest)
    else:
        write_stream_plan(plan, params, manifest)


def write_stream_plan(plan: Plan, params: Params, manifest: Path) -> None:
    """Modes online and hybrid: nothing is extracted yet; training streams by this plan.

    Raises:
        ExtractionError: the budget does not hold the longest sample.
    """
    extraction = params.extraction
    needed = budget_for(sample_bytes(plan, plan.max_seq_len))
    if extraction.budget_bytes < needed:
        raise ExtractionError(
            f"params.yaml: extraction.budget_bytes = {extraction.budget_bytes}: must be at least {needed}, "
            f"the hidden states of the longest sample ({plan.max_seq_len} tokens x {len(plan.stored_ids)} layers x {plan.hidden_size} x {plan.dtype})"
        )
    planned = StreamPlan(
        verifier=plan.verifier,
        plan=plan.to_json(),
        extraction=extraction,
        kv_cache_bytes=params.engine.kv_cache_bytes,
        trust_remote_code=params.verifier.trust_remote_code,
    )
    write_json(manifest, planned.model_dump(mode="json"))
    print(f"extract: {plan.samples} samples, {plan.tokens} tokens, {estimate_bytes(plan) / 1e6:.0f} MB per epoch will be streamed while the drafter is trained")


def extract_dump(plan: Plan, samples: list[TokenSample], identity: VerifierIdentity, params: Params, output: Path, manifest: Path) -> None:
    """Mode offline: extract everything that is not there yet."""
    extraction = params.extraction
    dumps = output / "dumps"
    writer = ShardWriter(dumps / plan.digest[:16], plan)
    if not writer.complete:
        model = revalidate(identity)
        lengths = [len(sample.input_ids) for sample in samples]
        missing = sum(lengths[position] for index in range(plan.shards) if index not in writer.finished for position in plan.shard_range(index))
        spool_bytes = largest_shard_bytes(plan, lengths)
        with spool_directory(output, spool_bytes) as spool:
            check_room(output, plan, missing, spool_bytes if spool.is_relative_to(output) else 0, extraction.disk_reserve_bytes, extraction.ignore_estimate)
            manifest.unlink(missing_ok=True)
            with Extractor(plan, model, spool, params.engine.kv_cache_bytes, params.verifier.trust_remote_code) as extractor:
                dump(writer, samples, extractor)
    written = writer.write_manifest(manifest)
    prune(dumps, writer.directory, extraction.keep_dumps)
    print(
        f"extract: {written['samples']} samples, {written['tokens']} tokens, {estimate_bytes(plan) / 1e6:.0f} MB in {plan.shards} shards; "
        f"{len(written['rejected'])} samples rejected"
    )


if __name__ == "__main__":
    raise SystemExit(stage_main("extract", run))
