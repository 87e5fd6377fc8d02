"""Faults of streaming, each against a real vLLM server and, where it says so, a real mooncake_master.

Whatever happens, training either goes on and ends in the weights of an offline run, or stops within a minute with one line
that names the cause and a checkpoint from which a second run ends in the same weights.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.artifacts import read_json
from stages.dataset import read_split
from stages.hidden_states.envelope import Origin, plan_origin
from stages.hidden_states.format import Plan
from stages.hidden_states.publisher import Limits, Publisher
from stages.hidden_states.receive import take
from stages.hidden_states.stores import FileStore, StoreFullError
from stages.servers import free_port
from tests.extract.workspace import last_line
from tests.marks import long_but
from tests.tiny import make_verifier
from tests.train.streaming import (
    BUDGET_BYTES,
    ENVIRONMENT,
    STOP_SECONDS,
    TTL_SECONDS,
    Process,
    Proxy,
    Site,
    checkpoints,
    copy_workspace,
    extracted,
    failing_first,
    make_template,
    offline_weights,
    open_site,
    reach,
    repeated,
    run_stage,
    set_params,
    train,
    training,
    weights,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TRANSPORTS = ("file", "mooncake")
SPOOL_BYTES = 1 << 22
OTHER = "other"
"""The run of samples that no training here asks for."""


@pytest.fixture(scope="module")
def template(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template") / "workspace", tiny_verifier)


@pytest.fixture(scope="module")
def undisturbed(template: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights that every training here must end in."""
    return offline_weights(template, tmp_path_factory.mktemp("offline") / "workspace")


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in memory: on a tiny file system of its own where this user may mount one."""
    mount = tmp_path_factory.mktemp("memory")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SPOOL_BYTES}", "tmpfs", str(mount)], capture_output=True, check=False).returncode == 0
    try:
        if mounted:
            (mount / "spool").mkdir()
            yield mount / "spool"
        else:
            with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="draftline-test-") as folder:
                yield Path(folder)
    finally:
        if mounted:
            subprocess.run(["umount", str(mount)], check=True)


@pytest.fixture(scope="module")
def sites(template: Path, spool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Site]]:
    """Transport → a server that publishes by it; started when first asked for."""
    opened: dict[str, tuple[Site, AbstractContextManager[Site]]] = {}

    def site(transport: str) -> Site:
        if transport not in opened:
            manager = open_site(template, tmp_path_factory.mktemp(transport), spool if transport == "file" else None)
            opened[transport] = manager.__enter__(), manager
        return opened[transport][0]

    yield site
    for _, manager in opened.values():
        manager.__exit__(None, None, None)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_streamed_and_dumped_states_give_the_same_weights(transport: str, sites: Callable[[str], Site], tmp_path: Path, undisturbed: str) -> None:
    site = sites(transport)
    workspace = site.workspace(tmp_path / "workspace")
    status, output = train(workspace)
    assert status == 0, output
    assert weights(workspace) == undisturbed
    assert site.held() == []


def master_killed(site: Site) -> Iterator[None]:
    assert site.master is not None
    site.master.process.kill()
    yield
    site.master.stop()
    site.master.start()


def master_restarted(site: Site) -> Iterator[None]:
    assert site.master is not None
    site.master.process.kill()
    site.master.stop()
    time.sleep(2.0)
    site.master.start()
    yield


def master_frozen(site: Site) -> Iterator[None]:
    assert site.master is not None
    site.master.process.send_signal(signal.SIGSTOP)
    yield
    site.master.process.send_signal(signal.SIGCONT)


def engine_frozen(site: Site) -> Iterator[None]:
    site.server.signal(signal.SIGSTOP)
    yield
    site.server.signal(signal.SIGCONT)


def engine_frozen_for_a_moment(site: Site) -> Iterator[None]:
    site.server.signal(signal.SIGSTOP)
    time.sleep(2.0)
    site.server.signal(signal.SIGCONT)
    yield


def server_killed(site: Site) -> Iterator[None]:
    site.server.process.kill()
    yield
    site.server.stop()
    site.server.start()


def engine_core_killed(site: Site) -> Iterator[None]:
    site.server.engine_core().kill()
    yield
    site.server.stop()
    site.server.start()


def fill(store: FileStore) -> None:
    """Publish another's samples, which nobody reads, until not even a small one has room."""
    publisher = Publisher(store, Origin(verifier="0" * 64, layer_ids=[1], dtype="float32"), Limits(BUDGET_BYTES))
    for values in (8192, 512, 1):
        with suppress(StoreFullError):
            while True:
                publisher.put(f"{OTHER}-{secrets.token_hex(16)}", torch.zeros(1, 1, values), torch.zeros(1, dtype=torch.int64))


