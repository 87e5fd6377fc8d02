"""Parameters of the flows: every knob of params.yaml, each optional, unknown ones refused before anything starts."""

from __future__ import annotations

import tempfile
import types
from pathlib import Path
from typing import Any, Optional, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, create_model

from flows.errors import FlowError
from stages.artifacts import write_atomic
from stages.errors import ParamsError
from stages.params import Params, Section, read_params
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
    """The values that were given, section by section; a null that was given is a value."""
    return {name: given(value) if isinstance(value, BaseModel) else value for name, value in overrides if name in overrides.model_fields_set}


def write_run_params(base: Path, path: Path, *layers: BaseModel) -> Params:
    """Write the params file of one run: `base` with the given values laid over it, later layers over earlier ones.

    Raises:
        FlowError: the result is not valid; nothing was written.
    """
    with tempfile.TemporaryDirectory() as scratch:
        draft = Path(scratch) / path.name
        draft.write_text(base.read_text(encoding="utf-8"), encoding="utf-8")
        try:
            params = read_params(draft)
            for layer in layers:
                params = lay_params_over(draft, given(layer), Path("flow parameters"))
        except ParamsError as error:
            raise FlowError(str(error).replace(str(draft), str(base))) from None
        write_atomic(path, draft.read_text(encoding="utf-8"))
    return params
