"""What all sections of params.yaml have in common, and reading it as text: YAML, one line for all errors, one mapping over another. Knows no knob."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stages.errors import ParamsError

Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Section(BaseModel):
    """A section of params.yaml: unknown keys and wrong types are refused ("600" is no number), values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


def plain_yaml() -> YAML:
    # YAML 1.2, as DVC reads it: "6e-4" is a number, "on" is a string.
    return YAML(typ="safe", pure=True)


def load_yaml(path: Path, absent: str) -> Any:
    """What a YAML file holds; the error of one that cannot be read is one line, `absent` where there is none."""
    try:
        return plain_yaml().load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParamsError(f"{path}: {absent if isinstance(error, FileNotFoundError) else error.strerror or error}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def describe(error: ValidationError, path: Path) -> str:
    """One line for each refused value: file, field, value, what is allowed."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "(whole file)"
        value = item.get("input")
        # A refused database URL may hold a password.
        shown = "" if item["type"] == "missing" or isinstance(value, (dict, BaseModel)) else re.sub(r"//.*@", "//", f" = {value!r}")
        text = "unknown key" if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
        lines.append(f"{path}: {where}{shown}: {text}")
    return "; ".join(lines)


def lay_over(base: dict[str, Any], over: dict[str, Any]) -> None:
    """Set the values of `over` in `base`, section by section."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            lay_over(base[key], value)
        else:
            base[key] = value


def require_urls(values: Sequence[str]) -> None:
    """Raises ValueError unless each is http(s)://<host>:<port> without a path."""
    for url in values:
        try:
            parts = urlsplit(url)
            fine = re.fullmatch(r"https?://[^/?#\s]+", url) is not None and parts.hostname is not None and parts.port != 0
        except ValueError:  # a port that is no number or above 65535, a bracket that is not closed
            fine = False
        if not fine:
            raise ValueError(f"{url!r} must be http(s)://<host>:<port> without a path")
