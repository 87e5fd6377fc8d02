"""What can go wrong in a flow and a user can mend: one line each."""

from __future__ import annotations

from stages.errors import DraftlineError


class FlowError(DraftlineError):
    """A flow cannot do what it was asked; nothing was changed."""


class StageFailedError(DraftlineError):
    """A stage of the graph ended with an error; its last line says why."""


class BusyError(FlowError):
    """Another run works for the same verifier."""
