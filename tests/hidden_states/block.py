"""A producer that publishes samples, then holds its Python still: nothing in the process runs but Mooncake's own threads.

python -m tests.hidden_states.block MASTER SAMPLES TOKENS SECONDS
"""

from __future__ import annotations

import ctypes
import sys

import torch

from stages.hidden_states.envelope import make_key
from stages.hidden_states.mooncake import MooncakeStore
from tests.hidden_states.samples import make_publisher

HIDDEN = 512


def main(master: str, samples: int, tokens: int, seconds: int) -> None:
    publisher = make_publisher(MooncakeStore(master, segment_bytes=1 << 27), budget_bytes=1 << 27)
    for index in range(samples):
        publisher.put(make_key("block", str(index)), torch.full((tokens, 2, HIDDEN), float(index)), torch.full((tokens,), index))
    print("published", flush=True)
    ctypes.PyDLL(None).sleep(seconds)  # PyDLL: without letting the interpreter go
    print("awake", flush=True)
    sys.stdin.read()
    publisher.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
