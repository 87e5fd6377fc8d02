"""The reading end of a transport: wait for a sample, check it, acknowledge it by removing it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from torch import Tensor

from stages.errors import DraftlineError
from stages.hidden_states.envelope import DATA, KEY, MANIFEST, Manifest, Origin, TornError, from_bytes, require_origin, unpack
from stages.hidden_states.stores import Store

FIRST_POLL_SECONDS, LAST_POLL_SECONDS = 0.002, 0.05


class RefusedError(DraftlineError):
    """The producer says that there is no such sample. `again`: another attempt can succeed; `number`: errno, where the system refused."""

    def __init__(self, message: str, again: bool = False, number: int | None = None) -> None:
        super().__init__(message)
        self.again = again
        self.number = number


class LateError(DraftlineError):
    """The sample was not published in time."""


class LostError(DraftlineError):
    """The sample was published, and is gone although nobody here has acknowledged it."""


def check_key(key: object) -> str:
    """A key that names an object of a store and nothing else: engines' answers come over a network.

    Raises:
        RefusedError: it could lead elsewhere.
    """
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise RefusedError(f"the engine's handle names {key!r}, which is no key of a sample; nothing was read", again=True)
    return key


def take(store: Store, key: str, wanted: Origin, seconds: float, going: Callable[[], bool] = lambda: True) -> tuple[Tensor, Tensor, Manifest]:
    """Take one sample: wait for its manifest, read its data, check both, remove both.

    Args:
        seconds: longest wait.
        going: asked while waiting; False ends the wait.
    Returns:
        States `[T, ids, H]`, token ids `[T]` int64, manifest.
    Raises:
        RefusedError: the producer marked it.
        LateError, LostError: it did not come, or went.
        TornError: its bytes are not the published ones (it is removed all the same).
        ForeignError: of another verifier, layers or dtype (it stays where it is: it may be someone else's).
        StoreError: the store cannot be reached.
    """
    deadline, pause = time.monotonic() + seconds, FIRST_POLL_SECONDS
    while (raw := store.read(f"{key}{MANIFEST}")) is None:
        if time.monotonic() >= deadline or not going():
            raise LateError(f"sample {key} was not published within {seconds:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, LAST_POLL_SECONDS)
    try:
        if len(raw) == 0:
            raise RefusedError("no space left where samples are published, not even for the reason of a refusal", again=True, number=errno.ENOSPC)
        manifest = from_bytes(key, raw)
        if manifest.refusal is not None:
            raise RefusedError(manifest.refusal.reason, manifest.refusal.again, manifest.refusal.number)
        require_origin(manifest, wanted)
        data = store.read(f"{key}{DATA}")
        if data is None:
            raise LostError(f"sample {key} was published by {manifest.producer.name} and is gone, unread")
        states, token_ids = unpack(manifest, data)
    except (RefusedError, LostError, TornError):
        acknowledge(store, key)
        raise
    acknowledge(store, key)
    return states, token_ids, manifest


def acknowledge(store: Store, key: str) -> None:
    """Give a sample's room back."""
    store.remove(f"{key}{MANIFEST}")
    store.remove(f"{key}{DATA}")
