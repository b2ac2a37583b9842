"""The house's own rules: which module may import which, how long they are, and what a wheel holds."""
import ast
import re
import subprocess
from pathlib import Path

import pytest

from stepscope import PACKAGE, PROJECT
from stepscope.studies import STUDIES

MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 450
# A module imports what stands above it, or beside it in its own folder.
LAYERS = [
    ["stepscope"], ["stepscope.files", "stepscope.yaml_files"], ["stepscope.config"], ["stepscope.step"],
    ["stepscope.traces"], ["stepscope.runs"],
    ["stepscope.report.style", "stepscope.report.tables", "stepscope.report.schemas",
     "stepscope.report.shapes"], ["stepscope.studies"],
    ["stepscope.report"], ["stepscope.cli"]]
# Names that several modules may know though they stand above: the list of studies, found by name.
ALLOWED = {("stepscope.config", "stepscope.studies"), ("stepscope.runs", "stepscope.step"),
           ("stepscope.config", "stepscope.step")}


def name_of(path: Path) -> str:
    parts = ("stepscope", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> tuple[int, str]:
    """The layer of a module, by the longest name that it begins with."""
    found = [(len(name), place, name) for place, names in enumerate(LAYERS) for name in names
             if module == name or (module.startswith(f"{name}.") and name != "stepscope")]
    if not found:
        pytest.fail(f"{module} is in no layer")
    _, place, name = max(found)
    return place, name


def imports(path: Path) -> set[str]:
    """Modules of ours that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "stepscope":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                there = PACKAGE.joinpath(*inner.split(".")[1:])
                found.add(inner if there.with_suffix(".py").is_file() or there.is_dir() else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "stepscope"}
    return found


def test_modules_import_only_from_layers_above():
    wrong = []
    for path in MODULES:
        own_place, own = layer_of(name_of(path))
        for other in imports(path):
            place, layer = layer_of(other)
            if place > own_place and (own, layer) not in ALLOWED:
                wrong.append(f"{name_of(path)} imports {other}")
    assert not wrong


def test_no_study_knows_another():
    wrong = []
    for study in STUDIES:
        for path in (PACKAGE / "studies" / study).rglob("*.py"):
            wrong += [f"{name_of(path)} imports {other}" for other in imports(path)
                      if other.startswith("stepscope.studies.") and other.split(".")[2] != study]
    assert not wrong


def test_every_study_has_the_same_parts():
    for study in STUDIES:
        folder = PACKAGE / "studies" / study
        for part in ("config.py", "tables.py", "claims.py", "figures.py", "sweep.yaml", "sweep_cpu.yaml"):
            assert (folder / part).is_file(), f"{study} has no {part}"
        assert (PACKAGE / "notebooks" / f"{study}.ipynb").is_file()
        assert (PACKAGE / "report" / "chapters" / "evidence" / f"{study}.md").is_file()
    assert {path.name for path in (PACKAGE / "studies").iterdir() if path.is_dir()} - {"__pycache__"} == set(STUDIES)


def test_modules_fit_a_few_screens():
    long = {name_of(path): lines for path in MODULES if (lines := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long


@pytest.mark.skipif(PROJECT is None, reason="not in a checkout")
def test_a_wheel_holds_all_that_is_read():
    """Every kind of file in the package is one that pyproject.toml names."""
    text = (PROJECT / "pyproject.toml").read_text()
    data = re.search(r"^stepscope = (\[[^\]]*\])", text, re.MULTILINE)
    kinds = {Path(pattern).name.removeprefix("*") for pattern in ast.literal_eval(data[1])} | {".py"}
    listed = subprocess.run(["git", "ls-files", "-o", "-c", "--exclude-standard", "lib/stepscope"], cwd=PROJECT,
                            capture_output=True, text=True, check=True).stdout.split()
    lacking = [name for name in listed if (PROJECT / name).is_file()
               and not any(name.endswith(kind) for kind in kinds)]
    assert not lacking


@pytest.mark.skipif(PROJECT is None, reason="not in a checkout")
def test_no_path_of_a_machine_is_written_down():
    tracked = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout.split()
    machine = re.compile(r"/(?:root|work|tmp/pytest)/|/home/(?!you\b|some)\w+/")
    wrong = [name for name in tracked if Path(name).suffix in (".py", ".md", ".yaml", ".toml", ".ipynb", ".json")
             and (PROJECT / name).is_file() and machine.search((PROJECT / name).read_text(errors="replace"))]
    assert wrong in ([], ["tests/test_house.py"])
