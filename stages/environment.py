"""Environment variables of the libraries under Draftline. They read them when they are imported; each name and value stands here once."""

from __future__ import annotations

import os
from pathlib import Path

THREADS = {
    # How long PyTorch's OpenMP threads (GNU's runtime) spin while they wait for each other, in turns of a loop. Its default is 300,000.
    # Alone on two cores 5,000 is as fast; where anything else runs there, the default makes training 6 times and decoding 50 times slower,
    # because each thread waits spinning for one that has no core. (Measured; an engine that does not spin at all is half as slow again.)
    "GOMP_SPINCOUNT": "5000",
}
"""For every process that computes on a CPU."""

EAGER = {
    # What vLLM compiles even then (log-probabilities) would need a C++ compiler on the machine.
    "TORCH_COMPILE_DISABLE": "1",
}
"""For engines that run eagerly on a CPU."""

LOCAL = {"HF_HUB_OFFLINE": "1"}
"""For engines whose models are local directories."""

ENGINE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
"""For every engine."""

STEPPED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""For engines that we step ourselves: they work in no other way."""

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""For engines whose log nobody keeps."""


def engine_environment(model: str) -> dict[str, str]:
    """What vLLM should find when we step it ourselves with `model`."""
    return ENGINE | EAGER | QUIET | STEPPED | (LOCAL if Path(model).is_dir() else {})


def prepare_environment(model: str) -> None:
    """Set that in this process; call before vLLM is imported. What the user has set stays, `STEPPED` excepted."""
    for name, value in engine_environment(model).items():
        os.environ.setdefault(name, value)
    os.environ.update(STEPPED)
