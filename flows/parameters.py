"""Parameters of the flows: every knob of params.yaml, each optional, unknown ones refused before anything starts."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Optional, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, create_model

from flows.errors import FlowError
from stages.errors import ParamsError
from stages.params import Params, Section
from stages.params_edit import lay_params_over


def _section(annotation: Any) -> type[Section] | None:
    """The section of params.yaml that an annotation means, if it is one."""
    candidates = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, Section)), None)


def optional(model: type[Section], name: str) -> type[BaseModel]:
    """`model` with every field optional and None by default, section by section; unknown names are refused."""
    fields: dict[str, Any] = {}
    for field, info in model.model_fields.items():
        section = _section(info.annotation)
        inner: Any = optional(section, f"{name}_{field}") if section is not None else info.annotation
        fields[field] = (Optional[inner], None)  # noqa: UP045 - the annotation is a value here
    return create_model(name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), __doc__=model.__doc__, **fields)


Overrides: Any = optional(Params, "Overrides")
"""Values of params.yaml for one run."""


def given(overrides: BaseModel) -> dict[str, Any]:
    """The values that were given, section by section."""
    return {
        name: given(value) if isinstance(value, BaseModel) else value for name, value in overrides if name in overrides.model_fields_set and value is not None
    }


def write_overrides(path: Path, overrides: BaseModel) -> Params:
    """Lay the given values over the params file at `path`.

    Raises:
        FlowError: the result is not valid; the file stays as it was.
    """
    try:
        return lay_params_over(path, given(overrides), Path("flow parameters"))
    except ParamsError as error:
        raise FlowError(str(error)) from None
