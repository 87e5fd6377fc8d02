"""The client of extracting servers: ask one for a sample, get the key under which it will be published."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

from stages.errors import DraftlineError
from stages.hidden_states.receive import RefusedError, check_key

CONNECT_SECONDS = 3.0
SUSPECT_SECONDS = 5.0
"""A server that has just failed is asked last for so long."""
HANDLE = "hidden_states"


class EngineError(DraftlineError):
    """A server cannot serve this run, now or later."""


class UnavailableError(DraftlineError):
    """A server does not answer, or answers that it failed; it may answer later."""


def _cause(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Engines:
    """Thread-safe: one pool of connections for all servers."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # trust_env off: a proxy meant for the internet must not see, or break, what goes to an engine.
        self._client = httpx.Client(limits=limits, trust_env=False)
        self._models: dict[str, str] = {}
        self._failed: dict[str, float] = {}
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def connect(self, tokens: int) -> list[str]:
        """Look at every server once.

        Args:
            tokens: the longest sample.
        Returns:
            What is wrong with servers that are left out for now.
        Raises:
            EngineError: none answers, or one cannot take the longest sample.
        """
        absent = []
        for url in self.urls:
            try:
                model = self._model(url)
            except UnavailableError as error:
                absent.append(str(error))
                continue
            longest = model.get("max_model_len")
            if longest is not None and longest < tokens + 1:
                raise EngineError(f"{url}: serves at most {longest} tokens; the longest sample has {tokens}, and one is decoded after it")
        if len(absent) == len(self.urls):
            raise EngineError("; ".join(absent))
        return absent

    def _model(self, url: str) -> dict[str, Any]:
        try:
            answer = self._client.get(f"{url}/v1/models", timeout=httpx.Timeout(CONNECT_SECONDS))
            if answer.status_code != 200:
                raise UnavailableError(f"extraction.servers: {url}/v1/models: HTTP {answer.status_code}: not the answer of a vLLM server")
            model: dict[str, Any] = answer.json()["data"][0]
            self._models[url] = str(model["id"])
            return model
        except httpx.HTTPError as error:
            raise UnavailableError(f"extraction.servers: {url} does not answer: {_cause(error)}") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise UnavailableError(f"extraction.servers: {url}/v1/models: not the answer of a vLLM server") from None

    def pick(self) -> str:
        """The next server in turn; those that failed lately come last."""
        with self._lock:
            first = next(self._turn)
            order = [self.urls[(first + offset) % len(self.urls)] for offset in range(len(self.urls))]
            now = time.monotonic()
            return min(order, key=lambda url: now - self._failed.get(url, -SUSPECT_SECONDS) < SUSPECT_SECONDS)

    def suspect(self, url: str) -> None:
        """Remember that `url` has failed."""
        self._failed[url] = time.monotonic()

    def ask(self, url: str, token_ids: list[int], run: str, seconds: float) -> tuple[str, str]:
        """Have one sample prefilled.

        Args:
            run: the run that the sample's key starts with.
            seconds: longest wait for the answer.
        Returns:
            Its key, and where the server publishes it.
        Raises:
            UnavailableError: no answer, or a server error.
            RefusedError: the server will not prefill this sample.
            EngineError: the server is not an extracting one, or lets us not in.
        """
        if url not in self._models:
            self._model(url)
        body = {
            "model": self._models[url],
            "prompt": [token_ids],
            "max_tokens": 1,
            "temperature": 0.0,
            "kv_transfer_params": {HANDLE: {"run": run}},
        }
        try:
            answer = self._client.post(f"{url}/v1/completions", json=body, timeout=httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS)))
        except httpx.TimeoutException as error:
            raise UnavailableError(f"{url} did not answer within {seconds:.0f} s ({type(error).__name__})") from None
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
            raise UnavailableError(f"{url} does not answer: {_cause(error)}") from None
        text = " ".join(answer.text.split())[:300]
        if answer.status_code in (401, 403, 404):
            raise EngineError(f"{url}/v1/completions: HTTP {answer.status_code}: {text}")
        if 400 <= answer.status_code < 500 and answer.status_code not in (408, 425, 429):
            raise RefusedError(f"{url} refuses the sample: HTTP {answer.status_code}: {text}")
        if answer.status_code != 200:
            raise UnavailableError(f"{url}/v1/completions: HTTP {answer.status_code}: {text}")
        try:
            handle = (answer.json().get("kv_transfer_params") or {}).get(HANDLE)
        except (ValueError, AttributeError):
            raise UnavailableError(f"{url}/v1/completions: not the answer of a vLLM server") from None
        if not isinstance(handle, dict):
            raise EngineError(f"{url}: gives no hidden states away; start it with `python -m stages.extract.serve`")
        return check_key(handle.get("key")), str(handle.get("location"))

    def close(self) -> None:
        self._client.close()
