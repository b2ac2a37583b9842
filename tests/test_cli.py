"""The command line on runs folders, whole and not: one sentence each, and nothing loaded without need."""

import io
import json
import os
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import yaml
from rich.console import Console

from conftest import record_of
from stepscope import StepscopeError, cli
from stepscope.config import configure, varied
from stepscope.report.render import load_data
from stepscope.runs.logs import run_log
from stepscope.runs.one_run import PROJECT
from stepscope.runs.record import RecordError
from stepscope.runs.store import Store
from stepscope.runs.sweep import How, run_sweep
from stepscope.runs.tables import write_table
from stepscope.step import accounting

SHAPES = [{"size": None, "d_model": width, "d_ff": 64, "num_layers": 3, "num_heads": 4} for width in (32, 96)]


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line as its entry point does: exit status, and what it put on its two streams."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["stepscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run


def commit(store, config, notebook='{"cells": []}', **fields):
    with store.writing():
        folder = store.begin(config)
        (folder / "notebook.ipynb").write_text(notebook)
        return store.commit(folder, record_of(config, **fields))


def edit(place, **fields):
    path = place / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# What is loaded


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list", "--help"],
        ["--version"],
        ["list", "--runs", "runs/h200"],
        ["logs", "benchmark/small-ctx128-step-fp32-b05781de", "--runs", "runs/h200"],
    ],
)
def test_what_only_reads_records_loads_neither_torch_nor_pandas(arguments):
    code = (
        "import sys; from stepscope import cli; sys.argv = ['stepscope', *sys.argv[1:]]\n"
        "heavy = {'torch', 'pandas', 'numpy', 'scipy', 'matplotlib', 'papermill', 'jupyter_client'}\n"
        "try: cli.main()\nfinally: print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=PROJECT
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]" and done.stderr == ""


def test_list_asks_no_device_where_one_folder_can_be_meant(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "PROJECT", tmp_path)
    monkeypatch.setattr(cli, "_local_runs", lambda runs: "this machine's")
    assert cli._runs_to_read(tmp_path) == tmp_path and cli._runs_to_read(None) == "this machine's"
    (tmp_path / "runs" / "local-h100").mkdir(parents=True)
    assert cli._runs_to_read(None) == tmp_path / "runs" / "local-h100"
    (tmp_path / "runs" / "local-cpu").mkdir()
    assert cli._runs_to_read(None) == "this machine's"


# Shapes without a name


def test_own_shapes_are_told_apart_in_the_list(store, tiny, command):
    for fields in SHAPES:
        commit(store, tiny(**fields))
    commit(store, tiny())
    status, out, _ = command("list", "--runs", store.root)
    head, *rows = [line.split("\t") for line in out.splitlines()]
    assert status == 0 and sorted(row[head.index("shape")] for row in rows) == [
        "",
        "d32 f64 l3 h4",
        "d96 f64 l3 h4",
    ]
    status, out, _ = command("list", "--runs", store.root, "--where", "size == 'd96 f64 l3 h4'")
    assert status == 0 and len(out.splitlines()) == 2 and "d96 f64 l3 h4" in out


def test_own_shapes_are_told_apart_by_their_labels(tiny):
    labels = [tiny(**fields).label for fields in (*SHAPES, {})]
    assert labels == [
        "benchmark d32-f64-l3-h4 ctx8 step fp32",
        "benchmark d96-f64-l3-h4 ctx8 step fp32",
        "benchmark nano ctx8 step fp32",
    ]
    assert configure("attention", d_model=16, device="cpu", sequences=[8]).label == "attention d16 ctx8 fp32"


def test_the_progress_says_which_shape_is_run(store, tiny, write_sweep, monkeypatch):
    said = []
    update = "stepscope.runs.sweep.Progress.update"
    monkeypatch.setattr(update, lambda self, task, **fields: said.append(fields.get("description", "")))

    def notebook(config, folder, *others):
        (folder / "outcome.json").write_text('{"finished": true}')
        return "ok", None

    blocks = [
        {"study": "benchmark", "fixed": tiny(**fields).model_dump(mode="json", exclude={"study", "size"})}
        for fields in SHAPES
    ]
    run_sweep([write_sweep(yaml.safe_dump(blocks))], store, How(notebook=notebook), Console(quiet=True))
    assert all(any(tiny(**fields).label in line for line in said) for fields in SHAPES)


# Each with one more field than the first: two of one label would print the same line.
VARIED = ({}, {"attention": "sdpa"}, {"optimizer": "fused"}, {"compile": True}, {"batch_size": 3}, {"seed": 1},
          {"attention": "sdpa", "seed": 1}, {"precision": "bf16"}, {"timed_steps": 7})


