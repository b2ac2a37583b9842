"""Test the project's rules for module imports, module lengths, source files and the wheel."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope import PACKAGE, PROJECT
from stepscope.studies import STUDIES

MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_NODES = 3300  # nodes of a module's syntax tree; a limit on lines would encourage long lines
# A module may import only from layers above its own, or from its own folder.
LAYERS = [
    ["stepscope"],
    ["stepscope.files", "stepscope.yaml_files", "stepscope.stats"],
    ["stepscope.data_sheets"],
    ["stepscope.config"],
    ["stepscope.model"],
    ["stepscope.traces"],
    ["stepscope.measure"],
    ["stepscope.optimizations"],
    ["stepscope.runs"],
    [
        "stepscope.report.style",
        "stepscope.report.tables",
        "stepscope.report.schemas",
    ],
    ["stepscope.captures", "stepscope.ladder"],
    ["stepscope.studies"],
    ["stepscope.views", "stepscope.figures"],
    ["stepscope.report"],
    ["stepscope.cli"],
]


def name_of(path: Path) -> str:
    parts = ("stepscope", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> tuple[int, str]:
    """Return the number of a module's layer in ``LAYERS``, and the longest entry that matches the module."""
    found = [
        (len(name), place, name)
        for place, names in enumerate(LAYERS)
        for name in names
        if module == name or (module.startswith(f"{name}.") and name != "stepscope")
    ]
    if not found:
        pytest.fail(f"{module} isn't in any layer")
    _, place, name = max(found)
    return place, name


def imports(source: str) -> set[str]:
    """Return the modules of this package that a module's source imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "stepscope":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                path = PACKAGE.joinpath(*inner.split(".")[1:])
                found.add(inner if path.with_suffix(".py").is_file() or path.is_dir() else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "stepscope"}
    return found


def upward(module: str, source: str) -> list[str]:
    """Describe a module's forbidden imports: those from layers below the module's own layer."""
    own, _ = layer_of(module)
    return [f"{module} imports {other}" for other in imports(source) if layer_of(other)[0] > own]


def test_modules_import_only_from_layers_above():
    assert not [wrong for path in MODULES for wrong in upward(name_of(path), path.read_text())]


def test_import_from_lower_layer_is_detected():
    for line in (
        "import stepscope.cli",
        "def f():\n    from stepscope import cli",
        "from stepscope.cli import something",
    ):
        assert upward("stepscope.traces.module", line), line
    assert not upward(
        "stepscope.traces.module", "import stepscope\nimport torch\nfrom stepscope import config"
    )


def test_studies_do_not_import_each_other():
    wrong = []
    for study in STUDIES:
        for path in (PACKAGE / "studies" / study).rglob("*.py"):
            wrong += [
                f"{name_of(path)} imports {other}"
                for other in imports(path.read_text())
                if other.startswith("stepscope.studies.") and other.split(".")[2] != study
            ]
    assert not wrong


def test_study_has_required_files():
    """Claims, figures, an evidence page and bundled sweeps are optional."""
    for study in STUDIES:
        for part in ("config.py", "tables.py"):
            assert (PACKAGE / "studies" / study / part).is_file(), f"{study} has no {part}"
        assert (PACKAGE / "notebooks" / f"{study}.ipynb").is_file()
    assert {path.name for path in (PACKAGE / "studies").iterdir() if path.is_dir()} - {"__pycache__"} == set(
        STUDIES
    )


def count_nodes(source: str) -> int:
    """Count the nodes of a module's syntax tree, excluding ``Load``, ``Store`` and ``Del``."""
    return sum(not isinstance(node, ast.expr_context) for node in ast.walk(ast.parse(source)))


def test_no_module_exceeds_the_node_limit():
    nodes = {name_of(path): count_nodes(path.read_text()) for path in MODULES}
    assert not {name: count for name, count in nodes.items() if count > MAX_NODES}


def _tool(*command: str, stdin: str | None = None) -> tuple[int, str]:
    """Run Python with these arguments in the checkout; return its exit status and its output."""
    done = subprocess.run(
        [sys.executable, *command], cwd=PROJECT, input=stdin, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(PROJECT is None, reason="not in a checkout")
def test_ruff_reports_only_the_planted_error():
    status, output = _tool("-m", "ruff", "check")
    assert status == 0, output
    status, output = _tool("-m", "ruff", "format", "--check")
    assert status == 0, output
    status, output = _tool(
        "-m", "ruff", "check", "--stdin-filename", "lib/stepscope/planted.py", "-", stdin="import os\n"
    )
    assert status == 1 and "F401" in output


@pytest.mark.skipif(PROJECT is None, reason="not in a checkout")
def test_mypy_reports_only_the_planted_error(tmp_path):
    status, output = _tool("tests/typecheck.py")
    assert status == 0, output
    (tmp_path / "planted.py").write_text('x: int = "a"\n')
    status, output = _tool("tests/typecheck.py", str(tmp_path / "planted.py"))
    assert status == 1 and "planted.py:1" in output and "[assignment]" in output


@pytest.mark.skipif(PROJECT is None, reason="not in a checkout")
def test_wheel_includes_every_file_type_of_the_package():
    """Check that pyproject.toml lists the suffix of every file in the package."""
    text = (PROJECT / "pyproject.toml").read_text()
    data = re.search(r"^stepscope = (\[[^\]]*\])", text, re.MULTILINE)
    kinds = {Path(pattern).name.removeprefix("*") for pattern in ast.literal_eval(data[1])} | {".py"}
    listed = subprocess.run(
        ["git", "ls-files", "-o", "-c", "--exclude-standard", "lib/stepscope"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    lacking = [
        name
        for name in listed
        if (PROJECT / name).is_file() and not any(name.endswith(kind) for kind in kinds)
    ]
    assert not lacking


@pytest.mark.skipif(PROJECT is None, reason="not in a checkout")
def test_files_contain_no_machine_specific_paths():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.split()
    machine = re.compile(r"/(?:root|work|tmp/pytest)/|/home/(?!you\b|some)\w+/")
    wrong = [
        name
        for name in tracked
        if Path(name).suffix in (".py", ".md", ".yaml", ".toml", ".ipynb", ".json")
        and (PROJECT / name).is_file()
        and machine.search((PROJECT / name).read_text(errors="replace"))
    ]
    assert wrong in ([], ["tests/test_architecture.py"])
