"""The few questions that serving asks vLLM's OpenAI server."""

from __future__ import annotations

import http.client
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.servers import ServerError, get


def base_url(plan: Mapping[str, Any]) -> str:
    """Where a client on this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(plan["host"], plan["host"])
    return f"http://[{host}]:{plan['port']}" if ":" in host else f"http://{host}:{plan['port']}"


def require_free_port(plan: Mapping[str, Any]) -> None:
    """Raises ServerError if something listens on the plan's port already."""
    family = socket.AF_INET6 if ":" in plan["host"] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((plan["host"], plan["port"]))
        except OSError as error:
            raise ServerError(f"params.yaml: deploy.host = {plan['host']!r}, deploy.port = {plan['port']}: {error.strerror or error}") from None


def ask(url: str, model: str, question: str, max_tokens: int, seconds: float = 300.0, **options: Any) -> dict[str, Any]:
    """Ask one greedy question; returns the whole response.

    Args:
        options: further keys of the request's body.
    Raises:
        ServerError: it was refused, or nothing answered.
    """
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0, **options}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}/v1/chat/completions: HTTP {error.code}: {' '.join(error.read().decode('utf-8', 'replace').split())[:300]}") from None
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise ServerError(f"{url}/v1/chat/completions: {error}") from None
    return answer


def chat(url: str, model: str, question: str, max_tokens: int, seconds: float = 300.0) -> tuple[str, int]:
    """Ask one greedy question; returns the answer and its number of tokens."""
    answer = ask(url, model, question, max_tokens, seconds)
    return str(answer["choices"][0]["message"]["content"]), int(answer["usage"]["completion_tokens"])


@dataclass(frozen=True)
class Acceptance:
    """The engine's own counters since its start.

    Attributes:
        drafts: draft blocks verified; drafted, accepted: tokens in them.
        per_position: `[K]`, accepted tokens at each position.
    """

    drafts: int
    drafted: int
    accepted: int
    per_position: list[int]

    def __str__(self) -> str:
        if not self.drafts:
            return "no draft was verified"
        rates = " ".join(f"{count / self.drafts:.2f}" for count in self.per_position)
        length = 1 + self.accepted / self.drafts
        return f"acceptance length {length:.2f} ({self.drafts} drafts, {self.accepted} of {self.drafted} drafted tokens accepted; per position {rates})"


def acceptance(url: str) -> Acceptance:
    """Read the counters of speculative decoding from the server's /metrics."""
    counters: dict[str, float] = {}
    positions: dict[int, float] = {}
    try:
        text = get(f"{url}/metrics", 10.0)
    except OSError as error:
        raise ServerError(f"{url}/metrics: {error}") from None
    for line in text.splitlines():
        match = re.match(r"vllm:spec_decode_(num_\w+?)(?:_total)?\{(.*)\} (\S+)$", line)
        if match is None:
            continue
        position = re.search(r'position="(\d+)"', match[2])
        if position and match[1] == "num_accepted_tokens_per_pos":
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + float(match[3])
        else:
            counters[match[1]] = counters.get(match[1], 0.0) + float(match[3])
    return Acceptance(
        drafts=int(counters.get("num_drafts", 0)),
        drafted=int(counters.get("num_draft_tokens", 0)),
        accepted=int(counters.get("num_accepted_tokens", 0)),
        per_position=[int(positions[position]) for position in sorted(positions)],
    )