def test_no_two_runs_print_the_same_line(store, tiny, command, write_sweep):
    configs = [tiny(**fields) for fields in VARIED] + [
        configure("attention", d_model=16, device="cpu", sequences=[8], causal=names) for names in (["eager"], [])]
    told = varied(configs)
    lines = [f"{config.label}, {told[config.study, config.run_id]}" for config in configs]
    assert len(set(lines)) == len(configs)
    assert "attention sdpa" in lines[1] and "attention eager" in lines[0]
    assert told["benchmark", configs[7].run_id] == ""  # its precision stands in its label
    assert varied(configs[:1]) == {("benchmark", configs[0].run_id): ""}
    assert [line.rpartition("causal ")[2] for line in lines[-2:]] == ["eager", "none"]
    for config in configs:
        commit(store, config)
    status, out, _ = command("list", "--runs", store.root)
    head, *rows = [line.split("\t") for line in out.splitlines()]
    readable = [(row[0], row[1].rpartition("-")[0], row[head.index("varied")]) for row in rows]
    assert status == 0 and len(set(readable)) == len(configs)

    def notebook(config, folder, *others):
        (folder / "outcome.json").write_text('{"finished": true}')
        return "ok", None

    blocks = [{"study": "benchmark", "fixed": tiny(**fields).model_dump(mode="json", exclude={"study", "size"})}
              for fields in VARIED]
    said = io.StringIO()
    run_sweep([write_sweep(yaml.safe_dump(blocks))], Store(store.root / "others"), How(notebook=notebook),
              Console(file=said, width=200))
    ended = {line.partition(" (")[0] for line in said.getvalue().splitlines() if line.startswith("benchmark ")}
    assert len(ended) == len(VARIED)


# One bad record


@pytest.mark.parametrize(
    "fields",
    [
        {"config": {}},
        {"config": {"study": ["benchmark"]}},
        {"results": {"parameters": 10**30}},
        {"started_at": "2025-01-02T00:00:00"},
        {"study": "../x"},
        {"tables": {"samples": "samples.csv"}},
        {
            "config": {
                "study": "benchmark",
                "device": "cpu",
                "size": "nano",
                "context_length": 8,
                "seed": 2**64,
            }
        },
        {"config": {"study": "benchmark", "device": "cpu", "size": "nano", "context_length": 10**40}},
        {"config": {"study": "benchmark", "device": "cpu", "size": "nano", "context_length": 8, "old": 1}},
    ],
)
def test_one_record_disables_no_command(fields, store, tiny, command, write_sweep):
    commit(store, tiny(seed=1), status="oom")
    bad = commit(store, tiny(seed=2), status="oom")
    blocks = [
        {
            "study": "benchmark",
            "fixed": tiny().model_dump(mode="json", exclude={"study", "size", "seed"}),
            "axes": {"seed": [1, 2]},
        }
    ]
    write_sweep(blocks)
    edit(bad, **fields)
    name = f"benchmark/{bad.name}/record.json"
    for where in ([], ["--where", "seed == 1"]):
        status, out, err = command("list", "--runs", store.root, *where)
        assert (
            status == 0
            and len(out.splitlines()) == 2
            and err.count("\n") == 1
            and f"{store.root}/{name}: " in err
        )
    data = load_data(store)
    assert [record.config["seed"] for record in data.records] == [1] and [
        str(e).partition(":")[0] for e in data.errors
    ] == [name]
    status, _, err = command("logs", bad.name, "--runs", store.root)
    assert status == 2 and err.startswith(f"error: {name}: ") and err.count("\n") == 1
    assert command("logs", tiny(seed=1).run_id, "--runs", store.root)[0] == 0
    (store.root / "sweeps").mkdir(exist_ok=True)
    (store.root / "sweeps" / "some.yaml").write_text(yaml.safe_dump(blocks))
    status, _, err = command("resume", "--runs", store.root, "--time-budget", "0s")
    assert status == 75 and name in err and "1 left" in " ".join(err.split()) and "Traceback" not in err


def test_what_a_record_says_reaches_the_list_on_one_line_without_control_characters(store, tiny, command):
    commit(store, tiny(), status="failed", cause="out\x1b[2J\nof\tmemory [bold]")
    _, out, _ = command("list", "--runs", store.root)
    assert len(out.splitlines()) == 2 and out.splitlines()[1].endswith("out[2J of memory [bold]")


def test_check_notices_a_notebook_that_is_not_there(tmp_path, command):
    source = next((PROJECT / "runs" / "h200" / "benchmark").glob("small-ctx128-step-fp32-*"))
    place = shutil.copytree(source, tmp_path / "runs" / "benchmark" / source.name)
    for name in ("writeup.md", "writeup.html"):
        (tmp_path / "runs" / name).write_text("")
    (place / "notebook.ipynb").unlink()
    status, _, err = command("check", "--runs", tmp_path / "runs")
    assert status == 2 and re.search("notebook.ipynb: the run's executed notebook is not there", err)


