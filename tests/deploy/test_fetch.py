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

from stages.artifacts import file_table, read_json, read_manifest, write_json
from stages.deploy.__main__ import run as run_deploy
from stages.deploy.fetch import SERVED, VersionError, fetch, prune
from stages.deploy.serve import ready_plan
from stages.errors import DraftlineError, PairError
from stages.params import read_params
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
            "import os, sys; from pathlib import Path; import stages.deploy.fetch as module; from stages.artifacts import read_json\n"
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


class TestStage:
    def deploy(self) -> dict[str, Any]:
        run_deploy(read_params(), Path("outputs/deploy"))
        plan: dict[str, Any] = read_json(Path("outputs/deploy/plan.json"))
        return plan

    def test_the_plan_names_the_registry_s_copy(self, registered: dict[str, Any]) -> None:
        plan = self.deploy()
        assert plan["registered"] == registered
        assert plan["checkpoint"] == str(fetch(registered))
        assert plan["checkpoint"] in plan["argv"][plan["argv"].index("--speculative-config") + 1]
        assert str(CHECKPOINT) not in " ".join(plan["argv"])
        assert plan["argv"][plan["argv"].index("--model") + 1] == plan["verifier"]["directory"]
        assert Path(plan["verifier"]["directory"], "config.json").is_file()

    def test_the_plan_s_checkpoint_and_the_one_before_stay_older_ones_go(self, registered: dict[str, Any]) -> None:
        """They are as large as a drafter, and every registered version leaves one."""
        first = Path(self.deploy()["checkpoint"])
        for age, name in enumerate(["before", "older", "oldest"], 1):
            shutil.copytree(first, SERVED / name)
            os.utime(SERVED / name, (1e9 - age, 1e9 - age))
        self.deploy()
        assert {entry.name for entry in SERVED.iterdir()} == {first.name, "before"}
        assert ready_plan()["checkpoint"] == str(first)

    def test_serving_an_old_checkpoint_again_makes_it_the_newest(self, registered: dict[str, Any]) -> None:
        old = fetch(registered)
        for name in ("current", "later"):
            shutil.copytree(old, SERVED / name)
        os.utime(old, (1e9, 1e9))
        os.utime(SERVED / "later", (2e9, 2e9))
        fetch(registered)
        assert old.stat().st_mtime > 1.5e9
        os.utime(SERVED / "later", (1e9, 1e9))
        assert prune(SERVED / "current") == [SERVED / "later"]

    def test_a_pair_that_the_lock_rejects_gets_no_plan(self, registered: dict[str, Any]) -> None:
        path = Path("outputs/verifier/identity.json")
        identity = read_json(path)
        identity["chat_template"] = "0" * 64
        write_json(path, identity)
        with pytest.raises(PairError, match=r"1 field differs: chat_template"):
            self.deploy()
        assert not Path("outputs/deploy/plan.json").exists()

    def test_the_same_inputs_give_the_same_plan(self, registered: dict[str, Any]) -> None:
        self.deploy()
        first = Path("outputs/deploy/plan.json").read_bytes()
        self.deploy()
        assert Path("outputs/deploy/plan.json").read_bytes() == first

    def test_at_start_a_verifier_that_changed_since_the_plan_is_refused_by_field(self, registered: dict[str, Any]) -> None:
        plan = self.deploy()
        link = Path(plan["verifier"]["directory"])
        copy = Path("verifier").absolute()
        shutil.copytree(link, copy)
        link.unlink()
        link.symlink_to(copy)
        assert ready_plan()["argv"] == plan["argv"], "a moved verifier is the same verifier"
        template = copy / "chat_template.jinja"
        template.write_text(template.read_text(encoding="utf-8") + " ", encoding="utf-8")
        with pytest.raises(PairError, match=r"1 field differs: chat_template"):
            ready_plan()

    def test_at_start_another_engine_than_the_plan_s_is_refused(self, registered: dict[str, Any]) -> None:
        write_json(Path("outputs/deploy/plan.json"), {**self.deploy(), "engine": "vllm 0.1"})
        with pytest.raises(DraftlineError, match=r"plan\.json: made for vllm 0\.1, installed is vllm"):
            ready_plan()

    @pytest.mark.parametrize("option", ["--model", "--speculative-config"])
    def test_at_start_a_plan_that_runs_something_else_than_it_names_is_refused(self, registered: dict[str, Any], option: str) -> None:
        plan = self.deploy()
        plan["argv"][plan["argv"].index(option) + 1] = '{"model": "elsewhere"}'
        write_json(Path("outputs/deploy/plan.json"), plan)
        with pytest.raises(DraftlineError, match=r"plan\.json: argv (does not serve|drafts with elsewhere)"):
            ready_plan()

    @pytest.mark.parametrize("content", [{}, []])
    def test_at_start_a_plan_without_its_keys_is_refused(self, registered: dict[str, Any], content: Any) -> None:
        write_json(Path("outputs/deploy/plan.json"), content)
        with pytest.raises(DraftlineError, match=r"plan\.json: not a serving plan"):
            ready_plan()

    def test_a_stray_file_beside_the_served_ones_is_not_served(self, registered: dict[str, Any]) -> None:
        """vLLM would load it in the place of the drafter's own weights, and nothing but the acceptance would tell."""
        self.deploy()
        directory = fetch(registered)
        shutil.copy(directory / "model.safetensors", directory / "zz.safetensors")
        assert not (fetch(registered) / "zz.safetensors").exists()

    def test_without_a_plan_there_is_nothing_to_serve(self, proven: Path) -> None:
        with pytest.raises(DraftlineError, match=r"outputs/deploy/plan\.json: no such file; run the stage"):
            ready_plan()
