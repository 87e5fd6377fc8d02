"""An extracting server for modes online and hybrid: vLLM that gives the verifier's hidden states away, until Ctrl-C.

    python -m stages.extract.serve                                   on 127.0.0.1:8100
    python -m stages.extract.serve --host 0.0.0.0 --port 8101        for training on another node

Reads params.yaml (`extraction`, `engine`) and the materialised verifier. Samples go where `extraction.spool` or
`extraction.master` says; training finds the server by `extraction.servers`. Any number of servers may serve one training,
and one server any number of trainings. `--print` shows the command and its environment instead of running it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import cast

from stages.errors import DraftlineError
from stages.hidden_states.launch import engine_arguments
from stages.hidden_states.server import server_command
from stages.hidden_states.source import disk_of, named_transport, producer_config
from stages.hidden_states.transport import open_store
from stages.pairing.identity import read_identity
from stages.pairing.lock import check_layer_ids
from stages.pairing.store import revalidate
from stages.params import Params, StageParams, read_params


def command(params: Params, host: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Argument list and environment of the server that params.yaml describes.

    Raises:
        DraftlineError: it leaves open where samples go, or there is no verifier here.
    """
    extraction = params.extraction
    transport = named_transport(extraction)
    if transport.kind == "file" and transport.spool is None:
        raise DraftlineError("params.yaml: extraction.spool: a server of its own needs to know the directory, in shared memory, where samples go")
    if transport.kind == "mooncake" and transport.master is None:
        raise DraftlineError("params.yaml: extraction.master: a server of its own needs to know the address of mooncake_master")
    if transport.spool is not None:
        transport = transport.model_copy(update={"spool": str(Path(transport.spool).absolute())})
    if (warning := disk_of(transport)) is not None:
        print(warning, file=sys.stderr)
    identity = read_identity()
    check_layer_ids(extraction.layer_ids, identity.num_layers)
    model = revalidate(identity)
    # The server would say the same, but only once the model is loaded.
    open_store(transport).close()
    arguments = engine_arguments(
        model,
        extraction.dtype,
        sorted({*extraction.layer_ids, identity.num_layers}),
        params.engine.max_model_len,
        extraction.max_num_seqs,
        producer_config(extraction, transport, identity.digest),
        params.engine.kv_cache_bytes,
        params.verifier.trust_remote_code,
    )
    return server_command(arguments, host, port)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.extract.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8100, help="TCP port (8100)")
    parser.add_argument("--print", action="store_true", help="show the command, do not run it")
    options = parser.parse_args(argv)
    try:
        words, env = command(cast(Params, StageParams(read_params(), "extract")), options.host, options.port)
    except DraftlineError as error:
        print(f"draftline extract.serve: {error}", file=sys.stderr)
        return 1
    if options.print:
        print(shlex.join(["env", *(f"{name}={value}" for name, value in env.items()), *words]))
        return 0
    # This process becomes the server: what supervises it sees the server's own signals and status.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    os.environ["PATH"] = path
    os.execvpe(words[0], words, {**os.environ, **env})


if __name__ == "__main__":
    raise SystemExit(main())
