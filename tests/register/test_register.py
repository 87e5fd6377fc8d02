"""What is registered is what was proven, once, whole, whatever was interrupted before. Real MLflow, on SQLite and behind a server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from stages.artifacts import MANIFEST, digest_json, file_table, read_json, read_manifest, write_json, write_manifest
from stages.errors import ArtifactError, DraftlineError, PairError
from stages.pairing.identity import read_identity
from stages.register.__main__ import read_candidate
from stages.register.registry import register
from stages.servers import free_port
from stages.tracking import TrackingError, connect, experiment_id, redacted
from tests.mlflow_server import mlflow_server
from tests.paths import REPOSITORY
from tests.register.proven import write_evidence

URI = "sqlite:///mlflow.db"
NAME = "drafter.smollm2-135m"
CHECKPOINT = Path("outputs/convert/checkpoint")


def run_stage() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "stages.register"], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)


def register_here(uri: str = URI) -> Any:
    return register(uri, "draftline", NAME, read_candidate(Path("outputs"), read_identity()))


def client() -> MlflowClient:
    return connect(URI)


def versions() -> list[Any]:
    return sorted(client().search_model_versions(f"name = '{NAME}'"), key=lambda version: int(version.version))


def stored() -> Path:
    """The directory of the only version's artifacts."""
    (version,) = versions()
    return Path(client().get_model_version_download_uri(NAME, version.version).removeprefix("file://"))


class TestWhatIsRegistered:
    def test_a_stage_run_makes_one_version_with_its_evidence(self, proven: Path) -> None:
        done = run_stage()
        assert (done.returncode, done.stderr) == (0, "")
        written = read_json(Path("outputs/register/version.json"))
        version = client().get_model_version_by_alias(NAME, "candidate")
        identity = read_identity()
        manifest = read_manifest(CHECKPOINT)
        assert written == {
            "name": NAME,
            "version": 1,
            "run_id": version.run_id,
            "content": digest_json(manifest["files"]),
            "verifier": identity.digest,
            "tracking_uri": URI,
        }
        assert version.tags["verifier"] == identity.digest
        assert json.loads(version.tags["lock"]) == read_json(CHECKPOINT / "verifier_lock.json")
        assert {path: entry["sha256"] for path, entry in json.loads(version.tags["files"]).items()} == {
            path: entry["sha256"] for path, entry in file_table(CHECKPOINT).items()
        }
        assert version.tags["gate"] == "pass"
        assert version.tags["acceptance_length"] == "1.6250"
        assert json.loads(version.tags["acceptance"])["per_kind"]["story"]["value"] == 1.75
        assert version.tags["data"] == digest_json(read_json(Path("outputs/prepare") / MANIFEST)["files"])
        assert file_table(stored()) == file_table(CHECKPOINT)
        assert stored().is_relative_to(proven / "mlartifacts")

    def test_twice_the_same_content_is_one_version_and_one_run(self, proven: Path) -> None:
        first, second = register_here(), register_here()
        assert (first.version, first.run_id, first.tags) == (second.version, second.run_id, second.tags)
        assert len(versions()) == 1
        experiment = experiment_id(client(), URI, "draftline")
        assert len(client().search_runs([experiment])) == 1

    def test_new_evidence_for_the_same_content_is_still_one_version(self, proven: Path) -> None:
        register_here()
        report = read_json(Path("outputs/evaluate/report.json"))
        report["acceptance_length"]["macro"] = 1.75
        write_json(Path("outputs/evaluate/report.json"), report)
        assert register_here().tags["acceptance_length"] == "1.7500"
        assert len(versions()) == 1

    def test_other_content_is_the_next_version_and_the_candidate(self, proven: Path) -> None:
        register_here()
        (CHECKPOINT / "README.md").write_text("another drafter", encoding="utf-8")
        write_manifest(CHECKPOINT, read_identity().digest)
        write_evidence(Path("outputs"), read_identity().digest)
        assert int(register_here().version) == 2
        assert int(client().get_model_version_by_alias(NAME, "candidate").version) == 2
        assert client().get_model_version(NAME, "1").tags["content"] != client().get_model_version(NAME, "2").tags["content"]


