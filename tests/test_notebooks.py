"""Test notebooks: tags and names, interactive runs, runs with papermill and in sweeps, and their records."""

import ast
import functools
import importlib
import inspect
import json
import operator
import os
import pydoc
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pandas as pd
import papermill
import pytest
import torch
from rich.console import Console

from cells import NOTEBOOKS, leaks, run_cells
from conftest import TINY, put, record_of
from stepscope import PACKAGE, StepscopeError
from stepscope.config import ConfigError, configure, studies
from stepscope.model import transformer
from stepscope.report.load import read
from stepscope.runs.notebook import Run
from stepscope.runs.record import Record, RecordError, mixed_notebook_warnings
from stepscope.runs.run import make_run
from stepscope.runs.source import Cell, code_cells, notebook_source, source_by_hand
from stepscope.runs.store import Store, StoreBusy, runs_folder
from stepscope.runs.sweep import SweepOptions, run_sweep
from stepscope.runs.sweep_file import SweepError

SET_UP = """import pandas as pd
from stepscope.config import from_notebook
from stepscope.runs.notebook import Run
config = from_notebook("benchmark", globals())
run = Run(config, run_folder, runs)
"""
PARAMETERS = "\n".join(
    [f"{name} = {value!r}" for name, value in TINY.items()] + ['seed = 0\nrun_folder = ""\nruns = ""']
)
KEEP = 'run.keep({"table": pd.DataFrame({"ms": [1.0]})}, {"answer": 42})'
SAY = 'run.conclude("It is **42**.")'
SLIP = 'raise KeyError("the picture")'


def cell(source, *tags):
    return Cell(source, frozenset(tags), [])


