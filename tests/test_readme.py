"""Test, without a GPU, that the commands in the README and in docs/ do what the text says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from ruamel.yaml import YAML

from conftest import TINY
from stepscope import PACKAGE, PROJECT, cli
from stepscope.config import studies
from stepscope.report.load import load, read
from stepscope.runs.store import Store
from stepscope.runs.sweep_file import load_sweeps

if PROJECT is None:
    pytest.skip("not in a checkout", allow_module_level=True)
ROOT = Path(str(PROJECT))
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
    if path.stem != "writeup"
)

# Commands that the tests below run.
RUN = {
    "make report",
    "make doctor",
    "stepscope fit --memory 80",
    "stepscope ladder --shape 512/2048/8/8",
    "stepscope sweep mine.yaml --runs runs/mine",
    "stepscope render --runs runs/mine",
    "stepscope profile FILE",
    "papermill --help-notebook notebooks/benchmark.ipynb",
    "papermill notebooks/benchmark.ipynb out.ipynb -p size tiny -p context_length 128",
    'papermill notebooks/attention.ipynb out.ipynb -y "context_lengths: [64, 128]"',
    "papermill notebooks/benchmark.ipynb out.ipynb -p runs runs/mine",
    "stepscope sweep context.yaml --runs runs/context --time-budget 20",
    "stepscope sweep context.yaml --runs runs/context",
    "stepscope list --runs runs/context",
    "stepscope render --runs runs/context",
}
# Commands that no test in this file runs, and the reasons.
ELSEWHERE = {
    "stepscope ladder mine.py:build": "test_your_model.py",
    "stepscope ladder mine.py:build --runs runs/mine": "test_your_model.py",
    "stepscope ladder mine.py:build --runs runs/mine -p batch_size=16 -p batch_size=32": "test_your_model.py",
    "git clone --depth 1 REPOSITORY stepscope": "needs the published repository",
    "cd stepscope": "follows the clone",
    "make lab": "test_lab.py runs every notebook in JupyterLab",
    "make test": "runs these tests",
    "make check": "test_check.py",
    "make reference": "overwrites the writeup; test_check.py and test_machine_report.py compare its files",
    "make reference-runs": "needs a GPU, for hours",
    "stepscope sweep reference --runs runs/h200-new": "needs a GPU, for hours",
    "stepscope sweep distributed --runs runs/h200x2": "needs two GPUs",
    "stepscope sweep four_gpus --runs runs/h200x4": "needs four GPUs",
    "make bench": "installs other programs to compare with",
    "make hooks": "changes the clone's git hooks",
    "dask worker tcp://10.0.0.1:8786 --nthreads 2 --resources GPU=2": "needs a GPU; see test_workers.py",
    "dask worker tcp://10.0.0.1:8786 --nthreads 1 --resources RUNS=1": "test_workers.py starts such workers",
}


def fences(document: str, language: str) -> list[str]:
    """Return a document's fenced code blocks in this language."""
    text = (ROOT / document).read_text()
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


def commands(document: str) -> list[str]:
    """Return a document's commands without comments and without the prefix ``.venv/bin/``."""
    lines = [line for block in fences(document, "sh") for line in block.splitlines()]
    stripped = [re.sub(r"\s+#.*", "", line).strip().removeprefix(".venv/bin/") for line in lines]
    return [line for line in stripped if line]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Make a folder that contains the notebooks and sweep files that the commands need, but no runs."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "notebooks").symlink_to(ROOT / "notebooks")
    YAML().dump({"study": "benchmark", "fixed": TINY}, folder / "mine.yaml")
    (context,) = [block for block in fences("docs/sweeps.md", "yaml") if block.startswith("# context.yaml")]
    (folder / "context.yaml").write_text(context)
    return folder


@pytest.fixture
def do(place, monkeypatch, capsys):
    """Return a function that runs a documented command and returns its output."""
    monkeypatch.chdir(place)

    def run(command: str, **replaced: str) -> str:
        assert command in RUN
        program, *arguments = shlex.split(command)
        arguments = [replaced.get(argument, argument) for argument in arguments]
        if program == "stepscope":  # in this process, because importing the modules again would take too long
            code = call(program, *arguments)
            output = "".join(capsys.readouterr())
        else:
            done = program_in(place, sys.executable, "-m", program, *arguments)
            code, output = done.returncode, done.stdout + done.stderr
        assert code == 0, output
        return output

    return run