def test_resume_reads_sweeps_that_are_files_of_the_folder(store, tmp_path, command):
    (store.root / "sweeps").mkdir(parents=True)
    os.mkfifo(store.root / "sweeps" / "some.yaml")
    status, _, err = command("resume", "--runs", store.root)
    assert status == 2 and "some.yaml: is no regular file" in err and err.count("\n") == 1


# Logs

OUTPUTS = [
    {"output_type": "stream", "name": "stdout", "text": ["one\n", "\x1b[31mtwo\x1b[0m\x07"]},
    {"output_type": "error", "traceback": ["above", "below"]},
]


def test_a_log_is_what_the_cells_put_out(store, tiny):
    place = commit(
        store, tiny(), json.dumps({"cells": [{"outputs": OUTPUTS}, {}]}), status="failed", cause="why"
    )
    (place / "kernel.log").write_bytes(b"crashed \xff")
    said = run_log(store, tiny().run_id)
    for part in (
        "cause: why",
        "--- stdout\none\ntwo\n",
        "--- traceback\nabove\nbelow\n",
        "process\ncrashed \ufffd\n",
    ):
        assert part in said
    assert "\x1b" not in said and "\x07" not in said


@pytest.mark.parametrize(
    "notebook",
    [
        "[]",
        "{}",
        "",
        "not JSON",
        "7",
        "[" * 100_000,
        '{"cells": 3}',
        '{"cells": [3]}',
        '{"cells": [{"outputs": [{}]}]}',
        '{"cells": [{"outputs": [{"output_type": "stream"}]}]}',
        '{"cells": [{"outputs": [{"output_type": "error", "traceback": [1]}]}]}',
    ],
)
def test_a_notebook_that_is_none_is_one_sentence(notebook, store, tiny, command):
    commit(store, tiny(), notebook)
    status, out, err = command("logs", tiny().run_id, "--runs", store.root)
    assert (status, out) == (
        2,
        "",
    ) and err == f"error: benchmark/{tiny().run_id}/notebook.ipynb: is not a notebook\n"


def test_a_notebook_that_is_huge_or_no_file_is_one_sentence(store, tiny):
    place = commit(store, tiny())
    os.truncate(place / "notebook.ipynb", 2**28 + 1)  # a hole, which takes no space
    with pytest.raises(RecordError, match="notebook.ipynb: cannot be read .it has more than"):
        run_log(store, tiny().run_id)
    (place / "notebook.ipynb").unlink()
    os.mkfifo(place / "notebook.ipynb")
    with pytest.raises(RecordError, match="notebook.ipynb: cannot be read .it is no regular file"):
        run_log(store, tiny().run_id)
    (place / "notebook.ipynb").unlink()
    assert run_log(store, tiny().run_id).startswith(f"benchmark/{tiny().run_id}: ok")


def test_a_table_whose_rows_are_gone_costs_its_run_alone(store, tiny):
    with store.writing():
        folder = store.begin(tiny())
        table = write_table(folder, "samples", pd.DataFrame({"step": [0, 1], "time_ms": [1.0, 2.0]}))
        (folder / "notebook.ipynb").write_text("{}")
        place = store.commit(folder, record_of(tiny(), tables={"samples": table}))
    commit(store, tiny(seed=1), status="oom")
    (place / "samples.csv").write_text("step,time_ms\n")
    data = load_data(store)
    assert [record.config["seed"] for record in data.records] == [1] and len(data.errors) == 1


def test_a_shape_of_very_many_layers_does_not_hold_up_the_list():
    """The peak of an own shape is summed block by block, from formulas that are evaluated once."""
    config = configure(
        "benchmark", device="cuda", d_model=64, d_ff=64, num_layers=3, num_heads=2, context_length=8
    )
    evaluated = []
    original = accounting.value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            accounting, "value", lambda *arguments: (evaluated.append(arguments), original(*arguments))[1]
        )
        few = len(accounting.instants(config)), len(evaluated)
        evaluated.clear()
        many = len(accounting.instants(config.model_copy(update={"num_layers": 300}))), len(evaluated)
    assert many[0] > 50 * few[0] and many[1] == few[1]


def test_a_studys_name_is_its_tiny_models_where_there_is_only_a_cpu(monkeypatch):
    def found(device, *names):
        monkeypatch.setattr("stepscope.config.device_here", lambda asked: device)
        return ["/".join(path.parts[-2:]) for path in cli._named([*names])]
    assert found("cuda", "nsys", "memory") == ["nsys/sweep.yaml", "memory/sweep.yaml"]
    assert found("cpu", "nsys", "memory") == ["nsys/sweep_cpu.yaml", "memory/sweep_cpu.yaml"]
    assert found("cpu", "cpu") == found("cuda", "cpu") and len(found("cuda", "reference")) > 5
    for name in ("reference", "2026"):
        with pytest.raises(StepscopeError, match=f"^{name}: .*CUDA GPU"):
            found("cpu", "nsys", name)
