"""Chats to token ids and loss masks, answered by the verifier.

    python -m stages.prepare        reads params.yaml and outputs/verifier/identity.json, writes outputs/prepare/

Order of work: read → drop copies → take the limit → drop what the template refuses → split by prompt → answer → write.
Nothing is written before every row has been read and rendered. Files are read once per step and never held: what is kept
of a row in between are a few numbers (`index`) and, on disk, its sample (`spool`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stages.artifacts import MANIFEST, file_table, write_json
from stages.dataset import SPLITS
from stages.pairing.identity import read_identity
from stages.pairing.store import revalidate
from stages.params import Params
from stages.params import Prepare as Settings
from stages.prepare.build import Limits
from stages.prepare.inputs import fingerprint, unchanged
from stages.prepare.jobs import JobContext, template_name
from stages.prepare.lines import PrepareError
from stages.prepare.made import rows_to_answer, with_own_answers, with_the_verifiers
from stages.prepare.read import Files, read
from stages.prepare.report import describe, rows_summary
from stages.prepare.rows import Tally
from stages.prepare.spool import Spool
from stages.prepare.workers import Workers, process_count, workers
from stages.process import stage_main

FORMAT = 1


def failure(settings: Settings, tally: Tally, pool: Workers) -> Callable[[str], PrepareError]:
    """Makes the error of a run that leaves too little: every reason with its count, and the template."""

    def fail(what: str) -> PrepareError:
        reasons = [f"{count} × {reason} (first: {tally.examples[reason]})" for reason, count in tally.dropped.most_common()]
        others = (("duplicate", tally.duplicates), ("broken line", tally.broken_lines), (f"beyond prepare.limit = {settings.limit}", tally.beyond_limit))
        reasons += [f"{count} × {name}" for name, count in others if count]
        reasons += pool.in_order(template_name, [None])
        return PrepareError(f"{what}; {tally.read} rows read: {'; '.join(reasons)}")

    return fail


def run(params: Params, output: Path) -> None:
    """The stage: see the module's text. Resumes from `output/work` and writes the splits and the manifest."""
    settings = params.prepare
    identity = read_identity()
    files = Files.of(settings)
    processes = process_count(files.size)
    limits = Limits.of(settings, params.engine)
    context = JobContext(revalidate(identity), identity.eos_token_ids, params.verifier.trust_remote_code, limits, settings.seed, settings.on_error)
    tally = Tally()
    with workers(context, processes) as pool, Spool(output.parent) as training, Spool(output.parent) as prompts:
        fail = failure(settings, tally, pool)
        with unchanged(files.all):
            inputs = fingerprint(settings)
            taken = read(files, settings, pool, tally)
            if settings.regeneration.enabled:
                rows = rows_to_answer(taken, settings, limits, pool, tally, fail)
            else:
                made = with_own_answers(taken, settings, limits, pool, tally, (training, prompts), fail)
        if settings.regeneration.enabled:
            made = with_the_verifiers(rows, taken.kinds, params, identity, context, tally, output / "work")
        if not made.supervised:
            raise fail("no supervised token to train on")
        (output / MANIFEST).unlink(missing_ok=True)
        made.write(output)
        report = {**made.report, "template": next(iter(pool.in_order(template_name, [None]))), "rows": rows_summary(tally)}
    table = {f"{split}/{name}": entry for split in SPLITS for name, entry in file_table(output / split).items()}
    write_json(output / MANIFEST, {"format": FORMAT, "verifier": identity.digest, "inputs": inputs, "report": report, "files": table})
    print(describe(report))


if __name__ == "__main__":
    raise SystemExit(stage_main("prepare", run))