def age(store: FileStore, seconds: float) -> None:
    written = time.time() - seconds
    for path in store.directory.glob(f"{OTHER}-*"):
        with suppress(FileNotFoundError):
            os.utime(path, (written, written))


def store_full(site: Site) -> Iterator[None]:
    assert site.spool is not None
    store = FileStore(site.spool)

    def keep_full() -> None:
        fill(store)
        age(store, 0.0)

    with repeated(keep_full):
        yield
    store.remove_run(OTHER)


def store_full_of_expired(site: Site) -> Iterator[None]:
    assert site.spool is not None
    store = FileStore(site.spool)
    fill(store)
    age(store, TTL_SECONDS)
    yield
    store.remove_run(OTHER)


def file_system_full(site: Site) -> Iterator[None]:
    assert site.spool is not None
    if not site.spool.parent.is_mount():
        pytest.skip("only root may mount a small file system")
    filler = site.spool.parent / "filler"
    with filler.open("wb", buffering=0) as stream:

        def keep_full() -> None:
            with suppress(OSError):
                while True:
                    stream.write(bytes(1 << 12))

        with repeated(keep_full):
            yield
    filler.unlink()


@dataclass(frozen=True)
class Fault:
    """`inflict` hurts a site, and heals it after its `yield`; `says`: what training stops with (None: it goes on)."""

    inflict: Callable[[Site], Iterator[None]]
    transport: str
    says: str | None


FAULTS = [
    Fault(master_killed, "mooncake", "the master does not answer"),
    Fault(master_restarted, "mooncake", None),
    Fault(master_frozen, "mooncake", "the master does not answer"),
    Fault(engine_frozen, "file", "did not answer within"),
    Fault(engine_frozen, "mooncake", "did not answer within"),
    Fault(engine_frozen_for_a_moment, "file", None),
    Fault(server_killed, "file", "does not answer"),
    Fault(engine_core_killed, "mooncake", "HTTP 500|does not answer"),
    Fault(store_full, "file", "the store is full: .* do not fit extraction.budget_bytes"),
    Fault(store_full_of_expired, "file", None),
    Fault(file_system_full, "file", "no space left where samples are published"),
]


def assert_stopped(workspace: Path, status: int, output: str, says: str) -> None:
    assert status == 1, output
    line = last_line(output)
    assert line.startswith("draftline train: "), output
    assert re.search(says, line), line
    assert "Traceback" not in output
    kept = checkpoints(workspace)
    assert kept, output
    assert f"the checkpoint of step {kept[-1]} is kept" in line


KEPT = (master_killed, server_killed, store_full)


@pytest.mark.parametrize("fault", long_but(lambda fault: fault.inflict in KEPT, FAULTS, [f"{fault.inflict.__name__}-{fault.transport}" for fault in FAULTS]))
def test_a_fault_in_the_middle_of_a_training(fault: Fault, sites: Callable[[str], Site], tmp_path: Path, undisturbed: str) -> None:
    site = sites(fault.transport)
    workspace = site.workspace(tmp_path / "workspace")
    with training(workspace, "slow=0.1") as process:
        reach(process, 3)
        began = time.monotonic()
        with contextmanager(fault.inflict)(site):
            status, output = process.finish(STOP_SECONDS)
            print(f"{time.monotonic() - began:.1f} s from the fault: status {status}: {last_line(output)}")
    if fault.says is not None:
        assert_stopped(workspace, status, output, fault.says)
        status, output = train(workspace)
    assert status == 0, output
    assert weights(workspace) == undisturbed
    assert site.held() == []


