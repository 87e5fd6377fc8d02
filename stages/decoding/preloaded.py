"""What the processes of engines have imported when they begin: named to the fork server by `isolated`, imported nowhere else.

Importing vLLM takes ten times as long as all else that the start of a small engine does (measured: 5.4 s against 0.5 s).
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import warnings
from importlib import import_module

# Ctrl-C reaches the whole terminal group; the caller decides what it means for engines.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# Libraries' own deprecations: nothing that a user of the pipeline can act on.
warnings.simplefilter("ignore", FutureWarning)
warnings.simplefilter("ignore", DeprecationWarning)

gc.disable()
for _module in ("vllm.engine.arg_utils", "vllm.v1.engine.llm_engine", "vllm.sampling_params", "vllm.v1.executor.uniproc_executor"):
    import_module(_module)
if import_module("vllm.platforms").current_platform.is_cpu():
    import_module("vllm.v1.worker.cpu_worker")
# What is imported stays: collections in the engines need not look through it, nor copy its pages.
gc.freeze()
# Not an orderly end: there is nothing to save, and bindings complain about objects that are left.
atexit.register(os._exit, 0)
