"""The rules of the house (README, "Layout"), held over the whole tree: who may import whom, what the graph declares, one schema, size."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from stages.params import SECTIONS, Params, Section
from stages.params_edit import json_schema
from tests.paths import REPOSITORY

STAGES = ("verifier", "prepare", "extract", "train", "convert", "lock", "gate", "evaluate", "register", "deploy")
LIBRARIES = ("pairing", "drafters", "decoding", "hidden_states", "serving")
LONGEST_MODULE = 400
OBVIOUS = {"seed", "host", "port"}
"""Knobs whose name says all there is to say."""

SOURCES = sorted((REPOSITORY / "stages").rglob("*.py"))
GRAPH: dict[str, Any] = YAML(typ="safe").load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


def trees(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        yield path.relative_to(REPOSITORY), ast.parse(path.read_text(encoding="utf-8"))


def named_modules(tree: ast.Module) -> set[str]:
    """Every module a file imports, at any depth, and every `stages.…` it names in a string (`python -m stages.x`)."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("stages.") and " " not in node.value:
            names.add(node.value.partition(":")[0])
    return names


def stages_named(tree: ast.Module) -> set[str]:
    return {parts[1] for name in named_modules(tree) if (parts := name.split("."))[0] == "stages" and len(parts) > 1 and parts[1] in STAGES}


def test_stages_talk_through_files_never_through_imports() -> None:
    for path, tree in trees("stages"):
        owner = path.parts[1] if len(path.parts) > 2 else ""
        allowed = {owner} if owner in STAGES else set()
        assert stages_named(tree) <= allowed, f"{path} reaches into another stage"


def test_flows_know_no_stage_from_inside() -> None:
    for path, tree in trees("flows"):
        assert not stages_named(tree), f"{path} reaches into a stage; it must run the graph of dvc.yaml"


def test_every_folder_below_stages_is_a_stage_or_a_library() -> None:
    folders = {path.parent.name for path in SOURCES if path.parent.parent.name == "stages"}
    assert folders - {"stages"} <= {*STAGES, *LIBRARIES}


def test_tests_mirror_the_stages() -> None:
    for name in (*STAGES, *LIBRARIES):
        assert list((REPOSITORY / "tests" / name).glob("test_*.py")), f"tests/{name} has no test"


def test_the_graph_has_the_ten_stages_in_order() -> None:
    """`inputs` is part of the prepare stage: it tells DVC about files that dvc.yaml cannot list."""
    assert tuple(name for name in GRAPH if name != "inputs") == STAGES
    assert tuple(GRAPH["inputs"]["params"]) == SECTIONS["inputs"]
    for name, entry in GRAPH.items():
        if name == "inputs":
            continue
        assert entry["cmd"] == f"python -m stages.{name}"
        assert f"stages/{name}" in entry["deps"], f"{name}: its own code is not a dependency"


def is_code(path: Path) -> bool:
    """More than a docstring?"""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)


def module_file(name: str) -> Path | None:
    """The file of a module of `stages`; None for other modules, and for names inside modules."""
    path = REPOSITORY.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if name.startswith("stages.") and file.is_file()), None)


def imported_files(root: str) -> set[Path]:
    """Every file with code below `stages` that running `root` imports, however indirectly; paths relative to the repository.

    vLLM imports the plug-in by its entry point: it counts for whoever hands a drafter to an engine.
    """
    found: set[Path] = set()
    ahead = {root}
    seen: set[str] = set()
    while ahead:
        name = ahead.pop()
        seen.add(name)
        file = module_file(name)
        if file is not None:
            found.add(file.relative_to(REPOSITORY))
            parts = name.split(".")
            packages = {".".join(parts[:end]) for end in range(2, len(parts))}
            ahead |= (packages | named_modules(ast.parse(file.read_text(encoding="utf-8")))) - seen
        if not ahead and {"stages.decoding.engine", "stages.decoding.speculative"} <= seen:
            ahead = {"stages.drafters.vllm_plugin"} - seen
    return {path for path in found if is_code(REPOSITORY / path)}


HOUSEKEEPING = ("errors", "installed", "params", "params_edit", "params_file", "params_train", "process", "processor")
NO_RESULT = {Path("stages", f"{name}.py") for name in HOUSEKEEPING}
"""How a stage starts, fails, learns where it runs and reads its params: DVC compares the params' values themselves."""


@pytest.mark.parametrize("name", ["inputs", *STAGES])
def test_a_stage_lists_the_code_it_runs(name: str) -> None:
    """Code that is imported but not listed would change results and re-run nothing; code that is listed but not imported would re-run for nothing."""
    listed = {Path(dep) for dep in GRAPH[name]["deps"] if dep.startswith("stages/")}
    run = imported_files("stages.prepare.inputs" if name == "inputs" else f"stages.{name}.__main__") - NO_RESULT
    assert {str(path) for path in run if not any(path.is_relative_to(dep) for dep in listed)} == set()
    assert {str(dep) for dep in listed if not any(path.is_relative_to(dep) for path in run)} == set()