WOUNDS: dict[str, int] = {"kill_reading": -signal.SIGKILL, "kill_acknowledging": -signal.SIGKILL, "flip": 0}


@pytest.mark.parametrize(("wound", "transport"), long_but(lambda case: case[1] == "mooncake" and case[0] != "kill_acknowledging", product(WOUNDS, TRANSPORTS)))
def test_a_trainer_that_dies_or_reads_other_bytes(wound: str, transport: str, sites: Callable[[str], Site], tmp_path: Path, undisturbed: str) -> None:
    """A torn sample is asked for again; what a killed trainer held is given back by the next one."""
    site = sites(transport)
    workspace = site.workspace(tmp_path / "workspace")
    status, output = train(workspace, f"{wound}=20")
    assert status == WOUNDS[wound], output
    if wound == "flip":
        assert "1 torn" in output
    else:
        assert site.held() != []
        status, output = train(workspace)
    assert status == 0, output
    assert weights(workspace) == undisturbed
    assert site.held() == []


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_a_server_that_fails_ten_times_costs_no_sample(sites: Callable[[str], Site], tmp_path: Path, undisturbed: str) -> None:
    site = sites("file")
    with failing_first(10, site.server.url, tmp_path) as url:
        workspace = site.workspace(tmp_path / "workspace", servers=[url])
        status, output = train(workspace)
    assert status == 0, output
    assert " 10 retries" in output
    assert weights(workspace) == undisturbed


class Elsewhere:
    """Rewrites the key in answers `first` to `last` (counted from 1) to a path outside the store."""

    def __init__(self, first: int, last: float) -> None:
        self.first, self.last = first, last
        self.count = itertools.count(1)

    def __call__(self, answer: bytes) -> bytes:
        if b'"hidden_states":{"key":"' not in answer or not self.first <= next(self.count) <= self.last:
            return answer
        return re.sub(rb'("hidden_states":\{"key":)"[^"]*"', rb'\1"../../../../../../etc/passwd"', answer)


@pytest.mark.long
@pytest.mark.parametrize("last", [10, float("inf")], ids=["once", "from then on"])
def test_a_handle_that_points_outside_the_store_is_not_followed(last: float, sites: Callable[[str], Site], tmp_path: Path, undisturbed: str) -> None:
    site = sites("file")
    with Proxy(site.server.url) as proxy:
        proxy.rewrite = Elsewhere(10, last)
        workspace = site.workspace(tmp_path / "workspace", servers=[proxy.url])
        status, output = train(workspace, "slow=0.1")
        if last > 10:
            assert_stopped(workspace, status, output, r"the engine's handle names '\.\./\.\./.*', which is no key of a sample; nothing was read")
            proxy.rewrite = Elsewhere(0, 0)
            status, output = train(workspace)
    assert status == 0, output
    assert weights(workspace) == undisturbed
    assert site.held() == []


