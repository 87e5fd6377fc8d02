"""The registry on PostgreSQL, as `MLFLOW_BACKEND` of `make up` or `mlflow.tracking_uri` can name one: a private cluster, started here."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.promotion import make_champion, roll_back
from flows.registry import SERVING, Registry
from stages.pairing.identity import compute_identity
from stages.servers import free_port, stop
from stages.tracking import TrackingError, connect, probe
from tests.flows.drafters import add_drafter
from tests.mlflow_server import mlflow_server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PASSWORD = "not-a-secret"


def binary(name: str) -> str:
    """A program of PostgreSQL; Debian keeps the server's out of the path."""
    found = shutil.which(name) or next((str(path) for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)), None)
    if found is None:
        pytest.skip(f"{name} not found: PostgreSQL's server is not installed (Debian: package postgresql)")
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """URL of an empty database; the server refuses to run as root, so there it is another user's."""
    user = "nobody" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="dl-pg-") as folder:
        root, data = Path(folder), Path(folder) / "data"
        (root / "password").write_text(PASSWORD)
        if user is not None:
            entry = pwd.getpwnam(user)
            for path in (root, root / "password"):
                os.chown(path, entry.pw_uid, entry.pw_gid)
        words = [binary("initdb"), "-D", str(data), "-U", "draftline", "-A", "scram-sha-256", "--pwfile", str(root / "password"), "-E", "UTF8", "--locale=C"]
        done = subprocess.run([*words, "--no-sync"], cwd=root, user=user, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        port = free_port()
        words = [binary("postgres"), "-D", str(data), "-p", str(port), "-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={root}"]
        with (root / "log").open("wb") as log:
            process = subprocess.Popen([*words, "-c", "fsync=off"], cwd=root, user=user, stdout=log, stderr=log, start_new_session=True)
        url = f"postgresql://draftline:{PASSWORD}@127.0.0.1:{port}/postgres"
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    probe(url)
                    break
                except TrackingError:
                    assert process.poll() is None, (root / "log").read_text()
                    assert time.monotonic() < deadline, (root / "log").read_text()
                    time.sleep(0.2)
            yield url
        finally:
            # Without waiting for clients to leave.
            process.send_signal(signal.SIGINT)
            stop(process)


@pytest.mark.parametrize(
    ("change", "says"),
    [(("not-a-secret", "wrong"), "password authentication failed"), (("/postgres", "/nothing"), 'database "nothing" does not exist')],
    ids=["wrong password", "no such database"],
)
def test_a_database_that_lets_nobody_in_is_one_line_in_seconds(cluster: str, change: tuple[str, str], says: str) -> None:
    began = time.monotonic()
    with pytest.raises(TrackingError, match=says) as refused:
        connect(cluster.replace(*change))
    assert time.monotonic() - began < 10
    assert "\n" not in str(refused.value)
    assert PASSWORD not in str(refused.value)


def test_verifier_drafters_and_aliases(cluster: str, tiny_verifier: Path, tmp_path: Path) -> None:
    """What `make up`'s MLflow server does for the flows, and the same seen by a client that asks the database itself."""
    with mlflow_server(tmp_path, cluster) as uri:
        known = Registry(uri, "draftline")
        identity = compute_identity(tiny_verifier)
        version, new = known.register_verifier("tiny", identity, str(tiny_verifier), "as-is")
        assert new
        assert known.register_verifier("tiny", identity, str(tiny_verifier), "as-is") == (version, False)
        known.set_alias("verifier.tiny", SERVING, version.version)
        assert known.serving_verifier("tiny") == version
        assert list(known.verifiers()) == ["tiny"]
        for number in (1, 2):
            assert add_drafter(uri, tiny_verifier, tmp_path / f"checkpoint-{number}", number) == number
        first, second = known.drafters("tiny")
        make_champion(known, first, version)
        make_champion(known, second, version)
        assert roll_back(known, version).version == 1
        assert [drafter.aliases for drafter in known.drafters("tiny")] == [("champion",), ("candidate", "previous")]
        known.delete_alias("drafter.tiny", "champion")
        assert known.drafter("tiny", "champion") is None
    direct = Registry(cluster, "draftline")
    assert direct.serving_verifier("tiny") == version
    assert [drafter.version for drafter in direct.drafters("tiny")] == [1, 2]
