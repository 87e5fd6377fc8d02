"""Two nodes on one machine: network namespaces joined by a veth pair, each with shared memory and folders of its own. Needs root."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.paths import REPOSITORY


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def missing() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs the commands ip and unshare (packages iproute2, util-linux)"
    name = f"dl{uuid.uuid4().hex[:8]}"
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


@dataclass
class Node:
    """One namespace: its address, its folder, and the folder of the other node, which it cannot see."""

    namespace: str
    address: str
    folder: Path
    hidden: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Run a command on this node, in its folder; what it prints goes to `log`."""
        mounts = [f"mount -t tmpfs none {shlex.quote(str(place))}" for place in (Path("/dev/shm"), self.hidden)]
        inside = " && ".join([*mounts, f"cd {shlex.quote(str(self.folder / 'workspace'))}", f"exec {shlex.join(words)}"])
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PATH": path}
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "sh", "-c", inside]
        with log.open("wb") as stream:
            process = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        self.started.append(process)
        return process


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes that share nothing but a network."""
    mark = uuid.uuid4().hex[:6]
    names = [f"dl{mark}a", f"dl{mark}b"]
    addresses = ["10.213.77.1", "10.213.77.2"]
    folders = [folder / "a", folder / "b"]
    nodes = [Node(names[i], addresses[i], folders[i], folders[1 - i]) for i in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"v{mark}a", "netns", names[0], "type", "veth", "peer", "name", f"v{mark}b", "netns", names[1])
        for name, link, address in zip(names, (f"v{mark}a", f"v{mark}b"), addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", link, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for place in folders:
            place.mkdir(parents=True)
        yield nodes[0], nodes[1]
    finally:
        from stages.process import end_process_tree

        for node in nodes:
            for process in node.started:
                end_process_tree(process.pid)
                process.wait(30)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