def test_the_walk_over_imports_finds_what_is_named_in_strings_and_entry_points() -> None:
    assert Path("stages/hidden_states/connector.py") in imported_files("stages.extract.__main__")
    assert Path("stages/drafters/vllm_dspark.py") in imported_files("stages.evaluate.__main__")
    assert Path("stages/drafters/vllm_dspark.py") not in imported_files("stages.train.__main__")


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_lists_the_params_it_may_read(name: str) -> None:
    """A section that is read but not listed would change results and re-run nothing."""
    assert tuple(GRAPH[name].get("params", ())) == SECTIONS[name]


def outs(entry: dict[str, Any]) -> set[str]:
    items = [*entry.get("outs", ()), *entry.get("metrics", ()), *entry.get("plots", ())]
    return {item if isinstance(item, str) else next(iter(item)) for item in items}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_writes_below_its_own_folder_and_reads_what_earlier_ones_wrote(name: str) -> None:
    assert all(out.startswith(f"outputs/{name}/") for out in outs(GRAPH[name]))
    earlier = set().union(*(outs(GRAPH[stage]) for stage in STAGES[: STAGES.index(name)]), outs(GRAPH["inputs"]))
    assert {dep for dep in GRAPH[name]["deps"] if dep.startswith("outputs/")} <= earlier


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_names_only_outputs_that_the_graph_lists_for_it(name: str) -> None:
    """`OUTPUTS / "<stage>"` in a stage's code, for a stage whose outputs it does not list, is a hidden input."""
    listed = {dep.split("/")[1] for dep in GRAPH[name]["deps"] if dep.startswith("outputs/")} | {name}
    for path, tree in trees(f"stages/{name}"):
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.left, ast.Name) and node.left.id == "OUTPUTS":
                assert isinstance(node.right, ast.Constant), f"{path}:{node.lineno}: spell the stage's name"
                assert node.right.value in listed, f"{path}:{node.lineno}: outputs/{node.right.value} is not in dvc.yaml's deps of {name}"


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_starts_under_its_own_name(name: str) -> None:
    """`stage_main` decides by the name which lock is held and which params are seen."""
    tree = ast.parse((REPOSITORY / "stages" / name / "__main__.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "stage_main"]
    assert [call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)] == [name]


def test_the_root_of_the_graph_starts_without_the_heavy_libraries() -> None:
    """`verifier` runs on every `dvc repro`: with torch or vLLM in it, "nothing changed" would take half a minute."""
    heavy = "torch", "vllm", "transformers", "mlflow", "numpy"
    code = f"import sys, stages.verifier.__main__; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_is_too_long() -> None:
    files = [*SOURCES, *(REPOSITORY / "flows").rglob("*.py"), *(REPOSITORY / "infra").rglob("*.py")]
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_MODULE} == {}


def test_the_schema_file_is_what_the_models_say() -> None:
    assert (REPOSITORY / "params.schema.json").read_text(encoding="utf-8") == json_schema(), "run make schema"


def knobs(model: type[Section] = Params, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and definition of every value of params.yaml."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from knobs(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def test_every_knob_is_described() -> None:
    bare = [name for name, field in knobs() if not field.description and name.rpartition(".")[2] not in OBVIOUS]
    assert bare == []


def test_every_knob_is_read_by_something() -> None:
    read = {
        node.attr
        for folder in ("stages", "flows")
        for path, tree in trees(folder)
        if path.name != "params.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    assert [name for name, _ in knobs() if name.rpartition(".")[2] not in read] == []


def test_profiles_lie_over_the_default_params(tmp_path: Path) -> None:
    from stages.params_edit import use_profile

    profiles = sorted((REPOSITORY / "profiles").glob("*.yaml"))
    assert profiles
    for profile in profiles:
        copy = tmp_path / "params.yaml"
        copy.write_bytes((REPOSITORY / "params.yaml").read_bytes())
        use_profile(profile, copy)


def test_nothing_in_the_tree_names_one_machine() -> None:
    # Split, so that this file does not hold what it looks for; outputs/<stage>/work/ is ours.
    needles = re.compile(r"(?<![\w.}>*])/(?:wo" + "rk|opt/wheels|root|home/\\w+)/|pypi" + r"\.org|python" + r"hosted\.org")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    found = []
    for name in filter(None, listed):
        path = REPOSITORY / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        found += [f"{name}: {match[0]}" for match in needles.finditer(text)]
    assert found == []


def test_dvc_and_params_agree_on_the_defaults() -> None:
    """What dvc.yaml lists must stand in params.yaml: DVC refuses a parameter that the file lacks."""
    data = YAML(typ="safe").load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
    written = {*data, *(f"{section}.{knob}" for section, knobs in data.items() for knob in knobs)}
    listed = {section for sections in SECTIONS.values() for section in sections}
    assert listed <= written, f"add to params.yaml: {sorted(listed - written)}"
    assert json.loads(json_schema())["required"], "the schema names what must be there"