@pytest.fixture(scope="module")
def broken_template(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples for another verifier, whose embedding of a token that occurs in one training sample alone is not a number."""
    splits = [read_split(template / "outputs" / "prepare", split) for split in ("train", "validation")]
    counts = Counter(token for split in splits for sample in split for token in set(sample.input_ids))
    token = next(token for sample in splits[0] for token in sample.input_ids if counts[token] == 1)
    folder = tmp_path_factory.mktemp("broken")
    verifier = make_verifier(folder / "verifier", tied=False, seed=1)
    path = verifier / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    return make_template(folder / "workspace", verifier)


@pytest.fixture(scope="module")
def broken_site(broken_template: Path, spool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(broken_template, tmp_path_factory.mktemp("broken-site"), spool) as site:
        yield site


@pytest.mark.long
def test_a_sample_that_is_not_finite_is_left_out_alone(broken_template: Path, broken_site: Site, tmp_path: Path) -> None:
    """As offline, where it is rejected: the samples after it are none the worse."""
    workspace = broken_site.workspace(tmp_path / "workspace")
    status, output = train(workspace)
    assert status == 0, output
    assert re.search("sample train-[0-9]+ is left out: hidden states that are not finite", output)
    assert " 1 samples left out" in output
    offline = tmp_path / "offline"
    assert weights(workspace) == offline_weights(broken_template, offline)
    assert len(read_json(offline / "outputs" / "extract" / "manifest.json")["rejected"]) == 1
    assert broken_site.held() == []


@pytest.mark.long
def test_a_server_of_another_verifier_in_the_middle_of_a_training(sites: Callable[[str], Site], broken_site: Site, tmp_path: Path, undisturbed: str) -> None:
    site = sites("file")
    expected, other = (read_json(each.server.folder / "outputs" / "extract" / "manifest.json")["verifier"] for each in (site, broken_site))
    with Proxy(site.server.url) as proxy:
        workspace = site.workspace(tmp_path / "workspace", servers=[proxy.url])
        with training(workspace, "slow=0.1") as process:
            reach(process, 3)
            proxy.target = broken_site.server.url
            status, output = process.finish(STOP_SECONDS)
        assert_stopped(workspace, status, output, f"verifier '{other}', expected '{expected}'")
        proxy.target = site.server.url
        status, output = train(workspace)
    assert status == 0, output
    assert weights(workspace) == undisturbed
    assert site.held() == []


def test_one_request_id_twice_gives_two_samples(sites: Callable[[str], Site], tmp_path: Path) -> None:
    site = sites("file")
    assert site.spool is not None
    plan = Plan.from_json(read_json(site.server.folder / "outputs" / "extract" / "manifest.json")["plan"])
    texts = [[5, 6, 7], [8, 9, 10, 11]]
    with ThreadPoolExecutor() as pool:
        handles = list(pool.map(lambda tokens: site.server.complete(tokens, request_id="twice"), texts))
    assert handles[0]["key"] != handles[1]["key"]
    for handle, tokens in zip(handles, texts, strict=True):
        assert take(FileStore(site.spool), handle["key"], plan_origin(plan), 5.0)[1].tolist() == tokens


@pytest.mark.long
def test_a_server_with_prefix_caching_does_not_start(sites: Callable[[str], Site]) -> None:
    folder = sites("file").server.folder
    status, command = run_stage(folder, "stages.extract.serve", "--port", str(free_port()), "--print")
    assert status == 0, command
    words = [*shlex.split(last_line(command)), "--enable-prefix-caching"]
    environment = os.environ | ENVIRONMENT | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "prefix caching must be off (--no-enable-prefix-caching)" in done.stdout + done.stderr


@pytest.mark.long
def test_two_trainings_share_a_master_and_a_server(sites: Callable[[str], Site], tmp_path: Path, undisturbed: str) -> None:
    site = sites("mooncake")
    workspaces = [site.workspace(tmp_path / name) for name in ("first", "second")]
    with training(workspaces[0], "slow=0.1") as first, training(workspaces[1], "slow=0.1") as second:
        for process in (first, second):
            status, output = process.finish(STOP_SECONDS)
            assert status == 0, output
    assert [weights(workspace) for workspace in workspaces] == [undisturbed] * 2
    assert site.held() == []


@pytest.mark.parametrize("silent", [False, True], ids=["closed", "silent"])
def test_a_server_that_is_not_there_is_named_at_once(silent: bool, template: Path, spool: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        workspace = copy_workspace(template, tmp_path / "workspace", transport="file", spool=str(spool), servers=[url])
        began = time.monotonic()
        status, output = train(workspace)
    assert time.monotonic() - began < 15.0
    assert status == 1
    assert output.splitlines() == [last_line(output)]
    assert last_line(output).startswith(f"draftline train: extraction.servers: {url} does not answer")


def test_samples_must_live_longer_than_a_step(sites: Callable[[str], Site], tmp_path: Path) -> None:
    workspace = sites("file").workspace(tmp_path / "workspace", ttl_seconds=0.001)
    status, output = train(workspace)
    assert_stopped(workspace, status, output, "params.yaml: extraction.ttl_seconds = 0.001: must be above the time of a training step")


def test_a_budget_below_one_sample_is_refused_before_training(template: Path, tmp_path: Path) -> None:
    workspace = shutil.copytree(template, tmp_path / "workspace", symlinks=True)
    set_params(workspace, extraction={"mode": "online", "budget_bytes": 1 << 16})
    status, output = run_stage(workspace, "stages.extract")
    assert status == 1
    assert output.splitlines() == [last_line(output)]
    assert last_line(output).startswith("draftline extract: params.yaml: extraction.budget_bytes = 65536: must be at least ")


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("transport", long_but(lambda transport: transport == "mooncake", TRANSPORTS))
def test_a_producer_without_readers_pauses_at_its_budget(transport: str, sites: Callable[[str], Site], tmp_path: Path, undisturbed: str) -> None:
    """What nobody has read in time is removed when room is needed, and not before."""
    site = sites(transport)
    before, most = contents(site.server.folder), 0

    def abandon(number: int) -> None:
        with suppress(httpx.HTTPError):
            site.server.complete([4 + number] * 200)

    with ThreadPoolExecutor(24) as pool:
        requests = [pool.submit(abandon, number) for number in range(24)]
        while not all(request.done() for request in requests):
            most = max(most, site.held_bytes())
            time.sleep(0.02)
    assert BUDGET_BYTES // 2 < most <= BUDGET_BYTES
    assert site.held_bytes() > BUDGET_BYTES // 2
    assert contents(site.server.folder) == before
    time.sleep(TTL_SECONDS)
    workspace = site.workspace(tmp_path / "workspace")
    status, output = train(workspace)
    assert status == 0, output
    assert not re.search(r"\b0 evictions", output)
    assert weights(workspace) == undisturbed
    assert site.held() == []


HYBRID = [("file", [200_000, 1 << 30, 1 << 30]), ("mooncake", [1 << 30, 1 << 30])]


@pytest.mark.parametrize(("transport", "limits"), long_but(lambda case: case[0] == "file", HYBRID))
def test_what_hybrid_keeps_is_not_streamed_again(transport: str, limits: list[int], sites: Callable[[str], Site], tmp_path: Path, undisturbed: str) -> None:
    site = sites(transport)
    workspace = site.workspace(tmp_path / "workspace", mode="hybrid", cache_bytes=limits[0])
    cache = workspace / "outputs" / "train" / "cache"
    for limit in limits:
        set_params(workspace, extraction={"cache_bytes": limit})
        extracted(workspace)
        status, output = train(workspace)
        assert status == 0, output
        assert weights(workspace) == undisturbed
        assert 0 < sum(path.stat().st_size for path in cache.iterdir() if path.name != "plan.json") <= limit
    assert "extract: 0 promised" in output
    assert site.held() == []


def kill_child(process: Process, name: str) -> None:
    next(child for child in psutil.Process(process.process.pid).children(recursive=True) if name in " ".join(child.cmdline())).kill()


OWN_SERVERS: list[tuple[str, list[tuple[str | None, str | None]]]] = [
    ("file", [("api_server", "the extracting server ended with status -9"), (None, None)]),
    ("mooncake", [("mooncake_master", "the Mooncake master ended with status -9")]),
]
"""Transport, and what is killed in one run after the other (None: the trainer itself) with what that run says."""


@pytest.mark.timeout(400)
@pytest.mark.long
@pytest.mark.parametrize(("transport", "kills"), OWN_SERVERS, ids=TRANSPORTS)
def test_servers_that_training_starts_end_with_it(
    transport: str, kills: list[tuple[str | None, str | None]], template: Path, tmp_path: Path, undisturbed: str
) -> None:
    workspace = copy_workspace(template, tmp_path / "workspace", transport=transport)
    for victim, says in kills:
        done = max(checkpoints(workspace), default=0)
        with training(workspace, "slow=0.1") as process:
            reach(process, done + 3)
            family = psutil.Process(process.process.pid).children(recursive=True)
            spools = {Path("/dev/shm", name) for child in family for name in re.findall(r"draftline-spool-\w+", " ".join(child.cmdline()))}
            if victim is None:
                process.process.kill()
            else:
                kill_child(process, victim)
            status, output = process.finish(STOP_SECONDS)
            _, alive = psutil.wait_procs(family, timeout=20)
            assert alive == []
        if says is not None:
            assert_stopped(workspace, status, output, says)
    status, output = train(workspace)
    assert status == 0, output
    assert weights(workspace) == undisturbed
    assert len(spools) == (transport == "file")
    assert not any(spool.exists() for spool in spools)
