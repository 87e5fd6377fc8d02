"""What an engine's connector is configured with, and the publisher that comes of it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from stages.hidden_states.envelope import Origin
from stages.hidden_states.publisher import Limits, Publisher
from stages.hidden_states.transport import Transport, open_store


class ProducerConfig(BaseModel):
    """vLLM's `kv_connector_extra_config` for our connector.

    Attributes:
        transport: where samples go.
        verifier: digest of the identity of the engine's model; it stands in every sample.
        queue_samples: samples that wait for the writer.
        budget_bytes: bytes of unread samples held at most; None: no limit (an engine whose samples are taken by its own process).
        ttl_seconds: a sample unread for so long may be removed when space is needed.
        wait_seconds: longest pause at the budget before a sample is refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    transport: Transport
    verifier: str
    queue_samples: int = 8
    budget_bytes: int | None = None
    ttl_seconds: float = 3600.0
    wait_seconds: float = 0.0


def open_publisher(config: ProducerConfig, origin: Origin) -> Publisher:
    """Raises StoreError: the transport cannot be used."""
    store = open_store(config.transport, config.budget_bytes or 0)
    return Publisher(store, origin, Limits(config.budget_bytes, config.ttl_seconds, config.wait_seconds))
