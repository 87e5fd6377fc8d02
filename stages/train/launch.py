"""Starts the ranks of a training on this node, through torch's elastic launcher, and says which one has failed and why.

Several nodes: `torchrun --nnodes … --nproc-per-node … -m stages.train` on each, with one `outputs/` that all of them see.
"""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any, cast

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tqdm import tqdm

from stages.errors import DraftlineError
from stages.params import Params, StageParams, read_params
from stages.process import OUTPUTS, die_with_parent, explained
from stages.train.ranks import KEPT

SHUTDOWN_SECONDS = 10
"""What the other ranks get to end by themselves once one has failed."""


def launch(ranks: int) -> None:
    """Train in `ranks` processes and wait for them; if one fails, all end.

    Raises:
        DraftlineError: a rank has failed; the first one and its cause.
    """
    with TemporaryDirectory(prefix="draftline-ranks-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            max_restarts=0,
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        # The launcher logs a page about each failure; what is in it is said below in one line.
        logging.disable(logging.ERROR)
        try:
            elastic_launch(config, train_as_rank)()
        except ChildFailedError as error:
            raise DraftlineError(cause(*error.get_first_failure())) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        finally:
            logging.disable(logging.NOTSET)


def train_as_rank() -> None:
    """One rank of `launch`, in a process of its own: errors go to the launching process, which reports them."""
    # Here, for it imports this module.
    from stages.train.__main__ import run

    die_with_parent()
    # One among processes would be left behind by a rank that is killed, and warned about.
    tqdm.set_lock(RLock())
    try:
        run(cast(Params, StageParams(read_params(), "train")), OUTPUTS / "train")
    except KeyboardInterrupt:
        # Ctrl-C reaches all processes of a terminal; the launching one says so.
        raise SystemExit(128 + signal.SIGINT) from None
    except DraftlineError as error:
        raise DraftlineError(str(error)) from None
    except Exception as error:
        if (text := explained(error)) is not None:
            raise DraftlineError(text) from None
        raise


def cause(rank: int, failure: ProcessFailure) -> str:
    """Which rank has failed and why, in one line; the traceback of an error that is ours is printed before it."""
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}; {KEPT}"
    content: Any = failure.message
    if isinstance(content, str):
        return f"rank {rank} ended with status {failure.exitcode}; {KEPT}"
    text = str(content["message"])
    user = f"{DraftlineError.__name__}: "
    if text.startswith(user):
        return text.removeprefix(user)
    print(content["extraInfo"]["py_callstack"], file=sys.stderr)
    return f"rank {rank}: {' '.join(text.split())}; {KEPT}"
