"""A cost table measured on real engines: every cell is there, means what it says, and the engine's own speculation switch was used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.artifacts import read_json
from stages.decoding.costs import this_machine
from stages.decoding.isolated import EngineProcess
from stages.decoding.measure_costs import interleaved, measure_costs, repeated, time_decoder, timing_life
from stages.decoding.speculative import ngram_config, spec_config
from tests.decoding.pairs import engine_config, requests, write_drafter


def test_every_cell_is_visited_as_often_and_the_order_turns() -> None:
    """A machine that gets slower while it is measured must not make the later cells look dearer."""
    visited: list[tuple[int, int | None]] = []

    def visit(batch: int, drafts: int | None) -> list[float]:
        visited.append((batch, drafts))
        return [1.0 + len(visited), 1.0]

    cells = interleaved(visit, [2, 1, 2], [3], visits=4)
    assert [(entry.requests, entry.draft_tokens) for entry in cells] == [(1, None), (1, 0), (1, 3), (2, None), (2, 0), (2, 3)]
    assert set(Counter(visited).values()) == {4}
    assert visited[:6] == visited[6:12][::-1]
    assert all(entry.rounds == 8 for entry in cells)


def test_prompts_have_one_length() -> None:
    taken = repeated([[1, 2, 3], [4]], 3, 5)
    assert taken == [[1, 2, 3, 1, 2], [4] * 5, [1, 2, 3, 1, 2]]


class Decoder:
    """What `time_decoder` asks of the decoding loop: rounds of four rows, of which one ends two rounds early."""

    def __init__(self) -> None:
        self.scheduler: Any = None
        self.seconds = SimpleNamespace(round_seconds=1.0, rounds=2)
        self.verified: list[list[int]] = []

    def decode(self, prompts: Sequence[Any], batch_size: int) -> None:
        for number in range(8):
            rows = batch_size - (number >= 6)
            if self.scheduler is not None:
                assert self.scheduler.limit(torch.full((rows,), 20), 5) == 5
                self.verified.append(self.scheduler.lengths(SimpleNamespace(available=torch.tensor([1] + [5] * (rows - 1)), confidence=None)).tolist())
            self.seconds.round_seconds += 0.5
            self.seconds.rounds += 1


def test_rounds_of_the_decoding_loop_are_timed_with_fixed_lengths_and_full_batches() -> None:
    decoder = Decoder()
    seconds = time_decoder(decoder, ["prompt"] * 4, 3)
    assert decoder.verified[0] == [1, 3, 3, 3]
    # Six beginnings with four rows are five rounds, of which the first two warm up.
    assert len(seconds) == 3
    decoder.scheduler = None
    assert time_decoder(decoder, ["prompt"] * 4, None) == [0.5]


@pytest.mark.integration
@pytest.mark.parametrize("drafter", ["dspark", "prompt lookup"])
def test_a_table_of_two_engines(drafter: str, tiny_verifier: Path, tmp_path: Path) -> None:
    """Prompt lookup finds next to nothing in these prompts: the rounds that are timed have their drafts all the same."""
    if drafter == "dspark":
        checkpoint = write_drafter(tmp_path / "checkpoint", tiny_verifier, "chain", block_size=5)
        speculative = spec_config(checkpoint, read_json(checkpoint / "config.json"))
    else:
        speculative = ngram_config(4, 1, 3)
    prompts = [request.prompt_ids for request in requests(2)]
    engine = engine_config(tiny_verifier)
    table = measure_costs(engine, speculative, prompts, batch_sizes=[1, 3], draft_tokens=[2, 4], verifier="a" * 64, checkpoint="b" * 64, visits=2, context=16)
    assert (table.requests, table.draft_tokens, table.context, table.dtype) == ([1, 3], [0, 2, 4], 16, "float32")
    assert table.machine == this_machine("vllm")
    seconds = {(entry.requests, entry.draft_tokens): entry.seconds for entry in table.cells}
    assert seconds.keys() == {(batch, drafts) for batch in (1, 3) for drafts in (None, 0, 2, 4)}
    assert min(seconds.values()) > 0.0
    table.require(this_machine("vllm"), "a" * 64, "b" * 64, "float32")


@pytest.mark.integration
def test_an_engine_goes_on_after_it_was_timed(tiny_verifier: Path) -> None:
    with EngineProcess(engine_config(tiny_verifier), None, timing_life) as process:
        assert len(process.ask(([[5] * 16], None, 3))) == 3
        assert len(process.ask(([[5] * 16, [6] * 16], None, 4))) == 4
