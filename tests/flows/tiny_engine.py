"""A small process where vLLM stands: answers what its files say, in a moment. A drafter's `behaviour.json` can make it wrong, never ready, or end.

python tests/flows/tiny_engine.py --model DIRECTORY --name NAME --port PORT [--speculative-config JSON]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 0.02
PIECES = 4

options = argparse.ArgumentParser()
options.add_argument("--model", type=Path, required=True)
options.add_argument("--name", required=True)
options.add_argument("--port", type=int, required=True)
options.add_argument("--speculative-config", type=json.loads, default=None)
given = options.parse_args()

drafter = Path(given.speculative_config["model"]) if given.speculative_config else None
behaviour: dict[str, Any] = json.loads((drafter / "behaviour.json").read_text()) if drafter and (drafter / "behaviour.json").is_file() else {}
if behaviour.get("dies"):
    raise SystemExit("it cannot load its drafter")
verifier = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(given.model.iterdir()) if path.is_file())).hexdigest()
fingerprint = f"{given.model.name}/{drafter.name if drafter else 'alone'}"
busy = 0
counting = threading.Lock()


def words(prompt: str) -> list[str]:
    """The greedy answer to a prompt, a token each."""
    digest = hashlib.sha256(f"{verifier}{prompt}{behaviour.get('differs', '')}".encode()).hexdigest()
    return [f"{digest[at : at + 4]} " for at in range(0, 4 * PIECES, 4)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *values: object) -> None:
        pass

    def reply(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(503 if behaviour.get("sick") else 200, b"")
        elif self.path == "/v1/models":
            self.reply(200, json.dumps({"data": [{"id": given.name}]}).encode())
        else:
            text = f'vllm:num_requests_running{{engine="0"}} {float(busy)}\nvllm:num_requests_waiting{{engine="0"}} 0.0\n'
            self.reply(200, text.encode(), "text/plain")

    def do_POST(self) -> None:
        global busy
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with counting:
            busy += 1
        try:
            self.answer(body, words(body["messages"][-1]["content"]))
        finally:
            with counting:
                busy -= 1

    def answer(self, body: dict[str, Any], tokens: list[str]) -> None:
        if body.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for token in tokens:
                time.sleep(ANSWER_SECONDS / PIECES)
                self.event(json.dumps({"choices": [{"delta": {"content": token}}], "system_fingerprint": fingerprint}))
            self.event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
            return
        time.sleep(body.get("seconds", ANSWER_SECONDS))
        choice: dict[str, Any] = {"message": {"content": "".join(tokens)}}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": token, "top_logprobs": [{"token": token, "logprob": -0.1}]} for token in tokens]}
        self.reply(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": len(tokens)}, "system_fingerprint": fingerprint}).encode())

    def event(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    request_queue_size = 128


Server(("127.0.0.1", given.port), Handler).serve_forever()
