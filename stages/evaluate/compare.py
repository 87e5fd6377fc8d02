"""Several drafters of one verifier on the same prompts.

    python -m stages.evaluate.compare --checkpoint dspark=outputs/a/checkpoint --checkpoint dflash=../other/outputs/convert/checkpoint --output comparison

Runs where `outputs/verifier` and `outputs/prepare` lie and takes the rest from params.yaml there; every knob of its evaluate section
is an option too (`--draft-tokens "[4, 7]"`). Writes what the stage writes: all cells, who leads whom, plots. What is
measured is kept in `<output>/measured`, so that an interrupted comparison goes on where it stopped; delete it to measure anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stages.artifacts import digest_json
from stages.decoding.engine import engine_config
from stages.errors import DraftlineError
from stages.evaluate.__main__ import held_out_prompts, write_reports
from stages.evaluate.measure import Evaluation
from stages.evaluate.store import Store
from stages.evaluate.subjects import Drafter, read_drafter
from stages.pairing.identity import VerifierIdentity, read_identity
from stages.pairing.store import verifier_directory
from stages.params import Evaluate, Params, parse_params, read_params
from stages.process import refused_path


def named_checkpoints(values: list[str], identity: VerifierIdentity) -> list[Drafter]:
    """Drafters from NAME=DIR.

    Raises:
        DraftlineError: not of that form, a name twice, or a directory that holds no drafter of this verifier.
    """
    drafters: dict[str, Drafter] = {}
    for value in values:
        name, _, directory = value.partition("=")
        if not name or not directory:
            raise DraftlineError(f"--checkpoint {value}: expected NAME=DIR")
        if name in drafters:
            raise DraftlineError(f"--checkpoint {value}: {name} is named twice")
        drafters[name] = read_drafter(name, Path(directory), identity)
    return list(drafters.values())


def parsed(name: str, text: str) -> object:
    """The value of an option.

    Raises:
        DraftlineError: it is no YAML.
    """
    try:
        return YAML(typ="safe").load(text)
    except YAMLError:
        raise DraftlineError(f"--{name.replace('_', '-')} {text}: not YAML; write a number, or a list as [4, 7]") from None


def with_options(params: Params, options: dict[str, str | None]) -> Params:
    """Params with the evaluate section's knobs that were given as options, YAML each."""
    data = params.model_dump()
    data["evaluate"] |= {name: parsed(name, text) for name, text in options.items() if text is not None}
    return parse_params(data, Path("params.yaml with the options"))


def compare(params: Params, checkpoints: list[str], output: Path, engine_too: bool = True) -> None:
    """Measure and report; fails, after the report is written, where outputs are degraded. Arguments as `Evaluation`."""
    identity = read_identity()
    drafters = named_checkpoints(checkpoints, identity)
    chosen = held_out_prompts(params.evaluate.prompts_per_kind)
    engine = engine_config(verifier_directory(identity), params.engine, params.verifier.trust_remote_code)
    settings = params.evaluate
    # Before anything is measured: whether it can be kept.
    (output / "measured").mkdir(parents=True, exist_ok=True)
    about = {
        "verifier": identity.digest,
        "engine": params.engine.model_dump(),
        "prompts": digest_json([[sample.id, list(sample.prompt_ids)] for group in chosen.values() for sample in group]),
        **{name: getattr(settings, name) for name in ("max_tokens", "repeats", "speed_prompts", "speed_tokens")},
    }
    evaluation = Evaluation(drafters, chosen, verifier_directory(identity), engine, settings, Store(output / "measured", about), engine_too)
    evaluation.run()
    report = {"verifier": identity.digest, "checkpoints": {drafter.name: drafter.content for drafter in drafters}, **evaluation.report()}
    write_reports(report, output)
    if report["failures"]:
        raise DraftlineError(f"degraded outputs: {'; '.join(report['failures'])}; see {output / 'report.md'}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.evaluate.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", action="append", required=True, metavar="NAME=DIR", help="a converted drafter; several times")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="report.json, report.md, plots/ and measured/")
    parser.add_argument("--acceptance-only", action="store_true", help="all through our own loop, nothing timed: a fraction of the time")
    for name, field in Evaluate.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar="VALUE", help=(field.description or "").replace("%", "%%"))
    options = vars(parser.parse_args(arguments))
    checkpoints, output, acceptance_only = (options.pop(name) for name in ("checkpoint", "output", "acceptance_only"))
    try:
        compare(with_options(read_params(), options), checkpoints, output, not acceptance_only)
    except DraftlineError as error:
        print(f"draftline compare: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if (text := refused_path(error)) is None:
            raise
        print(f"draftline compare: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("draftline compare: interrupted; run again to go on from what is measured", file=sys.stderr)
        return 130
    print((output / "report.md").read_text(encoding="utf-8").split("## Drafts per round")[0])
    print(f"report {output / 'report.md'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
