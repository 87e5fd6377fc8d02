"""A receiver for MLflow's webhooks: a registry that others write to tells of what is new at once, not with the next schedule.

    python -m flows.webhook serve --port 8900                                  # listens on 127.0.0.1
    python -m flows.webhook register --url https://draftline.example/mlflow    # has MLflow deliver there, and tries it

`DRAFTLINE_WEBHOOK_SECRET` is shared with MLflow and signs each delivery. A delivery only says *look again*: it becomes the event that
`watch-verifier` and `serve` wait for, and they read the registry. Nothing that it claims is believed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flows.context import registry, require_free_port
from flows.errors import FlowError
from flows.verifiers import announce
from stages.errors import DraftlineError
from stages.tracking import tracking_errors

if TYPE_CHECKING:
    from starlette.applications import Starlette

SECRET = "DRAFTLINE_WEBHOOK_SECRET"
SHORTEST_SECRET = 16
PATH = "/mlflow"
NAME = "draftline"
"""Of the webhook in MLflow: registered again, it is changed, not doubled."""
EVENTS = ("model_version.created", "model_version_alias.created", "model_version_alias.deleted")
TOLERANCE_SECONDS = 300
"""How far the time of a delivery may be from ours, and how long its id is remembered."""
LARGEST_BODY = 1 << 20
MODEL = re.compile(r"(?:verifier|drafter)\.([a-z0-9][a-z0-9._-]*)")
PREFIX = "X-MLflow-"

logger = logging.getLogger("draftline.webhook")


class DeliveryError(DraftlineError):
    """A delivery that is not MLflow's, or is not one; `status`: the answer's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def secret() -> str:
    """The secret shared with MLflow. Raises FlowError: there is none, or it can be guessed."""
    value = os.environ.get(SECRET, "")
    if len(value) < SHORTEST_SECRET:
        raise FlowError(
            f"{SECRET}: {'not set' if not value else 'too short'}; set it to {SHORTEST_SECRET} characters or more, the same here and for `register`"
        )
    return value


def signature(key: str, delivery: str, timestamp: str, body: bytes) -> str:
    """What MLflow signs a delivery with (mlflow/webhooks/delivery.py)."""
    digest = hmac.new(key.encode(), f"{delivery}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def verify(key: str, headers: Mapping[str, str], body: bytes, now: float) -> str:
    """Is this a delivery of MLflow's, made just now? Its id.

    Raises:
        DeliveryError: it is not.
    """
    delivery, timestamp, signed = (headers.get(PREFIX + name, "") for name in ("Delivery-Id", "Timestamp", "Signature"))
    if not signed or not delivery or not (timestamp.isascii() and timestamp.isdigit()):
        raise DeliveryError(401, f"not signed: {PREFIX}Signature, {PREFIX}Delivery-Id and {PREFIX}Timestamp (seconds) are needed")
    if not hmac.compare_digest(signature(key, delivery, timestamp, body).encode(), signed.encode()):
        raise DeliveryError(401, f"the signature is not ours (is {SECRET} the same there and here?)")
    age = now - int(timestamp)
    if abs(age) > TOLERANCE_SECONDS:
        raise DeliveryError(401, f"signed {age:.0f} s ago, {TOLERANCE_SECONDS} are allowed (replayed, or a clock is wrong)")
    return delivery


def about(body: bytes) -> str | None:
    """The verifier that a delivery is about; None: no model of ours.

    Raises:
        DeliveryError: not a delivery's body.
    """
    try:
        name = json.loads(body)["data"]["name"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DeliveryError(400, "the body is no delivery of MLflow's: expected JSON with data.name") from None
    found = MODEL.fullmatch(name) if isinstance(name, str) else None
    return found[1] if found else None


class Receiver:
    """Deliveries, one after the other; each is told once, however often MLflow sends it."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._told: dict[str, float] = {}

    def receive(self, headers: Mapping[str, str], body: bytes) -> str:
        """What was done about a delivery.

        Raises:
            DeliveryError: it is refused.
            FlowError: Prefect does not answer; MLflow tries again.
        """
        now = time.time()
        delivery = verify(self._key, headers, body, now)
        self._told = {known: when for known, when in self._told.items() if now - when <= 2 * TOLERANCE_SECONDS}
        if delivery in self._told:
            return f"delivery {delivery} again: told already"
        name = about(body)
        if name is None:
            return "not about a verifier or a drafter"
        why = announce(name, {"told_by": "mlflow"})
        self._told[delivery] = now
        return f"{name}: told Prefect{f', but flows do not run: {why}' if why is not None else ''}"


def application(key: str) -> Starlette:
    """The receiver as a web application: POST to `PATH`."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    receiver = Receiver(key)

    async def mlflow(request: Request) -> PlainTextResponse:
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > LARGEST_BODY:
                    raise DeliveryError(413, f"more than {LARGEST_BODY} bytes")
            status, text = 200, await run_in_threadpool(receiver.receive, request.headers, bytes(body))
        except DeliveryError as error:
            status, text = error.status, f"refused: {error}"
        except FlowError as error:
            # MLflow tries again some seconds later, up to three times.
            status, text = 503, str(error)
        logger.log(logging.INFO if status == 200 else logging.WARNING, "%d %s", status, text)
        # Who is refused learns nothing of why.
        return PlainTextResponse("ok\n" if status == 200 else "refused\n", status)

    return Starlette(routes=[Route(PATH, mlflow, methods=["POST"])])


def register(url: str) -> str:
    """Have MLflow deliver to `url`, and a test delivery made; what came of it.

    Raises:
        FlowError: MLflow delivered and was not answered well; the webhook is registered all the same.
        TrackingError: MLflow refuses.
    """
    known = registry()
    with tracking_errors(known.uri):
        hooks = [hook for hook in known.client.list_webhooks(max_results=100) if hook.name == NAME]
        values = {"name": NAME, "url": url, "events": list(EVENTS), "secret": secret(), "status": "ACTIVE"}
        hook = known.client.update_webhook(hooks[0].webhook_id, **values) if hooks else known.client.create_webhook(**values)
        result = known.client.test_webhook(hook.webhook_id)
    if not result.success:
        said = result.error_message or f"HTTP {result.response_status}"
        raise FlowError(f"webhook {NAME} is registered, but a test delivery to {url} failed: {' '.join(said.split())}")
    return f"webhook {NAME}: MLflow delivers {', '.join(EVENTS)} to {url}; a test delivery was accepted"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.webhook", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="receive deliveries")
    serving.add_argument("--host", default="127.0.0.1")
    serving.add_argument("--port", type=int, default=8900)
    registering = commands.add_parser("register", help="have MLflow deliver")
    registering.add_argument("--url", required=True, help=f"where MLflow reaches the receiver; its path is {PATH}")
    options = parser.parse_args(argv)
    try:
        if options.command == "register":
            print(register(options.url))
            return 0
        import uvicorn

        logging.basicConfig(level=logging.INFO, format="%(asctime)s draftline webhook: %(message)s", stream=sys.stderr)
        for name in ("httpx", "prefect"):
            logging.getLogger(name).setLevel(logging.WARNING)
        served = application(secret())
        require_free_port(options.host, options.port, "--port")
        uvicorn.run(served, host=options.host, port=options.port, log_level="warning", access_log=False)
    except DraftlineError as error:
        print(f"draftline webhook: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
