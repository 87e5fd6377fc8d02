"""params.yaml changed by a program: profiles and parameters of flows laid over it; its JSON schema; the commands for both.

See `python -m stages.params --help`.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from stages import params as schema
from stages.artifacts import write_atomic
from stages.errors import ParamsError
from stages.params import PARAMS_FILE, Params, parse_params, read_params
from stages.params_file import lay_over, load_yaml, plain_yaml


def use_profile(profile: Path, path: Path = PARAMS_FILE) -> Params:
    """Lay the keys of `profile` over `path` and write the result, comments kept; nothing is written unless it is valid."""
    over = load_yaml(profile, "no such profile")
    if not isinstance(over, dict):
        raise ParamsError(f"{profile}: expected a mapping of sections, found {type(over).__name__}")
    return lay_params_over(path, over, profile)


def lay_params_over(path: Path, over: dict[str, Any], origin: Path) -> Params:
    """Lay sections of values over the params file `path`; `origin` is named in errors, in which case nothing is written."""
    read_params(path)
    writer = YAML()
    writer.width = 1000
    writer.indent(mapping=2, sequence=4, offset=2)
    merged = writer.load(path.read_text(encoding="utf-8"))
    lay_over(merged, over)
    # DVC's parser refuses a colon in a plain scalar of a {flow mapping}, which this writer leaves unquoted: `source: pypi:…`.
    for mapping in (merged, *(merged[section] for section in over if isinstance(merged[section], CommentedMap))):
        mapping.fa.set_block_style()
    stream = io.StringIO()
    writer.dump(merged, stream)
    params = parse_params(plain_yaml().load(stream.getvalue()), origin)
    write_atomic(path, stream.getvalue())
    return params


def json_schema() -> str:
    """JSON schema of params.yaml, for editors."""
    return json.dumps(Params.model_json_schema(), indent=2) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.params", description=schema.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema")
    parser.add_argument("--use", type=Path, metavar="PROFILE", help="lay a profile over params.yaml")
    options = parser.parse_args(argv)
    try:
        if options.schema:
            sys.stdout.write(json_schema())
        elif options.use:
            use_profile(options.use)
        else:
            read_params()
    except ParamsError as error:
        print(f"draftline params: {error}", file=sys.stderr)
        return 1
    return 0
