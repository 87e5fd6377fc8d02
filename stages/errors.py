"""The exceptions that a user of Draftline can cause."""


class DraftlineError(Exception):
    """Something the user can mend. The message is one line: what, where, the value, what is allowed."""


class ParamsError(DraftlineError):
    """`params.yaml` holds a key or a value that the schema refuses."""


class ArtifactError(DraftlineError):
    """A stage's input is absent, incomplete or altered."""


class PairError(DraftlineError):
    """A drafter does not belong to the verifier it was about to run with."""