def call(*arguments: str) -> int:
    """Run the command-line program in this process; return its exit status."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", [*arguments])
        cli.main()
    return int(end.value.code or 0)


def program_in(folder: Path, *command: object) -> subprocess.CompletedProcess:
    """Run a program in a folder with all GPUs hidden."""
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent), "CUDA_VISIBLE_DEVICES": ""},
    )


# -- the documents' texts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documented_command_is_tested_or_excluded_with_a_reason(document):
    assert not {*commands(document)} - RUN - ELSEWHERE.keys()


def test_tested_commands_are_documented():
    assert {*RUN, *ELSEWHERE} == {command for document in DOCUMENTS for command in commands(document)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documented_make_targets_and_commands_exist(document):
    text = (ROOT / document).read_text()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"`(?:\w+=\S+ )?make ([a-z-]+)[^`\n]*`", text)} <= {*targets}
    known = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert {*re.findall(r"`(?:\.venv/bin/)?stepscope ([a-z]+)", text)} <= known


@pytest.mark.parametrize("document", ["docs/notebooks.md", "docs/sweeps.md"])
def test_documented_sweep_files_are_valid(document, place):
    for number, block in enumerate(fences(document, "yaml")):
        # this study doesn't exist until the reader adds it; test_notebooks.py tests it
        if "study: mine" not in block:
            path = place / f"{number}.yaml"
            path.write_text(block)
            assert load_sweeps([path], "cpu").configs


# -- the commands' effects -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_custom_sweep_is_measured_and_rendered(do, place):
    do("stepscope sweep mine.yaml --runs runs/mine")
    do("stepscope render --runs runs/mine")
    swept = place / "runs" / "mine"
    assert len(load(swept)["benchmark.times"])
    assert (swept / "report.md").read_text().startswith("# Your machine next to the reference")
    assert (swept / "report.html").is_file()


def test_fit_command_lists_the_sizes_that_fit(do):
    output = do("stepscope fit --memory 80")
    assert "80" in output and all(size in output for size in ("small", "medium", "large", "xl", "2.7B"))


def test_profile_command_prints_a_summary_and_advice(do):
    output = do("stepscope profile FILE", FILE=str(PACKAGE / "captures" / "example.sqlite.gz"))
    assert re.search("^step on GPU", output, re.MULTILINE) and re.search("^to do", output, re.MULTILINE)


def test_readme_example_reads_tables_as_dataframes(capsys):
    (block,) = fences("README.md", "python")
    names: dict = {}
    exec(block, names)
    assert isinstance(names["steps"], pd.DataFrame) and len(names["steps"]) > 5
    assert "wall_ms" in capsys.readouterr().out


def test_notebook_help_lists_its_parameters(do):
    output = do("papermill --help-notebook notebooks/benchmark.ipynb")
    assert "context_length: int" in output and "sequences" in output


def test_make_doctor_describes_this_machine(capsys):
    assert recipe("doctor") == "stepscope doctor"
    assert call("stepscope", "doctor") == 0
    assert "torch" in capsys.readouterr().out


def recipe(target: str) -> str:
    """Return the command that a make target runs if the virtual environment already exists."""
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.ready", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().removeprefix(".venv/bin/")


# -- tests that take minutes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_make_report_measures_every_study_on_a_cpu(tmp_path):
    assert recipe("report") == "stepscope report"
    done = program_in(tmp_path, sys.executable, "-m", "stepscope.cli", "report", "--runs", "here")
    assert done.returncode == 0, done.stderr
    found = read(Store(tmp_path / "here"))
    assert not found.errors and {record.study for record in found.records} == {*studies()} - {"your_model"}
    assert (tmp_path / "here" / "report.html").is_file()


@pytest.mark.slow
def test_ladder_with_custom_shape_measures_each_optimization(place):
    """Use the small model that the README suggests for a CPU."""
    assert "`--shape 64/128/2/2`" in (ROOT / "README.md").read_text()
    options = ["--shape", "64/128/2/2", "--runs", "runs/shape"]
    done = program_in(place, sys.executable, "-m", "stepscope.cli", "ladder", *options)
    assert done.returncode == 0, done.stderr
    steps = load(place / "runs" / "shape")["ladder.steps"]
    assert (steps["status"] == "ok").sum() > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [command for command in sorted(RUN) if command.startswith("papermill notebooks")]
)
def test_papermill_executes_a_notebook(do, place, command):
    do(command)
    assert (place / "out.ipynb").is_file()
    if "-p runs" in command:
        assert list((place / "runs" / "mine" / "benchmark").glob("*/record.json"))


@pytest.mark.slow
def test_documented_sweep_is_continued_and_rendered(do, place):
    runs = place / "runs" / "context"
    do("stepscope sweep context.yaml --runs runs/context --time-budget 20")
    configs = load_sweeps([place / "context.yaml"], "cpu").configs
    records, _ = Store(runs).records()
    assert {record.run_id for record in records} == {config.run_id for config in configs}
    do("stepscope sweep context.yaml --runs runs/context")
    assert Store(runs).records()[0] == records, "nothing is measured twice"
    listed = do("stepscope list --runs runs/context")
    assert all(record.run_id in listed for record in records)
    do("stepscope render --runs runs/context")
    assert (runs / "report.html").is_file()
