"""What a server can answer, and how it can fail to: each with its own error, in one line, in time."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stages.hidden_states import engines as engines_module
from stages.hidden_states.engines import EngineError, Engines, UnavailableError
from stages.hidden_states.envelope import make_key
from stages.hidden_states.receive import RefusedError
from stages.servers import free_port

KEY = make_key("run", "1")
MODELS = {"data": [{"id": "verifier", "max_model_len": 100}]}
GOOD = {"kv_transfer_params": {"hidden_states": {"key": KEY, "tokens": 3, "location": "file:/dev/shm/x"}}}


class Server:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.models: tuple[int, Any] = (200, MODELS)
        self.answer: tuple[int, Any] = (200, GOOD)
        self.seconds = 0.0
        self.hangs_up = False
        self.asked: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def reply(self, status: int, body: Any) -> None:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self.reply(*server.models if self.path == "/v1/models" else (404, {}))

            def do_POST(self) -> None:
                server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))) | {"path": self.path})
                time.sleep(server.seconds)
                self.reply(*server.answer)
                self.close_connection = server.hangs_up

            def log_message(self, *_: Any) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """May be called again."""
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def client() -> Iterator[Callable[..., Engines]]:
    """Makes the client of some servers."""
    made: list[Engines] = []

    def make(*urls: str) -> Engines:
        made.append(Engines(urls))
        return made[-1]

    yield make
    for engines in made:
        engines.close()


@pytest.fixture
def nobody() -> str:
    """An address at which nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


def one_line(error: BaseException) -> bool:
    return len(str(error).splitlines()) == 1


def test_a_sample_is_asked_for_by_its_tokens_and_run_and_its_key_comes_back(server: Server, client: Callable[..., Engines]) -> None:
    engines = client(server.url)
    assert engines.connect(99) == []
    assert engines.ask(server.url, [5, 6, 7], "run", 5) == (KEY, "file:/dev/shm/x")
    (asked,) = server.asked
    assert asked["path"] == "/v1/completions"
    assert asked["prompt"] == [[5, 6, 7]]
    assert (asked["model"], asked["max_tokens"]) == ("verifier", 1)
    assert asked["kv_transfer_params"] == {"hidden_states": {"run": "run"}}


@pytest.mark.parametrize(
    ("status", "body", "expected", "message"),
    [
        (500, {"error": "out of\nmemory"}, UnavailableError, r'/v1/completions: HTTP 500: \{"error": "out of\\nmemory"\}'),
        (503, b"a\n\nb", UnavailableError, "HTTP 503: a b"),
        (429, {}, UnavailableError, "HTTP 429"),
        (408, {}, UnavailableError, "HTTP 408"),
        (302, {}, UnavailableError, "HTTP 302"),
        (400, {"message": "prompt too long"}, RefusedError, "refuses the sample: HTTP 400: .*prompt too long"),
        (422, {}, RefusedError, "refuses the sample: HTTP 422"),
        (404, {"message": "no such model"}, EngineError, "HTTP 404: .*no such model"),
        (401, {}, EngineError, "HTTP 401"),
        (403, {}, EngineError, "HTTP 403"),
        (200, b"<html>", UnavailableError, "not the answer of a vLLM server"),
        (200, b"\xff\xfe", UnavailableError, "not the answer of a vLLM server"),
        (200, [], UnavailableError, "not the answer of a vLLM server"),
        (200, {"kv_transfer_params": "x"}, UnavailableError, "not the answer of a vLLM server"),
        (200, {}, EngineError, "gives no hidden states away; start it with `python -m stages.extract.serve`"),
        (200, {"kv_transfer_params": None}, EngineError, "gives no hidden states away"),
        (200, {"kv_transfer_params": {"hidden_states": None}}, EngineError, "gives no hidden states away"),
        (200, {"kv_transfer_params": {"hidden_states": {"key": "../../etc/passwd"}}}, RefusedError, "'../../etc/passwd', which is no key"),
        (200, {"kv_transfer_params": {"hidden_states": {}}}, RefusedError, "None, which is no key"),
    ],
)
def test_each_answer_has_its_error_in_one_line(
    server: Server, client: Callable[..., Engines], status: int, body: Any, expected: type[Exception], message: str
) -> None:
    server.answer = (status, body)
    with pytest.raises(expected, match=message) as failed:
        client(server.url).ask(server.url, [1], "run", 5)
    assert type(failed.value) is expected
    assert one_line(failed.value)
    assert (expected is RefusedError and "key" in message) or server.url in str(failed.value)


