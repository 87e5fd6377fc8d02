"""What people read says what was measured: tables, figures and the last screen of a run, from reports alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import read_json, read_manifest, write_json
from stages.errors import ArtifactError
from stages.evaluate.__main__ import write_reports
from stages.evaluate.report import markdown
from stages.evaluate.summary import drafter_line, summary
from stages.evaluate.tables import table
from stages.params import Evaluate, read_params
from tests.drafters.kinds import write_checkpoint
from tests.evaluate.reports import make_comparison, make_report
from tests.gate.pair import write_drafter
from tests.paths import REPOSITORY

PLOTS = ("acceptance_length", "acceptance_per_position", "sweep", "speed", "calibration")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return make_report()


def test_tables_line_up_as_plain_text() -> None:
    lines = table(("kind", "value"), [("code", "1.5"), ("a longer kind", "12.25")])
    assert len({len(line) for line in lines}) == 1
    assert lines[1].replace("-", "").replace(" ", "") == "||:|"
    assert table(("K", "K"), [("2", "7")])[1] == "| -- | -: |", "a rule without a dash is none"


def test_the_markdown_holds_every_kind_position_and_count(report: dict[str, Any]) -> None:
    text = markdown(report)
    for kind, entry in report["acceptance_length"]["per_kind"].items():
        assert f"| {kind} " in text
        assert f"{entry['value']:.2f}" in text
    for row in report["per_position"]["all"]:
        assert f"{row['accepted']} / {row['reached']}" in text
    assert f"{report['speed']['ratio']['median']:.2f}" in text
    for plot in PLOTS:
        assert f"(plots/{plot}.png)" in text
    assert f"**drafter: {report['verdict']}.** {report['reason']}" in text
    assert "K = 15 left out for drafter" in text
    for cell in report["cells"]:
        assert f"{cell['interval']['estimate']:.2f} [{cell['interval']['low']:.2f}, {cell['interval']['high']:.2f}]" in text


def test_a_comparison_holds_every_drafter_and_who_leads_whom_at_each_temperature(tmp_path: Path) -> None:
    comparison = make_comparison()
    write_reports(comparison, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.count("| dspark over dflash ") == text.count("| dspark over eagle3 ") == 2
    assert "dflash over dspark" not in text
    for drafter in ("dspark", "dflash", "eagle3"):
        assert f"- **{drafter}: " in text
        assert f"### {drafter}, temperature 1" in text


def test_without_the_engine_there_is_acceptance_but_no_speed_and_no_verdict(tmp_path: Path) -> None:
    comparison = make_comparison(engine_too=False)
    write_reports(comparison, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert comparison["verdicts"] == {}
    assert "| dspark over dflash " in text
    assert "nothing was timed" in text
    assert "plots/speed.png" not in text
    assert not (tmp_path / "plots" / "speed.png").exists()


def test_degraded_outputs_stand_at_the_top_of_the_report() -> None:
    report = make_report(settings=Evaluate(temperatures=[0.0, 1.0]), broken=True)
    assert report["failures"] == [line for line in report["failures"] if line.startswith("drafter, temperature 1, K = 7: 15 of 15 outputs are empty")] != []
    assert markdown(report).index(report["failures"][0]) < markdown(report).index("## Acceptance length")


def test_reports_are_written_with_the_figures_they_name_and_equal_numbers_give_equal_files(report: dict[str, Any], tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_reports(report, tmp_path / name)
    names = {str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert names == {"report.json", "report.md", *(f"plots/{plot}.png" for plot in PLOTS)}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / "plots" / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_drafter_that_is_never_right_is_reported_like_any_other(tmp_path: Path) -> None:
    nothing = make_report(scale=0.0)
    write_reports(nothing, tmp_path)
    assert nothing["acceptance_length"]["macro"] == 1.0
    assert "0.0 %" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "–" in (tmp_path / "report.md").read_text(encoding="utf-8")


def write_run(root: Path, verifier: Path, report: dict[str, Any]) -> Path:
    """The outputs of a whole run, as far as the last screen reads them."""
    from stages.pairing.identity import compute_identity

    outputs = root / "outputs"
    identity = compute_identity(verifier)
    write_json(outputs / "verifier" / "identity.json", identity.model_dump(mode="json"))
    write_drafter(outputs / "convert" / "checkpoint", verifier, identity)
    gate = {
        "verdict": "pass",
        "dtypes": {"float32": {"prompts": 24, "identical": 24, "near_tie": 0, "wrong": 0}},
        "parity": {"rounds": 64, "equal_rounds": 64},
    }
    write_json(outputs / "gate" / "report.json", gate)
    write_reports(report, outputs / "evaluate")
    write_json(outputs / "register" / "version.json", {"name": "drafter.tiny", "version": 3})
    return outputs


def test_the_last_screen_answers_what_a_run_is_asked_for(tiny_verifier: Path, tmp_path: Path, report: dict[str, Any]) -> None:
    outputs = write_run(tmp_path, tiny_verifier, report)
    text = summary(outputs, read_params(REPOSITORY / "params.yaml"))
    for expected in (
        "smollm2-135m · LlamaForCausalLM, 6 layers × 64",
        "dspark · 1 layers, Markov rank 64 (vanilla), 4 draft tokens",
        "24 of 24 prompts identical, 0 near-ties, 0 wrong",
        "64 of 64 rounds equal to our own forward",
        "drafter.tiny version 3",
        f"× {report['speed']['ratio']['median']:.2f}",
        "macro average",
        f"{report['verdict']}: {report['reason']}",
        str(outputs / "evaluate" / "plots" / "speed.png"),
    ):
        assert expected in text
    for kind in report["acceptance_length"]["per_kind"]:
        assert kind in text


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        ("eagle3", r"eagle3 · 1 layers, 4 draft tokens, vocabulary 512 · \d+ MB"),
        ("draft_model", r"draft_model · 2 layers, 4 draft tokens, vocabulary 512 · \d+ MB"),
        ("ngram", r"ngram · 1 to 3 tokens looked up, up to 4 draft tokens, no weights"),
    ],
)
def test_every_drafter_is_one_line(algorithm: str, line: str, tiny_verifier: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, algorithm, tiny_verifier)
    assert re.fullmatch(line, drafter_line(read_json(checkpoint / "config.json"), read_manifest(checkpoint)["files"]))


def test_without_a_finished_run_the_last_screen_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"identity\.json"):
        summary(tmp_path / "outputs", read_params(REPOSITORY / "params.yaml"))
