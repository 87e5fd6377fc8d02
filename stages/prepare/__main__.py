"""Chats to token ids and loss masks, answered by the verifier.

    python -m stages.prepare        reads params.yaml and outputs/verifier/identity.json, writes outputs/prepare/

Order of work: read → drop copies → take the limit → drop what the template refuses → split by prompt → answer → write.
Nothing is written before every row has been read and rendered.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stages.artifacts import MANIFEST, file_table, write_json
from stages.dataset import SPLITS, write_split
from stages.pairing.identity import VerifierIdentity, read_identity
from stages.pairing.store import revalidate
from stages.params import Params
from stages.params import Prepare as Settings
from stages.prepare.answers import Journal, Verifier, answering_engine
from stages.prepare.build import Limits, SplitReport, from_rows, from_verifier, usable
from stages.prepare.chat import Chat, Tokens
from stages.prepare.inputs import fingerprint
from stages.prepare.rows import PrepareError, Tally, input_files, read_rows
from stages.prepare.splits import KeyedRow, assign, take, with_unique_ids, without_duplicates
from stages.process import stage_main

FORMAT = 1


def read(settings: Settings, tally: Tally) -> tuple[list[KeyedRow], list[KeyedRow]]:
    """Distinct rows of `inputs` (at most `limit`) and of `evaluation_inputs`, every id unique."""
    regenerate = settings.regeneration.enabled
    files = input_files(settings.inputs)
    held_out_files = input_files(settings.evaluation_inputs, "prepare.evaluation_inputs")
    held_out, duplicates = without_duplicates(read_rows(held_out_files, tally, settings.on_error, "all" if regenerate else "last"), settings.seed)
    tally.duplicates += duplicates
    prompts = {keyed.prompt for keyed in held_out}
    rows, duplicates = without_duplicates(read_rows(files, tally, settings.on_error, "all" if regenerate else "none"), settings.seed, held_out=prompts)
    tally.duplicates += duplicates
    unique = with_unique_ids([*held_out, *rows])
    return take(unique[len(held_out) :], settings.limit, tally), unique[: len(held_out)]


def failure(what: str, settings: Settings, tally: Tally, chat: Chat) -> PrepareError:
    """The error of a run that leaves too little: every reason with its count, and the template."""
    reasons = [f"{count} × {reason} (first: {tally.examples[reason]})" for reason, count in tally.dropped.most_common()]
    others = (("duplicate", tally.duplicates), ("broken line", tally.broken_lines), (f"beyond prepare.limit = {settings.limit}", tally.beyond_limit))
    reasons += [f"{count} × {name}" for name, count in others if count]
    reasons.append(chat.template_name)
    return PrepareError(f"{what}; {tally.read} rows read: {'; '.join(reasons)}")


def split_rows(rows: list[KeyedRow], held_out: list[KeyedRow], settings: Settings, tally: Tally, chat: Chat) -> dict[str, list[KeyedRow]]:
    """The rows of each split.

    Raises:
        PrepareError: fewer distinct prompts than splits that have to be filled.
    """
    evaluation_fraction = 0.0 if settings.evaluation_inputs else settings.evaluation_fraction
    wanted = 1 + (settings.validation_fraction > 0) + (evaluation_fraction > 0)
    prompts = {keyed.prompt: keyed.row.kind for keyed in reversed(rows)}
    if not rows:
        raise failure("no row is left", settings, tally, chat)
    if len(prompts) < wanted:
        raise failure(
            f"{len(prompts)} distinct prompts are left, {wanted} are needed to train on one and hold out others "
            "(prepare.validation_fraction and prepare.evaluation_fraction: 0 holds out none)",
            settings,
            tally,
            chat,
        )
    splits = assign(prompts, {keyed.prompt: keyed.rank for keyed in rows}, settings.validation_fraction, evaluation_fraction)
    out: dict[str, list[KeyedRow]] = {split: [keyed for keyed in rows if splits[keyed.prompt] == split] for split in SPLITS}
    out["evaluation"].extend(held_out)
    return out


def build(
    rows: list[KeyedRow], held_out: list[KeyedRow], identity: VerifierIdentity, limits: Limits, params: Params, work: Path, tally: Tally
) -> tuple[dict[str, SplitReport], dict[str, Any]]:
    """Samples of all splits, and the report about them."""
    settings, engine = params.prepare, params.engine
    directory = revalidate(identity)
    chat = Chat(directory, identity.eos_token_ids, params.verifier.trust_remote_code)
    chat.check_template()
    fit = list(usable(rows, chat, limits, tally))
    held_out = [keyed for keyed, _ in usable(held_out, chat, Limits(sys.maxsize, limits.prompt), tally)]
    splits = split_rows([keyed for keyed, _ in fit], held_out, settings, tally, chat)
    report: dict[str, Any] = {"template": chat.template_name}
    if settings.regeneration.enabled:
        regeneration = settings.regeneration.model_dump(exclude={"enabled", "samples_per_prompt"})
        plan = {"verifier": identity.digest, "template": identity.chat_template, "engine_dtype": engine.dtype, "regeneration": regeneration}
        config = answering_engine(directory, engine, params.verifier.trust_remote_code)
        with Journal(work, plan) as journal:
            verifier = Verifier(journal, config, settings.regeneration)
            try:
                reports, extra = from_verifier(splits, settings, chat, verifier, limits, tally)
            finally:
                verifier.close()
            print(f"{verifier.asked} answers asked, the others from {journal.directory}")
        report["further_answers"] = {name: count for name, count in sorted(extra.items()) if count}
    else:
        tokens: dict[str, Tokens] = {keyed.row.id: tokens for keyed, tokens in fit if tokens is not None}
        reports = from_rows(splits, tokens, chat, limits, tally)
    if not sum(sample.tokens.supervised for sample in reports["train"].samples):
        raise failure("no supervised token to train on", settings, tally, chat)
    return reports, report


def run(params: Params, output: Path) -> None:
    """The stage: see the module's text. Resumes from `output/work` and writes the splits and the manifest."""
    identity = read_identity()
    limits = Limits.of(params.prepare, params.engine)
    inputs = fingerprint(params.prepare)
    tally = Tally()
    rows, held_out = read(params.prepare, tally)
    reports, report = build(rows, held_out, identity, limits, params, output / "work", tally)
    (output / MANIFEST).unlink(missing_ok=True)
    for split in SPLITS:
        write_split(output, split, (sample.token_sample() for sample in reports[split].samples))
    files = {f"{split}/{name}": entry for split in SPLITS for name, entry in file_table(output / split).items()}
    report |= {
        "rows": {
            "read": tally.read,
            "broken_lines": tally.broken_lines,
            "duplicates": tally.duplicates,
            "beyond_limit": tally.beyond_limit,
            "dropped": dict(sorted(tally.dropped.items())),
            "examples": dict(sorted(tally.examples.items())),
        },
        "splits": {split: reports[split].summary() for split in SPLITS},
    }
    write_json(output / MANIFEST, {"format": FORMAT, "verifier": identity.digest, "inputs": inputs, "report": report, "files": files})
    print(describe(report))


def describe(report: dict[str, Any]) -> str:
    """The report in a few lines for the terminal."""
    rows = report["rows"]
    lines = [f"{rows['read']} rows read, {rows['duplicates']} duplicates, {rows['broken_lines']} broken lines, {rows['beyond_limit']} beyond the limit"]
    lines += [f"dropped {count} × {reason} (first: {rows['examples'][reason]})" for reason, count in rows["dropped"].items()]
    for split, entry in report["splits"].items():
        kinds = ", ".join(f"{kind} {sizes['samples']}" for kind, sizes in entry["kinds"].items())
        lines.append(
            f"{split}: {entry['samples']} samples, {entry['tokens']} tokens, {entry['supervised_tokens']} supervised, "
            f"{entry['truncated_answers']} answers cut at max_tokens ({kinds})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(stage_main("prepare", run))
