"""What serves comes from the registry, whole and verified, whatever has become of the workspace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import file_table, read_manifest
from stages.serving.fetch import SERVED, VersionError, fetch
from stages.tracking import TrackingError, connect
from tests.paths import REPOSITORY

CHECKPOINT = Path("outputs/convert/checkpoint")


def stored(registered: dict[str, Any]) -> Path:
    uri = connect(registered["tracking_uri"]).get_model_version_download_uri(registered["name"], str(registered["version"]))
    return Path(uri.removeprefix("file://"))


class TestFetch:
    def test_it_needs_nothing_of_the_workspace(self, registered: dict[str, Any]) -> None:
        table = file_table(CHECKPOINT)
        shutil.rmtree("outputs/convert")
        directory = fetch(registered)
        assert file_table(directory) == table
        read_manifest(directory, registered["verifier"])
        assert directory.is_relative_to(SERVED)

    def test_what_is_here_already_is_verified_and_kept(self, registered: dict[str, Any]) -> None:
        before = (fetch(registered) / "model.safetensors").stat()
        after = (fetch(registered) / "model.safetensors").stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)

    def test_a_damaged_copy_is_fetched_again(self, registered: dict[str, Any]) -> None:
        weights = fetch(registered) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        assert file_table(fetch(registered)) == file_table(CHECKPOINT)

    @pytest.mark.parametrize("damage", ["truncated", "altered", "missing file", "no manifest", "all gone"])
    def test_damage_in_the_registry_is_refused(self, registered: dict[str, Any], damage: str) -> None:
        weights = stored(registered) / "model.safetensors"
        content = weights.read_bytes()
        match damage:
            case "truncated":
                weights.write_bytes(content[:-10])
            case "altered":
                weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            case "missing file":
                weights.unlink()
            case "no manifest":
                (stored(registered) / "manifest.json").unlink()
            case _:
                shutil.rmtree(stored(registered))
        with pytest.raises(VersionError, match=r"drafter\.smollm2-135m version 1: its files in the registry are damaged or missing") as refused:
            fetch(registered)
        assert "\n" not in str(refused.value)
        assert list(SERVED.iterdir()) == []

    def test_a_deleted_version_is_refused_even_if_its_files_are_here(self, registered: dict[str, Any]) -> None:
        fetch(registered)
        connect(registered["tracking_uri"]).delete_model_version(registered["name"], "1")
        with pytest.raises(VersionError, match=r"version 1 is not in the registry \(deleted\?\)"):
            fetch(registered)

    def test_another_content_under_the_same_number_is_refused(self, registered: dict[str, Any]) -> None:
        connect(registered["tracking_uri"]).set_model_version_tag(registered["name"], "1", "content", "0" * 64)
        with pytest.raises(VersionError, match="content tag is '0000"):
            fetch(registered)

    def test_an_unreachable_registry_stops_only_what_is_not_here(self, registered: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        away = {**registered, "tracking_uri": "http://127.0.0.1:1"}
        with pytest.raises(TrackingError, match="cannot connect"):
            fetch(away)
        here = fetch(registered)
        assert fetch(away) == here
        assert "using the verified copy in" in capsys.readouterr().err

    def test_the_environment_s_server_goes_first(self, registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """version.json holds no credentials; where the database URL needs some, they come from there."""
        monkeypatch.setenv("MLFLOW_TRACKING_URI", registered["tracking_uri"])
        assert fetch({**registered, "tracking_uri": "http://127.0.0.1:1"}).is_dir()

    def test_kill_9_inside_a_download_leaves_nothing_that_looks_whole(self, registered: dict[str, Any]) -> None:
        code = (
            "import os, sys; from pathlib import Path; import stages.serving.fetch as module; from stages.artifacts import read_json\n"
            "real = module._download\n"
            "def half(uri, source, directory):\n"
            "    real(uri, source, directory); (directory / 'model.safetensors').unlink(); os.kill(os.getpid(), 9)\n"
            "module._download = half\n"
            "module.fetch(read_json(Path('outputs/register/version.json')))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        assert done.returncode == -signal.SIGKILL
        directory = fetch(registered)
        assert file_table(directory) == file_table(CHECKPOINT)
        assert list(SERVED.iterdir()) == [directory]
