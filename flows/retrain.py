"""Retrain a verifier's drafter: the graph of dvc.yaml, stage by stage, in the verifier's own workspace.

    prefect deployment run 'retrain/default' --param verifier=smollm2-135m --watch

Parameters override params.yaml for this run; they are written into the workspace's params.yaml and committed with dvc.lock
and the metrics. One run per verifier at a time. A stage that fails fails the run, with its own last line as the message.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Literal, cast

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from pydantic import BaseModel

from flows.context import registry, repository, tracking_uri
from flows.errors import FlowError
from flows.graph import stage_names
from flows.parameters import Overrides, write_run_params
from flows.promote import wanted
from flows.registry import CANDIDATE, CHAMPION, Registry
from flows.runs import start_promote
from flows.stage_run import run_stage
from flows.workspace import RECORDS, claimed, commit, ensure, push_data
from stages.artifacts import read_json
from stages.params import PARAMS_FILE, read_params

REGISTER = "register"
RETRIES = {"verifier": 2, REGISTER: 2}
"""Stages that talk to servers; what the others fail at they would fail at again."""
RETRY_SECONDS = 10
HOUR = 3600.0


def _stage(directory: str, name: str, force: bool = False) -> bool:
    """One stage; whether its command ran."""
    logger = get_run_logger()
    ran = run_stage(Path(directory), name, logger.info, force=force)
    if not ran:
        logger.info("nothing that stage %s depends on has changed", name)
    return ran


@flow(name="retrain", log_prints=True)
def retrain(
    verifier: str | None = None,
    overrides: Overrides = Overrides(),  # noqa: B008 - a frozen default; Prefect shows it as the parameter's schema
    busy: Literal["wait", "refuse"] = "refuse",
    wait_seconds: float = HOUR,
    reason: str = "asked for",
) -> dict[str, Any]:
    """Run the whole graph for one verifier and say what came of it.

    Args:
        verifier: short name of the verifier, and of its workspace; None: `verifier.name` of params.yaml.
        overrides: values of params.yaml for this run.
        busy: what to do while another run works for the same verifier; waiting ends after `wait_seconds`.
        reason: why this run was started, for the record.
    Returns:
        The registered version (outputs/register/version.json) and the stages that ran.
    """
    logger = get_run_logger()
    root = repository()
    base = read_params(root / PARAMS_FILE)
    uri = tracking_uri(base)
    name = verifier or base.verifier.name
    if overrides.verifier is not None and overrides.verifier.name not in (None, name):
        raise FlowError(f"parameters: verifier = {name!r} and overrides.verifier.name = {overrides.verifier.name!r} differ")
    known = registry()
    logger.info("retraining the drafter of %s: %s", name, reason)
    with claimed(root, name, busy, wait_seconds):
        folder = ensure(root, name)
        fixed = Overrides.model_validate({"verifier": {"name": name}, "mlflow": {"tracking_uri": uri}})
        write_run_params(root / PARAMS_FILE, folder / PARAMS_FILE, registered_source(known, name), overrides, fixed)
        commit(folder, f"Parameters of a run for {name}: {reason}", PARAMS_FILE.name)
        ran = []
        for stage in stage_names(folder):
            run = task(name=stage, task_run_name=stage, retries=RETRIES.get(stage, 0), retry_delay_seconds=RETRY_SECONDS)(_stage)
            # What was registered once, DVC knows without asking; the registry may have lost it since.
            if run(str(folder), stage) or (stage == REGISTER and forgotten(known, name, folder) and run(str(folder), stage, force=True)):
                ran.append(stage)
        version: dict[str, Any] = read_json(folder / "outputs" / "register" / "version.json")
        commit(folder, f"{version['name']} version {version['version']}", *RECORDS)
        publish_reports(folder, uri, version)
        # It is registered: nothing that becomes of the data may keep it from being served.
        offer(name, version)
        try:
            if push_data(root, folder):
                logger.info("pushed to the default DVC remote")
        except FlowError as error:
            logger.warning("%s; version %s is registered, its data is on this machine alone (dvc push in %s sends it)", error, version["version"], folder)
    return {"version": version, "ran": ran}


def forgotten(known: Registry, name: str, folder: Path) -> bool:
    """Whether the version that a workspace's results name is not in the registry (any more)."""
    version = int(read_json(folder / "outputs" / "register" / "version.json")["version"])
    return version not in [drafter.version for drafter in known.drafters(name)]


def registered_source(known: Registry, name: str) -> BaseModel:
    """Where the verifier that is to be served comes from; nothing where none is registered: then it is params.yaml's."""
    serving = known.serving_verifier(name)
    found = {"verifier": {"source": serving.source, "quantization": serving.quantization}} if serving is not None else {}
    return cast(BaseModel, Overrides.model_validate(found))


def offer(name: str, version: dict[str, Any]) -> None:
    """Have the new version promoted, where the verifier that it was made for is the one to be served."""
    known = registry()
    serving = known.serving_verifier(name)
    if serving is None or serving.digest != version["verifier"]:
        get_run_logger().info("%s version %s: its verifier is not the one to be served; not promoted", version["name"], version["version"])
        return
    champion = known.drafter(name, CHAMPION)
    drafter = wanted(known, name, CANDIDATE, int(version["version"]))
    if champion is None or champion.version != drafter.version:
        start_promote(serving, drafter, champion)


def publish_reports(folder: Path, uri: str, version: dict[str, Any]) -> None:
    """The run's evidence as Prefect artifacts: gate, evaluation, plots, and the way to MLflow."""
    gate: dict[str, Any] = read_json(folder / "outputs" / "gate" / "report.json")
    rows = "\n".join(f"| {key} | {value} |" for key, value in gate.items() if isinstance(value, (str, int, float, bool)))
    create_markdown_artifact(f"| gate | |\n| --- | --- |\n{rows}\n", key="gate", description="greedy decoding with and without the drafter")
    evaluation = folder / "outputs" / "evaluate"
    create_markdown_artifact((evaluation / "report.md").read_text(encoding="utf-8"), key="evaluation")
    plots = [f"![{plot.stem}](data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()})" for plot in sorted((evaluation / "plots").glob("*.png"))]
    create_markdown_artifact("\n\n".join(plots), key="plots")
    link = f"{uri.rstrip('/')}/#/models/{version['name']}/versions/{version['version']}"
    create_link_artifact(link, link_text=f"{version['name']} version {version['version']}", key="mlflow")
