"""Producer and trainer on two nodes: nothing between them but a network; samples are found by key, never by address."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.nodes import Node, missing, two_nodes
from tests.train.streaming import copy_workspace, make_template, offline_weights, wait_for, weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
MASTER_PORT, SERVER_PORT = 50051, 8100


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with two_nodes(tmp_path / "nodes") as pair:
        yield pair


def workspace(node: Node, verifier: Path, master: str, server: str) -> Path:
    """A workspace of the node's own, with its own copy of the verifier, that streams."""
    model = Path(shutil.copytree(verifier, node.folder / "model"))
    template = make_template(node.folder / "template", model)
    return copy_workspace(template, node.folder / "workspace", transport="mooncake", master=master, servers=[server])


def answers(node: Node, url: str) -> bool:
    """Whether `url` answers on that node."""
    done = subprocess.run(["ip", "netns", "exec", node.namespace, "curl", "-sf", "-o", "/dev/null", url], check=False)
    return done.returncode == 0


@pytest.mark.long
def test_training_on_another_node_ends_in_the_same_weights(nodes: tuple[Node, Node], tiny_verifier: Path, tmp_path: Path) -> None:
    """No shared file system: each node sees its own folders and its own shared memory, and the other only over a veth pair."""
    producer, trainer = nodes
    master, url = f"{producer.address}:{MASTER_PORT}", f"http://{producer.address}:{SERVER_PORT}"
    folders = [workspace(node, tiny_verifier, master, url) for node in nodes]
    shutil.rmtree(folders[0] / "outputs" / "prepare")  # the producer needs no data
    wanted = offline_weights(folders[1].parent / "template", tmp_path / "offline")

    producer.start(["mooncake_master", f"--rpc_address={producer.address}", f"--rpc_port={MASTER_PORT}", "--client_ttl=10"], tmp_path / "master.log")
    time.sleep(1.0)
    log = tmp_path / "server.log"
    server = producer.start(["python", "-m", "stages.extract.serve", "--host", producer.address, "--port", str(SERVER_PORT)], log)

    def healthy() -> bool:
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        return answers(trainer, f"{url}/health")

    wait_for("the server", healthy, 300.0)
    training = trainer.start(["python", "-m", "stages.train"], tmp_path / "train.log")
    assert training.wait(200) == 0, (tmp_path / "train.log").read_text(errors="replace")[-2000:]
    assert weights(folders[1]) == wanted
    assert not list(folders[1].rglob("*.data")), "no sample touched a disk"
