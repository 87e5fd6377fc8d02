"""Samples as training needs them: asked of an engine ahead of need, read from the store by key, handed over in order.

    stream = Stream(...)
    stream.expect(["a", "b", "a"])          the order in which they will be read
    stream.read("a", tokens) ...            blocks until it is there; never for ever

What can go wrong with one attempt, and what comes of it:

- refused, torn, lost, with other tokens: asked again, `ATTEMPTS` times altogether; then the sample is left out and counted;
- a server or the store does not answer, the store is full: asked again, with growing pauses. If nothing comes for
  `give_up_seconds`, this sample or another, the run stops. A sample that fails alone, for as long and `ATTEMPTS` times while
  others come, is left out and counted;
- a sample of another verifier, layers or dtype, a server that is none: the run stops at once.

More samples left out than the failure budget allows stop the run too. A new attempt always has a new key.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from stages.errors import DraftlineError
from stages.hidden_states.cache import SampleCache
from stages.hidden_states.engines import EngineError, Engines, UnavailableError
from stages.hidden_states.envelope import MANIFEST_BYTES, ForeignError, Producer, TornError, plan_origin
from stages.hidden_states.format import HiddenSample, Plan, UnusableSampleError, allowed_rejections, refusal
from stages.hidden_states.publisher import usable_bytes
from stages.hidden_states.receive import LateError, LostError, RefusedError, take
from stages.hidden_states.stores import Store, StoreError
from stages.hidden_states.threads import stay_aside

ATTEMPTS = 3
GRACE_SECONDS = 5.0
MIN_ATTEMPT_SECONDS = 0.5
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.1, 2.0


class StreamError(DraftlineError):
    """The stream has ended before its time; the message names the cause."""


@dataclass(frozen=True)
class Pace:
    """How far ahead samples are asked for.

    Attributes:
        ahead: samples asked for and not yet read by training.
        budget_bytes: bytes of the same.
        requests: requests in flight.
        timeout_seconds: longest wait for one attempt.
        ttl_seconds: after which a producer may remove an unread sample.
        turns: engine and training share the cores: all that is asked for is awaited before training goes on.
    """

    ahead: int
    budget_bytes: int
    requests: int
    timeout_seconds: float
    ttl_seconds: float
    turns: bool = False

    @property
    def give_up_seconds(self) -> float:
        return 1.5 * self.timeout_seconds + GRACE_SECONDS


@dataclass
class Ledger:
    """What was asked for and what became of it. `open` are the keys that were promised and are not settled yet."""

    promised: int = 0
    acknowledged: int = 0
    refused: int = 0
    torn: int = 0
    lost: int = 0
    late: int = 0
    retries: int = 0
    cached: int = 0
    open: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    producers: dict[str, Producer] = field(default_factory=dict)

    @property
    def evictions(self) -> int:
        """Unread samples that producers have removed, by their own count."""
        return sum(producer.evicted for producer in self.producers.values())

    def __str__(self) -> str:
        return (
            f"{self.promised} promised, {self.acknowledged} acknowledged, {self.refused} refused, {self.torn} torn, {self.lost} lost, {self.late} late, "
            f"{len(self.open)} not settled; {self.retries} retries, {self.evictions} evictions, {self.cached} read from the cache, "
            f"{len(self.skipped)} samples left out"
        )


@dataclass
class _Job:
    sample: str
    bytes: int
    future: Future[HiddenSample | str]


def sample_bytes(plan: Plan, tokens: int) -> int:
    """What one published sample takes of a budget, at most."""
    return tokens * (plan.token_bytes + 8) + MANIFEST_BYTES


class Stream:
    """See the module. Use it as a context manager. `read` is called from one thread."""

    def __init__(
        self,
        plan: Plan,
        tokens: Mapping[str, list[int]],
        store: Store,
        engines: Engines,
        pace: Pace,
        run: str | None = None,
        ended: Callable[[], str | None] = lambda: None,
        cache: SampleCache | None = None,
    ) -> None:
        """
        Args:
            tokens: id → token ids of every sample that can be asked for.
            run: name of this reader among others of the same store; None: a new one.
            ended: why the server or master that we started is no more; None while it runs.
        """
        self.plan = plan
        self.run = run or secrets.token_hex(8)
        self.ledger = Ledger()
        self._tokens = tokens
        self._store, self._engines, self._pace, self._ended, self._cache = store, engines, pace, ended, cache
        self._origin = plan_origin(plan)
        self._pool = ThreadPoolExecutor(max_workers=pace.requests, thread_name_prefix="draftline-stream", initializer=stay_aside)
        self._ahead: deque[str] = deque()
        self._jobs: deque[_Job] = deque()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._last_success = time.monotonic()
        self._store_fault: str | None = None
        self._bar: tqdm[Any] | None = None
        self._produced = self._consumed = 0
        self._waited = 0.0
        self._mark = (time.monotonic(), 0, 0, 0.0)

    @property
    def ids(self) -> list[str]:
        """Ids of the samples that can be asked for."""
        return list(self._tokens)

    def expect(self, samples: Iterable[str]) -> None:
        """Say which samples `read` will be called for, in order; asking starts with the first `read`."""
        self._ahead.extend(samples)
        self._bar = tqdm(total=len(self._ahead), desc="extract", unit="sample", mininterval=2.0, position=1, leave=False)

    @property
    def bytes_in_flight(self) -> int:
        """Asked for, and not yet read by training."""
        return sum(job.bytes for job in self._jobs)

    def read(self, sample: str, expected_token_ids: list[int] | None) -> HiddenSample:
        """The next sample, which must be `sample`.

        Returns:
            States `[T, L+1, H]` that the caller owns.
        Raises:
            UnusableSampleError: this one cannot be had; the next ones can.
            StreamError: nothing more will come.
        """
        started = time.monotonic()
        self._ask_ahead()
        job = self._jobs[0]
        assert job.sample == sample, f"{job.sample} is next, not {sample}"
        try:
            if self._pace.turns and not job.future.done():
                wait([other.future for other in self._jobs], timeout=self._pace.give_up_seconds + GRACE_SECONDS)
            result = self._wait(job.future)
        except UnavailableError as error:
            raise StreamError(
                f"no hidden states for {self._pace.give_up_seconds:.0f} s (extraction.timeout_seconds = {self._pace.timeout_seconds:g}): {error}"
            ) from error
        except DraftlineError as error:
            raise StreamError(f"the stream of hidden states ended: {error}") from error
        self._jobs.popleft()
        self._consumed += 1
        self._waited += time.monotonic() - started
        if isinstance(result, str):
            self._leave_out(sample, result)
            raise UnusableSampleError(f"sample {sample}: {result}")
        assert expected_token_ids is None or result.token_ids.tolist() == expected_token_ids
        return result

    def _wait(self, future: Future[HiddenSample | str]) -> HiddenSample | str:
        """What comes of a job. Every call to an engine or a store ends within seconds; this is for one that does not."""
        started, longest = time.monotonic(), self._pace.give_up_seconds + GRACE_SECONDS
        while (left := max(started, self._last_success) + longest - time.monotonic()) > 0:
            with suppress(TimeoutError):
                return future.result(timeout=left)
        raise UnavailableError("the store does not answer")

    def _leave_out(self, sample: str, reason: str) -> None:
        self.ledger.skipped[sample] = reason
        tqdm.write(f"extract: sample {sample} is left out: {reason}")
        allowed = allowed_rejections(len(self._tokens))
        if len(self.ledger.skipped) > allowed:
            raise StreamError(
                f"{len(self.ledger.skipped)} of {len(self._tokens)} samples gave no usable hidden states, at most {allowed} may; the last: {reason}"
            )

    def _ask_ahead(self) -> None:
        if self._pace.turns and self._jobs:
            return
        budget, used = usable_bytes(self._pace.budget_bytes), self.bytes_in_flight
        while self._ahead and len(self._jobs) < self._pace.ahead:
            size = sample_bytes(self.plan, len(self._tokens[self._ahead[0]]))
            if self._jobs and used + size > budget:
                return
            used += size
            sample = self._ahead.popleft()
            self._jobs.append(_Job(sample, size, self._pool.submit(self._obtain, sample)))

    def _obtain(self, sample: str) -> HiddenSample | str:
        """One sample, or why it cannot be used. Runs in the pool."""
        tokens = self._tokens[sample]
        found = self._cache.read(sample, tokens) if self._cache is not None else None
        if found is not None:
            with self._lock:
                self.ledger.cached += 1
            return self._done(found)
        started, bad, alone, pause = time.monotonic(), 0, 0, FIRST_PAUSE_SECONDS
        while True:
            url, began = self._engines.pick(), time.monotonic()
            try:
                got = self._attempt(url, sample, tokens, min(began + self._pace.timeout_seconds, self._stop_at(started)))
                with self._lock:
                    self._last_success, self._store_fault = time.monotonic(), None
                if self._cache is not None:
                    self._cache.write(got)
                return self._done(got)
            except (RefusedError, TornError, LostError) as error:
                cause: DraftlineError = error
                passing = isinstance(error, RefusedError) and error.again
                bad += not passing
            except (UnavailableError, StoreError, LateError) as error:
                cause, passing = error, True
                self._engines.suspect(url)
            if isinstance(cause, StoreError) or (passing and isinstance(cause, RefusedError)):
                self._store_fault = str(cause)
            alone += passing and self._last_success > began
            if bad == ATTEMPTS or (alone >= ATTEMPTS and time.monotonic() - started > self._pace.give_up_seconds):
                return f"{cause} ({bad + alone} attempts)"
            if (why := self._ended()) is not None:
                raise EngineError(why)
            rest = pause if passing else 0.0
            if self._closing.is_set() or time.monotonic() + rest > self._stop_at(started) - MIN_ATTEMPT_SECONDS:
                # An engine that cannot publish stops answering: what is said of the store is nearer to the cause.
                raise UnavailableError(self._store_fault or str(cause)) from cause
            with self._lock:
                self.ledger.retries += 1
            if passing:
                self._closing.wait(rest)
                pause = min(2 * pause, LAST_PAUSE_SECONDS)

    def _stop_at(self, started: float) -> float:
        """When a job that has tried since `started` finds that nothing comes any more."""
        return max(started, self._last_success) + self._pace.give_up_seconds

    def _attempt(self, url: str, sample: str, tokens: list[int], deadline: float) -> HiddenSample:
        key, place = self._engines.ask(url, tokens, self.run, max(deadline - time.monotonic(), MIN_ATTEMPT_SECONDS))
        with self._lock:
            self.ledger.promised += 1
            self.ledger.open.add(key)
        try:
            going = lambda: not self._closing.is_set() and self._ended() is None  # noqa: E731
            states, token_ids, manifest = take(self._store, key, self._origin, deadline - time.monotonic(), going)
        except (RefusedError, TornError, LostError, LateError) as error:
            with self._lock:
                self.ledger.refused += isinstance(error, RefusedError)
                self.ledger.torn += isinstance(error, TornError)
                self.ledger.lost += isinstance(error, LostError)
                self.ledger.late += isinstance(error, LateError)
                self.ledger.open.discard(key)
            if isinstance(error, LateError):
                raise LateError(f"{error} ({url} publishes to {place})") from None
            raise
        except ForeignError as error:
            raise ForeignError(f"{url}: {error}") from None
        with self._lock:
            self.ledger.acknowledged += 1
            self.ledger.open.discard(key)
            self.ledger.producers[manifest.producer.name] = manifest.producer
        reason = refusal(sample, token_ids, states, tokens, self.plan)
        if reason is not None:
            raise TornError(reason)
        return HiddenSample(sample, token_ids, self.plan.tapped(states))

    def _done(self, sample: HiddenSample) -> HiddenSample:
        with self._lock:
            self._produced += 1
            if self._bar is not None:
                self._bar.update()
        return sample

    def check_step(self, seconds: float) -> None:
        """Raises StreamError if a step of training takes longer than an unread sample may live."""
        if seconds > self._pace.ttl_seconds:
            raise StreamError(
                f"params.yaml: extraction.ttl_seconds = {self._pace.ttl_seconds:g}: must be above the time of a training step, {seconds:.1f} s here; "
                "samples that wait for their step could be removed"
            )

    def metrics(self) -> dict[str, float]:
        """Since the last call (rates, wait fraction), and so far (the rest)."""
        now = time.monotonic()
        then, produced, consumed, waited = self._mark
        self._mark = (now, self._produced, self._consumed, self._waited)
        seconds = max(now - then, 1e-9)
        values = {
            "produced_per_second": (self._produced - produced) / seconds,
            "consumed_per_second": (self._consumed - consumed) / seconds,
            "bytes_in_flight": self.bytes_in_flight,
            "wait_fraction": (self._waited - waited) / seconds,
            "evictions": self.ledger.evictions,
            "retries": self.ledger.retries,
            "left_out": len(self.ledger.skipped),
            "cached": self.ledger.cached,
        }
        if self._bar is not None:
            consumed_rate, share = values["consumed_per_second"], values["wait_fraction"]
            self._bar.set_postfix_str(f"{consumed_rate:.1f} read/s, {values['bytes_in_flight'] / 1e6:.0f} MB ahead, training waits {share:.0%}")
        return {f"stream.{name}": float(value) for name, value in values.items()}

    def close(self) -> None:
        """End all requests, and give back what was published for this run and not read."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._engines.close()
        wait([job.future for job in self._jobs if not job.future.cancelled()], timeout=GRACE_SECONDS)
        with suppress(StoreError):  # its producer is gone, or frees them when they have expired
            self._store.remove_run(self.run)
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