def write(folder, *cells, study="benchmark"):
    """Write a notebook that consists of a parameters cell, a set-up cell and these cells; return its path."""
    listed = [cell(PARAMETERS, "parameters"), cell(SET_UP), *cells]
    content = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "cells": [
            {
                "cell_type": "code",
                "id": uuid.uuid4().hex[:8],
                "metadata": {"tags": sorted(one.tags)},
                "source": one.source,
                "outputs": [],
                "execution_count": None,
            }
            for one in listed
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{study}.ipynb"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def run(tmp_path, tiny, monkeypatch):
    """Return a function that runs cells as a sweep's worker does and returns the run's record and folder."""

    def make(*cells, environment=None, **fields):
        monkeypatch.setenv("STEPSCOPE_NOTEBOOKS", str(write(tmp_path / "own", *cells).parent))
        folder = tmp_path / f"r{uuid.uuid4().hex[:4]}"
        folder.mkdir()
        return make_run(tiny(**fields), folder, environment or {}), folder

    return make


# The package's notebooks.


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_papermill_shows_type_and_help_of_every_parameter(path):
    found = papermill.inspect_notebook(path)
    assert all(one["inferred_type_name"] != "None" and one["help"] for one in found.values()), found


@pytest.mark.parametrize("study", studies())
def test_study_notebooks_define_all_fields_as_parameters(study):
    of_study = [
        path
        for path in NOTEBOOKS
        if f'from_notebook("{study}"' in "".join(cell.source for cell in code_cells(path))
    ]
    found = [{*papermill.inspect_notebook(path)} for path in of_study]
    assert all({"run_folder", "runs"} <= names for names in found)
    assert {*studies()[study].tunable_fields()} <= {"context_length"}.union(*found)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_tagged_correctly(path):
    cells = code_cells(path)
    assert not leaks(cells)
    assert all("raises-exception" in cell.tags for cell in cells if cell.shows)


def test_name_that_leaks_from_a_display_cell_is_reported():
    shows = cell("for mode in modes:\n    print(mode)\npicture = draw(lambda own: own)", "show")
    assert leaks([shows, cell("def f(picture):\n    return picture\nfor mode in ():\n    mode")]) == []
    assert leaks([shows, cell("def f():\n    return picture")]) == ["picture of cell 1, read by cell 2"]
    assert leaks([cell("mode = 1"), shows, cell("print(mode)")]) == ["mode of cell 2, read by cell 3"]


# Names in backticks that occur neither in a notebook's code nor in the library.
OTHER_NAMES = {
    "fast_step.py": "a file",
    "pass": "a statement",
    "torchrun": "a command of PyTorch",
    "nsys": "a program",
    "cuda_gpu_trace": "a report of nsys",
    "nvtx_gpu_proj_trace": "a report of nsys",
    "nvtx_kern_sum": "a report of nsys",
    "snapshot.pickle": "a file",
    "sys.last_value.results": "set by Python after an error",
    "attention.implementation": "an attribute that nobody reads",
    "sync": "a value of the column cause",
    "host": "a value of the column cause",
    "call": "a value of the column cause",
    "launch": "a value of the column cause",
    "unnamed": "a value of the column cause",
    "unknown": "a value of the column cause",
}
NAME_IN_BACKTICKS = re.compile(r"@?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\)| ?= ?[^=].*)?")


def names_in_code(source):
    """Return every name that the code binds, reads or uses as a keyword."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "arg", "attr", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                names.add(value)
    return names


@functools.cache
def names_in_library():
    """Return the names in the library's code and table schemas, and the names of the model's regions."""
    names = set(re.findall(r'@region\("([\w.]+)"\)', inspect.getsource(transformer)))
    for path in PACKAGE.rglob("*.py"):
        names |= names_in_code(path.read_text())
    for study in studies():
        schemas = importlib.import_module(f"stepscope.studies.{study}.tables").SCHEMAS
        for schema in schemas.values():
            names |= {*schema.columns}
            for column in schema.columns.values():
                for check in column.checks:
                    names |= {*check.statistics.get("allowed_values", ())}
    return names


def resolves(dotted, imports):
    """Return whether a dotted name can be imported or is an attribute of one of the notebook's imports."""
    first, *rest = dotted.split(".")
    try:
        return bool(pydoc.locate(dotted)) or bool(operator.attrgetter(".".join(rest))(imports[first]))
    except (KeyError, AttributeError):
        return False


def unknown_names(markdown, code):
    """Return the names that a notebook quotes in backticks but that don't exist."""
    imports = {}
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(tree, "imports", "exec"), imports)
    in_code = names_in_code(code)
    unknown = []
    for text in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", markdown, flags=re.S)):
        match = NAME_IN_BACKTICKS.fullmatch(text)
        if match is None or match[1] in in_code | names_in_library() | OTHER_NAMES.keys():
            continue
        first, *attributes = match[1].split(".")
        is_variable = first in in_code and first not in imports
        is_attribute = is_variable and attributes and {*attributes} <= in_code | names_in_library()
        if not is_attribute and not resolves(match[1], imports):
            unknown.append(match[1])
    return unknown


