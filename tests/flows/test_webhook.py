"""What the webhook receiver lets in: its real process, asked over HTTP. (`test_doors` has MLflow deliver.)"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from flows.webhook import LARGEST_BODY, PATH, SECRET, TOLERANCE_SECONDS, signature
from stages.servers import free_port, start, stop

KEY = "a secret of sixteen characters or more"
BODY = b'{"entity": "model_version", "action": "created", "data": {"name": "%s", "version": "1"}}'
OURS = BODY % b"verifier.tiny"
OTHERS = BODY % b"somebody-elses-model"

Headers = dict[str, str]


class Receiving:
    """A receiver whose Prefect does not answer: what gets as far as being told is seen by its status, 503."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.url = f"http://127.0.0.1:{free_port()}{PATH}"
        environment = {SECRET: KEY, "PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api", "PREFECT_HOME": str(folder)}
        port = self.url.rpartition(":")[2].partition("/")[0]
        self.process = start([sys.executable, "-m", "flows.webhook", "serve", "--port", port], environment, self.log)
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(self.url, timeout=5)
                return
            except httpx.HTTPError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.1)

    def deliver(self, body: bytes, headers: Headers) -> tuple[int, str]:
        """Status of the answer, and what was logged meanwhile."""
        before = len(self.log.read_text())
        answer = httpx.post(self.url, content=body, headers=headers, timeout=60)
        assert answer.text in ("ok\n", "refused\n"), "who is refused learns nothing"
        return answer.status_code, self.log.read_text()[before:]


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    found = Receiving(tmp_path_factory.mktemp("receiver"))
    try:
        yield found
    finally:
        stop(found.process)


def signed(body: bytes, delivery: str = "one", key: str = KEY, ago: float = 0.0) -> Headers:
    timestamp = str(int(time.time() - ago))
    return {"X-MLflow-Delivery-Id": delivery, "X-MLflow-Timestamp": timestamp, "X-MLflow-Signature": signature(key, delivery, timestamp, body)}


def without(name: str) -> Headers:
    return {key: value for key, value in signed(OURS).items() if not key.endswith(name)}


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        (OURS, dict, 401, "not signed"),
        (OURS, lambda: without("Signature"), 401, "not signed"),
        (OURS, lambda: without("Delivery-Id"), 401, "not signed"),
        (OURS, lambda: without("Timestamp"), 401, "not signed"),
        (OURS, lambda: signed(OURS) | {"X-MLflow-Timestamp": "soon"}, 401, "not signed"),
        (OURS, lambda: signed(OURS, key="another secret, just as long as ours"), 401, "the signature is not ours"),
        (OURS, lambda: signed(OURS) | {"X-MLflow-Signature": "v1,\xff"}, 401, "the signature is not ours"),
        (OURS, lambda: signed(OTHERS), 401, "the signature is not ours"),
        (OURS, lambda: signed(OURS) | {"X-MLflow-Delivery-Id": "two"}, 401, "the signature is not ours"),
        (OURS, lambda: signed(OURS) | {"X-MLflow-Timestamp": str(int(time.time()) + 1)}, 401, "the signature is not ours"),
        (OURS, lambda: signed(OURS, ago=TOLERANCE_SECONDS + 60), 401, "300 are allowed"),
        (OURS, lambda: signed(OURS, ago=-TOLERANCE_SECONDS - 60), 401, "300 are allowed"),
        (b"\xff\xfe garbage", lambda: signed(b"\xff\xfe garbage"), 400, "no delivery of MLflow's"),
        (b"[]", lambda: signed(b"[]"), 400, "no delivery of MLflow's"),
        (b"[" * 100_000, lambda: signed(b"[" * 100_000), 400, "no delivery of MLflow's"),
        (b"{}" * LARGEST_BODY, lambda: signed(b"{}" * LARGEST_BODY), 413, "more than 1048576 bytes"),
        (OTHERS, lambda: signed(OTHERS), 200, "not about a verifier or a drafter"),
        (BODY % b"verifier.../x", lambda: signed(BODY % b"verifier.../x"), 200, "not about a verifier or a drafter"),
        (OURS, lambda: signed(OURS), 503, "Prefect does not answer"),
    ],
    ids=[
        *("bare", "no signature", "no id", "no time", "time in words", "another secret", "no text", "another body", "another id", "another time"),
        *("old", "from the future", "no text in it", "another JSON", "deep JSON", "huge", "another model", "a name that is a path", "Prefect away"),
    ],
)
def test_what_is_let_in(receiver: Receiving, body: bytes, headers: Callable[[], Headers], status: int, says: str) -> None:
    encoded = {key: value.encode("latin-1") for key, value in headers().items()}
    answered, logged = receiver.deliver(body, encoded)  # type: ignore[arg-type]
    assert answered == status, logged
    assert logged.count("\n") == 1, logged
    assert says in logged
    assert KEY not in receiver.log.read_text()


def test_a_get_is_none(receiver: Receiving) -> None:
    assert httpx.get(receiver.url, timeout=10).status_code == 405


@pytest.mark.parametrize(("value", "says"), [(None, "not set"), ("short", "too short")])
def test_without_a_secret_nothing_is_received(value: str | None, says: str) -> None:
    environment = {name: text for name, text in os.environ.items() if name != SECRET} | ({SECRET: value} if value is not None else {})
    words = [sys.executable, "-m", "flows.webhook", "serve", "--port", str(free_port())]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"draftline webhook: {SECRET}: {says}")
    assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [sys.executable, "-m", "flows.webhook", "serve", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(words, env=os.environ | {SECRET: KEY}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Address already in use; set --port" in done.stderr
