"""The serving plan of the registered drafter: what it names is what is checked once more when it is started."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import read_json, write_json
from stages.decoding.costs import CostError, this_machine
from stages.deploy.__main__ import run as run_deploy
from stages.deploy.serve import ready_plan
from stages.errors import DraftlineError, PairError
from stages.params import read_params
from stages.serving.fetch import SERVED, fetch, prune
from tests.decoding.tables import table

CHECKPOINT = Path("outputs/convert/checkpoint")


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

    def test_what_evaluate_measured_decides_how_much_is_drafted(self, registered: dict[str, Any]) -> None:
        """Fewer at larger batches; the verifier alone where nothing is gained; nothing where it was measured elsewhere, unless told so."""
        path = Path("outputs/evaluate/report.json")
        report = read_json(path)
        here = {"machine": this_machine("vllm"), "verifier": report["verifier"], "checkpoint": report["checkpoint"]}
        costs = {"table": table().model_copy(update=here).model_dump(mode="json"), "acceptance": {"4": [0.7, 0.45, 0.3, 0.2]}}
        write_json(path, {**report, "costs": costs})
        plan = self.deploy()
        speculative = json.loads(plan["argv"][plan["argv"].index("--speculative-config") + 1])
        assert speculative["num_speculative_tokens_per_batch_size"] == plan["speculation"]
        assert plan["speculation"][0] == [1, plan["speculation"][0][1], 4]
        assert ready_plan()["argv"] == plan["argv"]

        write_json(path, {**report, "costs": {**costs, "acceptance": {"4": [0.01, 0.0, 0.0, 0.0]}}})
        plan = self.deploy()
        assert plan["speculation"] == []
        assert "--speculative-config" not in plan["argv"]
        assert ready_plan()["argv"] == plan["argv"]

        write_json(path, {**report, "costs": {**costs, "table": {**costs["table"], "dtype": "float32"}}})
        with pytest.raises(CostError, match=r"report\.json: measured on another pair: dtype float32 \(here bfloat16\); measure again"):
            self.deploy()
        params = read_params()
        fixed = params.model_copy(update={"deploy": params.deploy.model_copy(update={"speculation": "fixed"})})
        run_deploy(fixed, Path("outputs/deploy"))
        assert read_json(Path("outputs/deploy/plan.json"))["speculation"] is None

    def test_a_stray_file_beside_the_served_ones_is_not_served(self, registered: dict[str, Any]) -> None:
        """vLLM would load it in the place of the drafter's own weights, and nothing but the acceptance would tell."""
        self.deploy()
        directory = fetch(registered)
        shutil.copy(directory / "model.safetensors", directory / "zz.safetensors")
        assert not (fetch(registered) / "zz.safetensors").exists()

    def test_without_a_plan_there_is_nothing_to_serve(self, proven: Path) -> None:
        with pytest.raises(DraftlineError, match=r"outputs/deploy/plan\.json: no such file; run the stage"):
            ready_plan()