class TestWhatIsRefused:
    def refused(self, kind: type[DraftlineError], message: str) -> None:
        with pytest.raises(kind, match=message) as refused:
            register_here()
        assert "\n" not in str(refused.value)
        assert not Path("mlartifacts").exists()
        assert client().search_registered_models() == []

    def test_a_missing_directory(self, proven: Path) -> None:
        """MLflow itself registers a path that does not exist, with status READY."""
        shutil.rmtree(CHECKPOINT)
        self.refused(ArtifactError, r"checkpoint: incomplete \(no manifest\.json\)")

    def test_a_missing_file(self, proven: Path) -> None:
        (CHECKPOINT / "config.json").unlink()
        self.refused(ArtifactError, r"config\.json: missing, but listed")

    def test_an_altered_weight(self, proven: Path) -> None:
        path = CHECKPOINT / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        self.refused(ArtifactError, r"model\.safetensors: content differs from the sha256")

    def test_an_added_file(self, proven: Path) -> None:
        (CHECKPOINT / "extra.bin").write_bytes(b"x")
        self.refused(ArtifactError, r"extra\.bin: not listed in outputs/convert/checkpoint/manifest\.json")

    def test_a_checkpoint_of_another_verifier(self, proven: Path) -> None:
        path = Path("outputs/verifier/identity.json")
        write_json(path, {**read_json(path), "weights": "0" * 64})
        self.refused(ArtifactError, r"made for verifier .*, the current one is")

    def test_a_lock_that_names_another_verifier(self, proven: Path) -> None:
        """A manifest that was written for it by mistake does not help it."""
        path = CHECKPOINT / "verifier_lock.json"
        lock = read_json(path)
        lock["identity"]["weights"] = "0" * 64
        write_json(path, lock)
        write_manifest(CHECKPOINT, read_identity().digest)
        self.refused(PairError, r"weights")

    @pytest.mark.parametrize(("stage", "verdict"), [("gate", "fail"), ("gate", None), ("lock", "mismatch")])
    def test_a_verdict_that_is_not_in_favour(self, proven: Path, stage: str, verdict: str | None) -> None:
        write_json(Path("outputs") / stage / "report.json", {"verdict": verdict})
        self.refused(DraftlineError, rf"{stage}/report\.json: verdict = {verdict!r}: only a drafter with verdict")

    @pytest.mark.parametrize(("stage", "subject"), [("lock", "verifier"), ("gate", "verifier"), ("gate", "checkpoint"), ("evaluate", "checkpoint")])
    def test_a_report_about_something_else(self, proven: Path, stage: str, subject: str) -> None:
        """A checkpoint that was trained and converted after the gate has not passed it."""
        path = Path("outputs") / stage / "report.json"
        write_json(path, {**read_json(path), subject: "0" * 64})
        self.refused(ArtifactError, rf"{stage}/report\.json: {subject} = 000000000000, the current one is \w{{12}}; run dvc repro")

    def test_a_database_that_another_checkout_made(self, proven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its artifacts would go to the old place."""
        register_here()
        shutil.copytree(proven, tmp_path / "copy", symlinks=True)
        monkeypatch.chdir(tmp_path / "copy")
        with pytest.raises(TrackingError, match=rf"mlflow\.db was made in {proven}, this is {tmp_path / 'copy'}"):
            register_here()

    def test_a_missing_report(self, proven: Path) -> None:
        Path("outputs/gate/report.json").unlink()
        self.refused(ArtifactError, r"gate/report\.json: no such file")


class TestRepairs:
    def test_a_run_without_artifacts_is_completed(self, proven: Path) -> None:
        candidate = read_candidate(Path("outputs"), read_identity())
        experiment = experiment_id(client(), URI, "draftline")
        run = client().create_run(experiment, tags={"content": candidate.content, "model": NAME})
        assert register_here().run_id == run.info.run_id
        assert file_table(stored()) == file_table(CHECKPOINT)

    @pytest.mark.parametrize("damage", ["removed", "truncated", "no manifest", "all removed"])
    def test_damaged_artifacts_are_uploaded_again(self, proven: Path, damage: str) -> None:
        register_here()
        weights = stored() / "model.safetensors"
        match damage:
            case "removed":
                weights.unlink()
            case "truncated":
                weights.write_bytes(weights.read_bytes()[:-10])
            case "no manifest":
                (stored() / MANIFEST).unlink()
            case _:
                shutil.rmtree(stored())
        assert int(register_here().version) == 1
        assert file_table(stored()) == file_table(CHECKPOINT)
        read_manifest(stored())

    def test_a_version_without_tags_and_alias_is_completed(self, proven: Path) -> None:
        before = register_here()
        for key in before.tags:
            client().delete_model_version_tag(NAME, before.version, key)
        client().delete_registered_model_alias(NAME, "candidate")
        after = register_here()
        assert (after.version, after.tags) == (before.version, before.tags)
        assert int(client().get_model_version_by_alias(NAME, "candidate").version) == 1

    def test_a_deleted_run_is_restored(self, proven: Path) -> None:
        version = register_here()
        client().delete_run(version.run_id)
        assert register_here().run_id == version.run_id
        assert client().get_run(version.run_id).info.lifecycle_stage == "active"
        assert len(versions()) == 1

    def test_a_deleted_version_is_made_again(self, proven: Path) -> None:
        client().delete_model_version(NAME, register_here().version)
        assert int(register_here().version) == 2
        assert file_table(stored()) == file_table(CHECKPOINT)

    def test_kill_9_between_any_two_steps_then_again_is_one_whole_version(self, proven: Path) -> None:
        """Each process goes one step further than the one before it, and is killed there."""
        killed_after = (
            "import os, runpy, sys; from mlflow import MlflowClient\n"
            "step = sys.argv.pop(1); real = getattr(MlflowClient, step)\n"
            "def once(self, *args, **kwargs):\n"
            "    if step == 'log_artifacts':\n"
            "        self.log_artifact(args[0], args[1] + '/model.safetensors', args[2])\n"
            "    elif step != 'set_registered_model_alias':\n"
            "        real(self, *args, **kwargs)\n"
            "    os.kill(os.getpid(), 9)\n"
            "setattr(MlflowClient, step, once)\n"
            "runpy.run_module('stages.register', run_name='__main__')\n"
        )
        for step in ("create_run", "log_artifacts", "create_registered_model", "create_model_version", "set_registered_model_alias"):
            done = subprocess.run([sys.executable, "-c", killed_after, step], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
            assert done.returncode == -signal.SIGKILL, f"{step}: {done.stderr}"
            assert not Path("outputs/register/version.json").exists()
        version = register_here()
        assert len(versions()) == 1
        assert len(client().search_runs([experiment_id(client(), URI, "draftline")])) == 1
        assert file_table(stored()) == file_table(CHECKPOINT)
        assert client().get_run(version.run_id).info.status == "FINISHED"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, proven_template: Path) -> Iterator[str]:
    """A real `mlflow server` that keeps artifacts itself."""
    root = tmp_path_factory.mktemp("mlflow")
    shutil.copy(proven_template / "mlflow.db", root / "server.db")
    with mlflow_server(root, f"sqlite:///{root}/server.db") as uri:
        yield uri


class TestServers:
    def test_the_same_over_http(self, proven: Path, server: str) -> None:
        first, second = register_here(server), register_here(server)
        assert (first.version, first.tags) == (second.version, second.tags)
        assert len(connect(server).search_model_versions(f"name = '{NAME}'")) == 1
        assert not Path("mlartifacts").exists(), "a server keeps the artifacts itself"
        assert [path for path in CHECKPOINT.parent.iterdir() if path.name.startswith(".verify")] == []

    @pytest.mark.parametrize(
        ("uri", "message"),
        [
            ("http://127.0.0.1:1", "cannot connect: .*refused"),
            ("http://user:secret@127.0.0.1:1", r"'http://127\.0\.0\.1:1': cannot connect"),
            ("postgresql://user:secret@127.0.0.1:1/mlflow", r"'postgresql://127\.0\.0\.1:1/mlflow': cannot connect"),
            ("http://no-such-host.invalid", "cannot connect"),
            ("./mlruns", "expected sqlite:///<file>, http"),
            ("sqlite:///no/such/place/mlflow.db", "no such directory: no/such/place"),
            ("sqlite:///params.yaml", "not an SQLite database"),
        ],
    )
    def test_an_address_that_does_not_work_is_one_line_in_seconds(self, proven: Path, uri: str, message: str) -> None:
        started = time.monotonic()
        with pytest.raises(TrackingError, match=message) as refused:
            register_here(uri)
        assert time.monotonic() - started < 15
        assert "secret" not in str(refused.value)
        assert "\n" not in str(refused.value)

    def test_a_server_that_is_no_mlflow(self, proven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        port = free_port()
        other = subprocess.Popen([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            with pytest.raises(TrackingError, match=f"'http://127.0.0.1:{port}': ") as refused:
                register_here(f"http://127.0.0.1:{port}")
            assert "\n" not in str(refused.value)
        finally:
            other.kill()
            other.wait()

    def test_credentials_stay_out_of_what_is_written(self) -> None:
        assert redacted("postgresql://user:p%40ss@db.example:5432/mlflow") == "postgresql://db.example:5432/mlflow"
        assert redacted("https://token@mlflow.example/path") == "https://mlflow.example/path"
        assert redacted(URI) == URI