def texts_of(path):
    """Return a notebook's markdown and its code."""
    cells = json.loads(path.read_text())["cells"]
    markdown = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return "\n".join(markdown), "\n".join(cell.source for cell in code_cells(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_name_in_backticks_exists(path):
    assert unknown_names(*texts_of(path)) == []


def test_unknown_name_in_backticks_is_reported():
    code = "import torch\nfrom stepscope import measure\nsize = 'nano'\ntimes = measure.steps(size)"
    known = '`size`, `size = "tiny"`, `measure.steps`, `times(size)`, `torch.compile`, `wall_ms`, `fp32`'
    invented = ["measure.stepping", "contxt_length", "torch.compiled", "wall_mss", "times.wall_mss"]
    text = " ".join(f"`{name}`" for name in invented)
    assert unknown_names(known, code) == []
    assert unknown_names(f"{known} {text}", code) == invented


# The measuring cells' digest.


def test_digest_covers_only_measuring_code(tmp_path):
    def digest(*cells):
        return notebook_source(write(tmp_path, *cells))

    clock = cell("ms = 1 * (end() - start)", "measure")
    plain = digest(clock, cell(KEEP))
    assert digest(cell("ms = 2 * (end() - start)", "measure"), cell(KEEP)) != plain
    assert digest(cell(KEEP), clock) != plain
    for same in [
        (cell("ms = 1 * (end()   - start)  # the clock", "measure"), cell(KEEP)),
        (clock, cell("# prose"), cell(KEEP), cell("draw()", "show", "raises-exception")),
        (clock, cell(KEEP, "any")),
    ]:
        assert digest(*same) == plain
    text = (tmp_path / "benchmark.ipynb").read_text()
    (tmp_path / "benchmark.ipynb").write_text(text.replace("context_length = 8", "context_length = 9"))
    assert notebook_source(tmp_path / "benchmark.ipynb") == plain  # only a default value differs
    # the digest also covers a cell that isn't valid Python
    assert digest(cell("%matplotlib inline"), clock, cell(KEEP)) != plain


def test_digest_of_an_interactive_run_matches_the_notebook_digest_when_only_its_cells_ran(tmp_path):
    path = write(tmp_path, cell("ms = 1", "measure"), cell(KEEP))
    own = [one.source for one in code_cells(path)]
    assert source_by_hand(["", own[0], "# Parameters\nseed = 4\n", *own[1:]], path) == notebook_source(path)
    assert source_by_hand([*own[:2], "ms = 2 * ms()", own[3]], path) != notebook_source(path)


def test_record_without_digest_counts_as_done_and_mixed_digests_are_reported(tiny):
    before, first, second = (
        record_of(tiny(seed=seed), software={"notebook_source": source} if source else {})
        for seed, source in enumerate(["", "a", "b"])
    )
    assert before.matches_notebook("a") and first.matches_notebook("a") and not second.matches_notebook("a")
    assert not mixed_notebook_warnings([before, first, first]) and not mixed_notebook_warnings([before])
    assert "2 versions of the notebook (a, b)" in mixed_notebook_warnings([before, first, second])[0]


# A sweep's runs.

SHOWS = ("show", "raises-exception")


def test_error_in_display_cell_keeps_the_measurement(run):
    record, folder = run(
        cell(SLIP, *SHOWS),
        cell('run.keep({"table": pd.DataFrame({"ms": [1.0]})}, {"kept": True})'),
        cell(SAY),
    )
    assert (
        record.status == "ok" and "only displays results failed: KeyError: 'the picture'" in record.cause
    ), record.cause
    assert record.results == {"kept": True, "finding": "It is **42**."}
    assert pd.read_parquet(folder / record.tables["table"].file)["ms"].tolist() == [1.0]
    assert record.notebook_source == notebook_source(folder / "notebook.ipynb")


def test_changed_notebook_replaces_a_record_only_when_requested(tmp_path, store, write_sweep):
    notebooks = tmp_path / "lab"
    path = write_sweep({"study": "benchmark", "fixed": TINY})

    def sweep(times, comment="", replace=False):
        write(notebooks, cell(f"ms = {times} * 1.0  # {comment}"), cell('run.keep({}, {"ms": ms})'))
        options = SweepOptions(notebooks=notebooks, replace=replace)
        run_sweep([path], store, options, Console(quiet=True))
        return store.records(check_files=True)[0][0]

    first = sweep(1)
    assert first.results == {"ms": 1.0}
    assert sweep(1, "the clock") == first, "a changed comment doesn't make it a different measurement"
    with pytest.raises(SweepError, match="another version of the notebook measured benchmark/"):
        sweep(2)
    assert store.records(check_files=True)[0] == [first]
    doubled = sweep(2, replace=True)
    assert doubled.results == {"ms": 2.0} and doubled.notebook_source != first.notebook_source


# Interactive runs.


def by_papermill(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "papermill", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    return done.returncode, done.stderr


def test_papermill_without_a_sweep_writes_a_readable_run(tmp_path, tiny):
    benchmark = next(path for path in NOTEBOOKS if path.stem == "benchmark")
    given = [part for name, value in TINY.items() for part in ("-p", name, value)]
    code, said = by_papermill(benchmark, "out.ipynb", *given, "-p", "runs", "mine", cwd=tmp_path)
    assert code == 0, said
    found = read(Store(tmp_path / "mine"))
    assert not found.errors and [record.run_id for record in found.records] == [tiny().run_id]
    record = found.records[0]
    assert record.notebook_sha256 is None and record.notebook_source == notebook_source(benchmark)
    assert len(found.tables["benchmark.times"]) and "finding" in record.results
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {".lock", "benchmark"}
    code, said = by_papermill(benchmark, "out.ipynb", "-p", "contxt_length", "128", cwd=tmp_path)
    assert code and "contxt_length: no such parameter; did you mean context_length?" in said


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_rejects_unknown_parameter(path):
    sources = "".join(cell.source for cell in code_cells(path) if not cell.shows)
    assert re.search(r"= from_notebook\(|^require_parameters\(globals\(\)\)", sources, re.MULTILINE)


@pytest.fixture
def by_hand(tiny, tmp_path):
    """Yield a function that starts an interactive run in this process; restore torch's thread count afterwards."""
    threads, before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    yield lambda **fields: Run(tiny(**fields), runs=tmp_path / "mine")
    torch.set_num_threads(threads)
    os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


TABLES = {"table": pd.DataFrame({"ms": [1.0]})}


def test_interactive_run_is_saved_immediately_and_can_be_saved_again(by_hand, tmp_path):
    store = Store(tmp_path / "mine")
    (tmp_path / "trace.csv").write_text("a")
    run = by_hand()
    run.conclude("Nothing is kept yet.")
    assert store.records() == ([], [])
    run.keep(TABLES, {"answer": torch.tensor(42)}, [tmp_path / "trace.csv"])
    (record,), errors = store.records(check_files=True)
    assert (
        not errors
        and record.results == {"answer": 42}
        and record.machine["load"] >= 0
        and set(record.tables) == {"table", "trace.csv"}
    )
    run.conclude("It is 42.")
    run.keep(TABLES)  # run the cell again
    assert store.records(check_files=True)[0][0].results == {}
    with pytest.raises(RecordError, match=r"results\.list"):
        run.keep(TABLES, {"list": [1]})


def test_interactive_run_rejects_unusable_folder_before_measuring(by_hand, tmp_path):
    by_hand(seed=1).keep(TABLES)
    store = Store(tmp_path / "mine")
    with store.writing(), pytest.raises(StoreBusy):
        by_hand()
    record = store.records()[0][0]
    put(Store(tmp_path / "other"), from_record(record), machine={"device_name": "another"})
    with pytest.raises(ConfigError, match="contains runs from 'another'"):
        Run(from_record(record), runs=tmp_path / "other")


def from_record(record: Record):
    return configure(**record.config)


def test_smallest_models_use_one_cpu_thread(by_hand, monkeypatch):
    torch.set_num_threads(2)
    by_hand(context_length=512)
    assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # Dask sets this variable
    by_hand(context_length=256)
    assert torch.get_num_threads() == 1 and os.environ["OMP_NUM_THREADS"] == "1"


def test_runs_folder_is_relative_to_the_project_from_any_subfolder(tmp_path, monkeypatch):
    from stepscope.runs import store

    (tmp_path / "project" / "lab" / "here").mkdir(parents=True)
    monkeypatch.setattr(store, "PROJECT", tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project" / "lab")
    assert runs_folder("runs/mine") == tmp_path / "project" / "runs" / "mine"
    assert runs_folder("here") == Path("here") and runs_folder("/tmp") == Path("/tmp")
    monkeypatch.chdir(tmp_path)
    assert runs_folder("runs/mine") == Path("runs/mine")


# Cells that run in this process.


def test_run_cells_replaces_names_and_rejects_unknown_parameters(by_hand):
    def build(config):
        raise StopIteration(config.context_length)

    with pytest.raises(StopIteration, match="8"):
        run_cells("benchmark", replaced={"TransformerLM": build}, **TINY | {"context_length": 8})
    names = run_cells("benchmark", until="def timed(", **TINY | {"context_length": 9})
    assert names["config"].context_length == 9 and "timed" not in names
    with pytest.raises(LookupError, match="no parameters contxt"):
        run_cells("benchmark", contxt=8)


# A custom study.

OWN = {
    "__init__.py": '"""A study of a user."""\n',
    "config.py": "from typing import Literal\nfrom stepscope.config import StepConfig\n"
    'class Config(StepConfig):\n    study: Literal["mine"] = "mine"\n    slices: int = 1\n',
    "tables.py": "from stepscope.report.schemas import number_column, table_schema, text_column\n"
    'CONFIG = ("size", "context_length", "slices")\n'
    'SCHEMAS = {"times": table_schema(("phase",), phase=text_column(), wall_ms=number_column())}\n',
}


def test_study_needs_only_notebook_config_schema_and_sweep_block(tmp_path, monkeypatch, by_hand):
    """As docs/notebooks.md says, a study doesn't need views, figures, an evidence page or a bundled sweep."""
    from stepscope import studies as package
    from stepscope.report.machine import compose
    from stepscope.runs.sweep_file import find_sweeps, load_sweeps

    folder = tmp_path / "package" / "mine"
    folder.mkdir(parents=True)
    for name, text in OWN.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(package, "STUDIES", (*package.STUDIES, "mine"))
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder.parent)])
    studies.cache_clear()
    try:
        block = {"study": "mine", "fixed": TINY, "axes": {"slices": [1, 2]}}
        configs = load_sweeps([block], "cpu").configs
        notebook = write(
            tmp_path / "notebooks",
            cell("wall_ms = 3.0", "measure"),
            cell('run.keep({"times": pd.DataFrame({"phase": ["total"], "wall_ms": [wall_ms]})})'),
            study="mine",
        )
        notebook.write_text(
            notebook.read_text()
            .replace('from_notebook(\\"benchmark', 'from_notebook(\\"mine')
            .replace("seed = 0", "seed = 0\\nslices = 1")
        )
        for config in configs:
            run_cells(notebook, **TINY, slices=config.slices, runs=str(tmp_path / "runs"))
        found = read(Store(tmp_path / "runs"))
        assert not found.errors and found.tables["mine.times"]["slices"].tolist() == [1, 2]
        assert not compose(found, tmp_path / "runs", tmp_path / "runs").errors
        assert find_sweeps("cpu")
        with pytest.raises(StepscopeError, match="mine: expected a sweep file"):
            find_sweeps("mine")
    finally:
        studies.cache_clear()
        for name in [name for name in sys.modules if name.startswith("stepscope.studies.mine")]:
            del sys.modules[name]


# Matplotlib styles.


def test_rcparams_are_neither_changed_by_the_package_nor_used_by_its_figures():
    code = (
        "import matplotlib as m; before = dict(m.rcParams)\n"
        "import importlib, pkgutil, stepscope\n"
        "for module in pkgutil.walk_packages(stepscope.__path__, 'stepscope.'):\n"
        "    if '.report' in module.name or module.name.endswith('figures'): importlib.import_module(module.name)\n"
        "assert dict(m.rcParams) == before, {k for k in before if before[k] != m.rcParams[k]}\n"
        "from stepscope.report.style import figure, look, svg\n"
        "@look()\n"
        "def draw():\n    made, axes = figure('a message'); axes.plot([1, 2]); return made\n"
        "plain = svg(draw())\n"
        "m.rcParams.update({'lines.linewidth': 9, 'font.size': 30, 'svg.fonttype': 'path'})\n"
        "assert svg(draw()) == plain and m.rcParams['font.size'] == 30\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