def test_a_long_answer_is_not_repeated_in_full(server: Server, client: Callable[..., Engines]) -> None:
    server.answer = (500, b"x" * 100_000)
    with pytest.raises(UnavailableError) as failed:
        client(server.url).ask(server.url, [1], "run", 5)
    assert len(str(failed.value)) < 500


def test_a_server_that_does_not_answer_in_time_is_unavailable(server: Server, client: Callable[..., Engines]) -> None:
    server.seconds = 2.0
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=rf"{server.url} did not answer within 0 s \(ReadTimeout\)"):
        client(server.url).ask(server.url, [1], "run", 0.3)
    assert time.monotonic() - started < 1.5


def test_a_server_that_is_not_there_or_ends_is_unavailable(server: Server, client: Callable[..., Engines], nobody: str) -> None:
    engines = client(server.url, nobody)
    with pytest.raises(UnavailableError, match=rf"{nobody} does not answer: .*refused"):
        engines.ask(nobody, [1], "run", 5)
    server.hangs_up = True
    engines.ask(server.url, [1], "run", 5)
    server.close()
    with pytest.raises(UnavailableError, match=f"{server.url} does not answer"):
        engines.ask(server.url, [1], "run", 1)


def test_a_connection_that_breaks_in_the_middle_of_an_answer_is_unavailable(client: Callable[..., Engines]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UnavailableError, match=f"{url} does not answer") as failed:
            client(url).ask(url, [1], "run", 5)
        thread.join()
    assert one_line(failed.value)


def test_a_closed_client_asks_nobody(server: Server, client: Callable[..., Engines]) -> None:
    """The stream closes it while requests are on their way."""
    engines = client(server.url)
    engines.connect(1)
    engines.close()
    with pytest.raises(UnavailableError):
        engines.ask(server.url, [1], "run", 5)


def test_connecting_names_the_servers_that_are_absent_and_needs_one(server: Server, client: Callable[..., Engines], nobody: str) -> None:
    (absent,) = client(nobody, server.url).connect(10)
    assert absent.startswith(f"extraction.servers: {nobody} does not answer: ")
    with pytest.raises(EngineError, match=f"extraction.servers: {nobody} does not answer"):
        client(nobody).connect(10)


def test_a_server_that_is_too_short_for_the_longest_sample_is_refused(server: Server, client: Callable[..., Engines]) -> None:
    with pytest.raises(EngineError, match="serves at most 100 tokens; the longest sample has 100, and one is decoded after it"):
        client(server.url).connect(100)


@pytest.mark.parametrize("models", [(200, {}), (200, {"data": []}), (200, []), (200, b"<html>"), (200, {"data": [{}]}), (500, {}), (404, {})], ids=str)
def test_what_is_no_vllm_server_is_said_to_be_none(server: Server, client: Callable[..., Engines], models: tuple[int, Any]) -> None:
    server.models = models
    with pytest.raises(EngineError, match=rf"^extraction\.servers: {server.url}") as failed:
        client(server.url).connect(10)
    assert one_line(failed.value)
    assert str(failed.value).endswith("not the answer of a vLLM server")


def test_servers_are_asked_in_turn_and_suspects_last(client: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = client("http://a", "http://b", "http://c")
    assert sorted(engines.pick() for _ in range(3)) == ["http://a", "http://b", "http://c"]
    engines.suspect("http://b")
    picked = [engines.pick() for _ in range(30)]
    assert "http://b" not in picked
    assert {picked.count("http://a"), picked.count("http://c")} <= {10, 20}, "the others share its turns"
    for url in ("http://a", "http://c"):
        engines.suspect(url)
    assert {engines.pick() for _ in range(6)} == {"http://a", "http://b", "http://c"}, "where all are suspects each has its turn"
    monkeypatch.setattr(engines_module, "SUSPECT_SECONDS", 0.05)
    time.sleep(0.1)
    assert {engines.pick() for _ in range(3)} == {"http://a", "http://b", "http://c"}, "forgiven after a while"


def test_a_proxy_of_the_environment_is_not_asked(server: Server, client: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, nobody)
    assert client(server.url).ask(server.url, [1], "run", 5)[0] == KEY
