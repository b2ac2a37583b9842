"""Sweeps end to end: real notebooks, executed by papermill in real kernels, on the CPU."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from conftest import HUGE, TINY, record_of
from faults import finished, short_notebook
from stepscope import PROJECT, __version__, cli
from stepscope.config import PHASES, configure
from stepscope.runs import one_run, workers
from stepscope.runs.store import Store
from stepscope.runs.sweep import How, _require_same_machine, run_sweep
from stepscope.runs.sweep_file import SweepError
from stepscope.runs.tables import load_table
from stepscope.step.timing import WHOLE

# Stands after the cell that makes the Run. The working notebook's cells are all still there.
TELLS = """
import os, pathlib, sys, tempfile
print("host", os.uname().nodename, "python", sys.prefix, "tmp", tempfile.gettempdir(), "home",
pathlib.Path.home())
"""
# seeds with which a notebook goes wrong that has nothing but this cell
KILLED, RAISES, UNFINISHED = 13, 14, 15
FAULT = f"""
import os, signal
if seed == {KILLED}:
    os.kill(os.getpid(), signal.SIGKILL)
if seed == {RAISES}:
    raise RuntimeError("[enforce] this run was told to fail [/here]")
"""
# What this kernel listens on, by the kernel's own account and by the system's.
SOCKETS = """
import json, os, re
from ipykernel.kernelapp import IPKernelApp
app, listening = IPKernelApp.instance(), []
mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")}
for table in ("tcp", "tcp6"):
    if os.path.exists(f"/proc/self/net/{table}"):
        for line in list(open(f"/proc/self/net/{table}"))[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                listening.append(fields[1])
pathlib.Path("sockets.json").write_text(json.dumps({
    "transport": app.transport, "mode": oct(os.stat(os.path.dirname(app.ip)).st_mode), "listening": listening,
    "for forks": f"0100007F:{app.iopub_thread._pipe_port:04X}"}))
"""


def with_cells(source, target, *cells):
    """A copy of a notebook with code cells after the one that makes the Run."""
    content = json.loads(Path(source).read_text(encoding="utf-8"))
    after = next(i for i, cell in enumerate(content["cells"]) if "Run(config" in "".join(cell["source"]))
    content["cells"][after + 1 : after + 1] = [
        {
            "cell_type": "code",
            "id": f"added-{i}",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": text,
        }
        for i, text in enumerate(cells)
    ]
    Path(target).write_text(json.dumps(content), encoding="utf-8")


def block(*configs):
    return [
        {"study": c.study, "fixed": c.model_dump(mode="json", exclude={"study", "size"})} for c in configs
    ]


def tiny(**fields):
    return configure(**{"study": "benchmark"} | TINY | fields)


OK, OOM, LAST = tiny(), configure("benchmark", **HUGE), tiny(study="warmup", mode="forward_backward")
FAILING = [tiny(study="compile", seed=seed) for seed in (KILLED, RAISES, UNFINISHED)]
ALL = [OK, OOM, *FAILING, LAST]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep in which runs end in every way there is: its folder, its end, and what it said."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "notebooks").mkdir()
    with_cells(
        one_run.NOTEBOOKS / "benchmark.ipynb", folder / "notebooks" / "benchmark.ipynb", TELLS, SOCKETS
    )
    shutil.copy(one_run.NOTEBOOKS / "warmup.ipynb", folder / "notebooks")
    (folder / "notebooks" / "compile.ipynb").write_text(short_notebook(FAULT), encoding="utf-8")
    (folder / "all.yaml").write_text(yaml.safe_dump(block(*ALL)))
    with pytest.MonkeyPatch.context() as patch, (folder / "said").open("w") as said:
        patch.setattr(one_run, "NOTEBOOKS", folder / "notebooks")
        store = Store(folder / "runs")
        end = run_sweep([folder / "all.yaml"], store, console=cli.Console(file=said, width=200))
    return store, end, (folder / "said").read_text()


def test_every_way_to_end_costs_one_run_and_the_sweep_goes_on(swept):
    store, end, said = swept
    assert end.counts == {"ok": 2, "oom": 1, "failed": 3} and end.left == [] and end.stopped_by is None
    assert [store.find(config).status for config in ALL] == ["ok", "oom", "failed", "failed", "failed", "ok"]
    assert [name for name, _ in end.failed] == [f"compile/{config.run_id}" for config in FAILING]
    assert all(cause in said for _, cause in end.failed)
    assert store.records()[1] == [] and not store.partial.exists()


def test_a_runs_record_and_tables_hold_what_was_asked_for(swept):
    store, _, _ = swept
    record = store.find(OK)
    assert record.cause is None and 0 < record.measuring_s < record.duration_s
    assert record.results["parameters"] == 2 * 50 * 32 + 2 * (4 * 32**2 + 3 * 32 * 128 + 2 * 32) + 32
    assert record.machine["device_name"] and record.software["torch"] and record.software["papermill"]
    samples = load_table(store, [record], "samples")
    assert samples[["step", "phase"]].values.tolist() == [
        [i, p] for i in range(2) for p in [*PHASES["step"], WHOLE]
    ]
    ceilings = load_table(store, [record], "ceilings").set_index("ceiling")
    assert set(ceilings.index) == {"matmul_fp32", "matmul_bf16", "copy"} and (ceilings["value"] > 0).all()
    costs = load_table(store, [store.find(LAST)], "costs")
    assert "first step beyond steady" in set(costs["part"]) and costs["time_ms"].notna().all()
    assert {path.name for path in store.folder(OK).iterdir()} == {
        "record.json", "notebook.ipynb", "samples.csv", "ceilings.csv", "sockets.json"}


def test_out_of_memory_is_a_result_with_what_was_being_done(swept):
    record = swept[0].find(OOM)
    assert record.status == "oom" and record.done
    assert re.match(
        "OutOfMemoryError: while building the model: .*allocate 144000000000000 bytes", record.cause
    )
    assert record.config["context_length"] == 12_000_000 and record.machine["device_name"]


def test_failures_say_why(swept):
    causes = [swept[0].find(config).cause for config in FAILING]
    assert causes == ["the notebook's kernel died (killed, or crashed below Python)",
                      "RuntimeError: [enforce] this run was told to fail [/here]",
                      "compile.ipynb ran to its end without Run.finish(...)"]
    for config in FAILING:
        record = swept[0].find(config)
        assert not record.done and record.tables == {}
        assert {path.name for path in swept[0].folder(config).iterdir()} <= {
            "record.json",
            "notebook.ipynb",
            "kernel.log",
        }


def outputs_of(folder):
    return [output for cell in json.loads((folder / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
            for output in cell.get("outputs", [])]


def test_executed_notebooks_show_results_and_failed_ones_the_error(swept):
    store = swept[0]
    assert any("image/png" in output.get("data", {}) for output in outputs_of(store.folder(OK)))
    assert not any(output["output_type"] == "error" for output in outputs_of(store.folder(OK)))
    assert [o["ename"] for o in outputs_of(store.folder(OOM)) if o["output_type"] == "error"] == [
        "OutOfMemoryError"
    ]
    parameters = json.loads((store.folder(OK) / "notebook.ipynb").read_text())["metadata"]["papermill"][
        "parameters"
    ]
    assert configure("benchmark", **{k: v for k, v in parameters.items() if k != "run_folder"}) == OK
    assert parameters["run_folder"] == "."


def test_nothing_that_is_kept_names_this_machine(swept):
    store = swept[0]
    places = {str(store.root), str(one_run.PROJECT), str(Path.home()), sys.prefix, tempfile.gettempdir(),
              os.uname().nodename}
    kept = [path for config in ALL for path in store.folder(config).iterdir()]
    assert sum(path.name == "notebook.ipynb" for path in kept) == len(ALL)
    for path in kept:
        text = path.read_text(encoding="utf-8")
        assert [place for place in places if len(place) > 3 and place in text] == [], path
    said = "".join(
        "".join(output["text"]) for output in outputs_of(store.folder(OK)) if output.get("name") == "stdout"
    )
    assert re.match(r"host \S+ python \S+ tmp \S+ home \S+", said)  # it was there to be found


def test_pictures_are_not_searched_for_paths_and_home_is_found_however_it_is_written(tmp_path, monkeypatch):
    """Base64 can hold "/tmp" by chance; and tracebacks shorten home to a tilde."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp")
    monkeypatch.setattr(one_run, "PROJECT", Path("/home/somebody/project"))  # wherever this checkout is
    monkeypatch.setattr(Path, "home", lambda: one_run.PROJECT.parent)
    text = (
        f"~/{one_run.PROJECT.name}/lib/a.py {one_run.PROJECT}/lib/a.py {one_run.PROJECT.parent}/other /tmp/x"
    )
    outputs = [{"output_type": "display_data", "data": {"image/png": "ab/tmp+cd", "text/plain": [text]}}]
    notebook = tmp_path / "notebook.ipynb"
    notebook.write_text(json.dumps({"metadata": {}, "cells": [{"cell_type": "code", "outputs": outputs}]}))
    one_run._strip_machine(notebook)
    data = outputs_of(tmp_path)[0]["data"]
    assert data == {"image/png": "ab/tmp+cd", "text/plain": ["./lib/a.py ./lib/a.py ~/other <tmp>/x"]}


def test_kernels_talk_over_sockets_in_a_folder_of_their_own(swept):
    sockets = json.loads((swept[0].folder(OK) / "sockets.json").read_text())
    assert (sockets["transport"], sockets["mode"][-3:]) == ("ipc", "700")
    # ipykernel itself opens one port, on the loopback: output of forked children comes in there, under a
    # random key.
    assert sockets["listening"] in ([], [sockets["for forks"]])


def test_failed_runs_are_done_again_and_nothing_else(swept, tmp_path, write_sweep):
    """And a record that was cut short is done again with them."""
    copy = Store(shutil.copytree(swept[0].root, tmp_path / "runs"))
    os.truncate(copy.folder(OK) / "record.json", 100)
    kept = {config.run_id: (copy.folder(config) / "record.json").read_bytes() for config in (OOM, LAST)}
    end = run_sweep([write_sweep(block(OK, OOM, FAILING[0], LAST))], copy, How(notebook=finished))
    assert end.counts == {"ok": 3, "oom": 1} and end.failed == []
    assert copy.find(OK).status == copy.find(FAILING[0]).status == "ok"
    assert [path.name.split("-2")[0] for path in (copy.root / "set-aside").iterdir()] == [
        f"benchmark-{OK.run_id}"
    ]
    assert {
        config.run_id: (copy.folder(config) / "record.json").read_bytes() for config in (OOM, LAST)
    } == kept
    assert copy.find(FAILING[1]).status == "failed"  # not asked for


def test_a_kernel_that_does_not_start_is_a_failed_run(tmp_path, write_sweep, store, monkeypatch):
    kernel = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({"argv": ["false"], "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    end = run_sweep([write_sweep(block(OK))], store)
    assert end.counts == {"failed": 1}
    assert (
        store.find(OK).cause
        == "the notebook's kernel did not start: Kernel died before replying to kernel_info"
    )


def test_a_temporary_folder_that_cannot_be_used_is_named_and_not_the_runs_folder(
    tmp_path, write_sweep, store, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    end = run_sweep([write_sweep(block(OK))], store)
    assert str(tmp_path / "nowhere") in end.stopped_by and "runs folder" not in end.stopped_by
    assert end.left == [OK] and not store.partial.exists()


# What may not go together

def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def h200(tmp_path):
    """A runs folder with one run of a GPU."""
    run = "benchmark/small-ctx128-step-fp32-b05781de"
    shutil.copytree(PROJECT / "runs" / "h200" / run, tmp_path / "h200" / run)
    return tmp_path / "h200"


@pytest.mark.parametrize("words", [["sweep", "{sweep}"], ["report"]])
def test_a_runs_folder_of_another_device_is_refused_and_stays_as_it_is(words, h200, command, write_sweep):
    before = everything(h200)
    status, said = command(*(word.format(sweep=write_sweep(block(OK))) for word in words), "--runs", h200)
    assert status == 2 and said.count("\n") == 1, said
    assert said.startswith(f"error: {h200}: holds runs of 'NVIDIA H200' (cuda), and this sweep's are of ")
    assert everything(h200) == before


def test_a_gpus_runs_do_not_go_into_a_cpus_folder_nor_two_kinds_of_machine_into_one(store):
    gpu = configure("benchmark", **TINY | {"device": "cuda"})
    (store.folder(OK)).mkdir(parents=True)
    record = record_of(OK, machine={"device_name": "a CPU"})
    (store.folder(OK) / "record.json").write_text(record.model_dump_json(), encoding="utf-8")
    with pytest.raises(
        SweepError, match="holds runs of 'a CPU' .cpu., and this sweep's are of 'NVIDIA H200' .cuda."
    ):
        _require_same_machine(store, [gpu], {"device_name": "NVIDIA H200"})
    with pytest.raises(
        SweepError, match="holds runs of 'a CPU' .cpu., and this sweep's are of 'another' .cpu."
    ):
        _require_same_machine(store, [OK], {"device_name": "another"})
    _require_same_machine(store, [OK], {"device_name": "a CPU"})
    with pytest.raises(SweepError, match="asks for runs on cpu and on cuda"):
        _require_same_machine(store, [OK, gpu], {"device_name": "a CPU"})


# Outside of a checkout

def test_a_package_without_notebooks_says_so_before_anything_starts(tmp_path, write_sweep):
    """As an installed wheel that lacks them would: no checkout around it."""
    packages = tmp_path / "lib" / "site-packages"
    shutil.copytree(
        one_run.PACKAGE, packages / "stepscope", ignore=shutil.ignore_patterns("notebooks", "__pycache__")
    )
    done = subprocess.run(
        [sys.executable, "-m", "stepscope.cli", "sweep", str(write_sweep(block(OK))), "--runs", "runs"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"{packages}/stepscope/notebooks: has no notebook of benchmark" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_runs_go_to_the_current_folder_where_there_is_no_checkout(tmp_path, command, monkeypatch):
    assert Path(PROJECT, "lib", "stepscope", "cli.py").samefile(cli.__file__)
    monkeypatch.setattr(cli, "PROJECT", None)
    monkeypatch.chdir(tmp_path)
    assert cli._local_runs(None).parent == tmp_path / "runs"
    monkeypatch.setattr(one_run, "PROJECT", None)
    assert one_run._without_machine(f"{sys.prefix}/lib/x.py") == "<python>/lib/x.py"


# The command line

def test_list_shows_every_run_and_names_what_cannot_be_used(swept, command, tmp_path):
    runs = shutil.copytree(swept[0].root, tmp_path / "runs")
    (Store(runs).folder(OK) / "record.json").write_text("{")
    status, said = command("list", "--runs", runs)
    assert status == 0 and [said.count(f"\t{word}\t") for word in ("ok", "oom", "failed")] == [1, 1, 3]
    assert "[enforce]" in said and f"{OK.run_id}/record.json: not a valid record" in said


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line as its entry point does: exit status and what it said, on one stream."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["stepscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out + re.sub(r" +", " ", printed.err)
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


LONG_ID = "small-ctx1024-forward_backward-fp32-6c04cefa"


@pytest.fixture
def few_runs(tmp_path):
    """Two committed runs: one with a long id, one with a long cause and another run beside it."""
    for run in (f"benchmark/{LONG_ID}", "memory/2.7B-ctx2048-step-bf16-6bd9bff9"):
        shutil.copytree(Path(__file__).parents[1] / "runs" / "h200" / run, tmp_path / "runs" / run)
    record = tmp_path / "runs" / run / "record.json"
    content = json.loads(record.read_text(encoding="utf-8")) | {
        "cause": "out\tof\nmemory " + "and so on " * 20,
        "beside": ["a", "b", "c"],
    }
    record.write_text(json.dumps(content), encoding="utf-8")
    return tmp_path / "runs"


def test_list_into_a_pipe_is_lines_of_the_same_columns(few_runs, command):
    status, said = command("list", "--runs", few_runs)
    head, *lines = [line.split("\t") for line in said.splitlines()]
    assert status == 0 and head == ["study", "run", "shape", "varied", "status", "seconds", "runs beside", "cause"]
    assert [line[:5] for line in lines] == [
        ["benchmark", LONG_ID, "", "", "ok"],
        ["memory", "2.7B-ctx2048-step-bf16-6bd9bff9", "", "", "oom"],
    ]
    assert [len(line) for line in lines] == [8, 8] and lines[1][6] == "3"
    assert re.match(r"predicted peak [\d.]+ GiB; out of memory and so on", lines[1][7])


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_list_on_a_terminal_never_cuts_a_run_id(few_runs, command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, said = command("list", "--runs", few_runs)
    assert status == 0 and LONG_ID in said and "2.7B-ctx2048-step-bf16-6bd9bff9" in said
    assert ("Not shown for want of room: runs beside and seconds" in said) == (columns < 200)
    assert ("runs beside" in said.split("Not shown")[0]) == (columns == 200)


@pytest.mark.parametrize("memory", ["-3", "0", "nan", "inf"])
def test_fit_refuses_a_memory_that_no_gpu_has(command, memory):
    status, said = command("fit", "small", "--memory", memory)
    assert (
        status == 2
        and said.startswith(f"error: --memory: got {memory}, but expected")
        and said.count("\n") == 1
    )


def test_fit_names_the_sizes_and_nothing_that_it_cannot_take(command):
    status, said = command("fit", "huge")
    assert (
        status == 2
        and said.startswith("error: size: got 'huge', but known sizes are small,")
    )


@pytest.mark.parametrize("size, memory", [("10B", "80"), ("small", "100000")])
def test_fit_says_modes_in_words_and_cuts_nothing_at_80_columns(command, monkeypatch, size, memory):
    monkeypatch.setenv("COLUMNS", "80")
    status, said = command("fit", size, "--memory", memory)
    assert status == 0 and said.count("forward + backward") == said.count("full step") == 2
    assert "…" not in said and "forward_backward" not in said and max(map(len, said.splitlines())) <= 80


def test_the_version_is_said_without_loading_torch():
    code = "import sys; from stepscope import cli; sys.argv = ['stepscope', '--version']\ntry: cli.main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"stepscope {__version__}\nFalse\n"


def test_workers_that_cannot_be_had_leave_no_folder(command, tmp_path, monkeypatch):
    for gpus, asked, told in (([], "gpus", "there is no GPU here"), (["0"], "2", "there are 1 GPUs here")):
        monkeypatch.setattr(workers, "gpus_here", lambda: gpus)
        status, said = command("sweep", "cpu", "--workers", asked, "--runs", tmp_path / "new")
        assert status == 2 and told in said and not (tmp_path / "new").exists()


def test_check_of_a_folder_that_was_never_rendered_says_what_to_do(few_runs, command):
    status, said = command("check", "--runs", few_runs)
    assert (status, said) == (
        2,
        f"error: {few_runs}/writeup.md: not there; render it first (stepscope render --runs {few_runs})\n",
    )
    status, said = command("check", "--runs", few_runs, "--out", few_runs.parent)
    assert status == 2 and said.endswith(f"(stepscope render --runs {few_runs} --out {few_runs.parent})\n")


@pytest.fixture
def quick_notebook(tmp_path, monkeypatch):
    """A notebook that is over as soon as its kernel is up, and does what the given line says."""
    def make(line):
        (tmp_path / "notebooks").mkdir(exist_ok=True)
        (tmp_path / "notebooks" / "benchmark.ipynb").write_text(short_notebook(line), encoding="utf-8")
        monkeypatch.setattr(one_run, "NOTEBOOKS", tmp_path / "notebooks")
    return make


FINISH = "import json; json.dump({'finished': True, 'results': {'seed': seed}}, open('outcome.json', 'w'))"


def test_exit_0_when_all_is_done_and_again_when_there_is_nothing_to_do(
    command, write_sweep, tmp_path, quick_notebook, monkeypatch
):
    quick_notebook(FINISH)
    sweep = write_sweep(block(OK))
    monkeypatch.chdir(tmp_path)
    status, said = command("sweep", sweep, "--runs", "runs")  # from here, wherever notebooks are executed
    assert status == 0 and "1 done, 0 out of memory, 0 failed" in said
    quick_notebook("raise RuntimeError('nobody should run this')")
    status, said = command("sweep", sweep, "--runs", tmp_path / "runs")
    assert status == 0 and "1 done, 0 out of memory, 0 failed" in said


def fails_at_first(config, folder, timeout_s, abandoned):
    return (
        ("failed", "a seed of nothing")
        if config.seed == 0
        else finished(config, folder, timeout_s, abandoned)
    )


def test_exit_1_when_a_run_failed(command, write_sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(one_run, "run_notebook", fails_at_first)
    status, said = command("sweep", write_sweep(block(OK, tiny(seed=1))), "--runs", tmp_path / "runs")
    assert status == 1 and "1 done, 0 out of memory, 1 failed" in said
    assert f"failed: benchmark/{OK.run_id}" in said and "a seed of nothing" in said


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["sweep", "{tmp}/nowhere.yaml"], "nowhere.yaml: cannot be read (No such file or directory)"),
        (["sweep", "{tmp}/bad.yaml"], "bad.yaml, block 1: colour: no such field"),
        (["sweep", "{tmp}/twice.yaml"], "twice.yaml: line 2, column 1: the key 'study' is there twice"),
        (
            ["sweep", "{tmp}/bomb.yaml"],
            "bomb.yaml: line 2, column 8: the alias *a stands for something written elsewhere",
        ),
        (
            ["sweep", "{tmp}/deep.yaml"],
            "deep.yaml: line 1, column 31: more than 30 levels are within each other",
        ),
        (["sweep", "{tmp}/many.yaml"], "block 1: axes: their product is more than 100,000 runs"),
        (["sweep", "{tmp}/tf32.yaml"], "precision: got 'tf32', but a CPU has no TF32"),
        (["resume"], "no sweep was begun here"),
        (["sweep", "cpu", "--time-budget", "soon"], "--time-budget: got 'soon'"),
        (["sweep", "cpu", "--timeout", "0s"], "--timeout: got 0"),
        (["sweep", "cpu", "--workers", ""], "--workers: got ''"),
        (["sweep", "cpu", "--workers", "²"], "--workers: got '²'"),
        (["sweep", "cpu", "--scheduler", "nonsense"], "--scheduler: got 'nonsense'"),
        (
            ["sweep", "cpu", "--workers", "2", "--scheduler", ""],
            "--workers and --scheduler: one or the other",
        ),
        (["list", "--where", "1"], "no such runs folder"),
        (["logs", "/etc/passwd"], "is no run's name"),
        (["neighbours", "--of", "one=", "--of", "two={tmp}"], "--of: got one=, two="),
        (["neighbours", "--of", "one={tmp}", "--of", "two={tmp}", "--workers", "2"], "--of and --workers"),
        (["neighbours", "--of", "one={tmp}", "--of", "two={tmp}"], "holds no profiles"),
        (["sweep"], "Missing argument"),
    ],
)
def test_exit_2_and_one_line_when_the_input_is_bad(arguments, told, command, write_sweep, tmp_path):
    write_sweep([{"study": "benchmark", "fixed": TINY | {"colour": "red"}}], "bad.yaml")
    write_sweep(block(OK, tiny(precision="tf32")), "tf32.yaml")
    write_sweep("study: benchmark\nstudy: warmup\n", "twice.yaml")
    write_sweep("study: &a [benchmark, benchmark]\nfixed: *a\n", "bomb.yaml")
    write_sweep("[" * 5_000, "deep.yaml")
    write_sweep(
        [{"study": "benchmark", "axes": {f"axis{i}": list(range(10)) for i in range(10)}}], "many.yaml"
    )
    status, said = command(*(a.format(tmp=tmp_path) for a in arguments), "--runs", tmp_path / "runs")
    assert status == 2 and told in " ".join(said.split()), said
    assert "Traceback" not in said
    if said.startswith("error:"):
        assert said.count("\n") == 1
    assert not list((tmp_path / "runs").glob("*"))  # nothing was started


def test_a_question_that_cannot_be_asked_of_runs(command, tmp_path):
    shutil.copytree(
        Path(__file__).parents[1] / "runs" / "h200" / "benchmark" / "small-ctx128-step-fp32-b05781de",
        tmp_path / "runs" / "benchmark" / "small-ctx128-step-fp32-b05781de",
    )
    for where in ("1", "size", "colour == 1", "x =="):
        status, said = command("list", "--runs", tmp_path / "runs", "--where", where)
        assert status == 2 and said.startswith("error: --where") and said.count("\n") == 1, said
    assert "small" in command("list", "--runs", tmp_path / "runs", "--where", "size == 'small'")[1]


def test_exit_2_when_another_sweep_is_writing(command, write_sweep, tmp_path):
    with Store(tmp_path / "runs").writing():
        status, said = command("sweep", write_sweep(block(OK)), "--runs", tmp_path / "runs")
    assert (
        status == 2
        and said.startswith("error:")
        and "another sweep is writing here" in said
        and said.count("\n") == 1
    )


def takes_its_time(config, folder, timeout_s, abandoned):
    time.sleep(0.4)
    (folder / "outcome.json").write_text(json.dumps({"finished": True, "results": {"seed": config.seed}}))
    return "ok", None


def test_exit_75_when_time_is_up_and_resume_does_the_rest(command, write_sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(one_run, "run_notebook", takes_its_time)
    runs, configs = tmp_path / "runs", [tiny(seed=seed) for seed in range(3)]
    status, said = command("sweep", write_sweep(block(*configs)), "--runs", runs, "--time-budget", "0s")
    assert status == 75 and f"stopped by time budget; 3 left, beginning with {OK.run_id}" in said
    assert f"stepscope resume --runs {runs}" in said and Store(runs).records() == ([], [])
    # The first run is begun in time and takes longer than that; a second would as well.
    status, said = command("resume", "--runs", runs, "--time-budget", "0.3s")
    assert status == 75 and "1 done, 0 out of memory, 0 failed" in said and "2 left" in said
    first = Store(runs).find(OK)
    status, said = command("resume", "--runs", runs)
    assert status == 0 and "3 done" in said
    assert [Store(runs).find(config).results for config in configs] == [{"seed": seed} for seed in range(3)]
    assert Store(runs).find(OK) == first


def test_exit_75_and_one_sentence_on_a_signal_before_the_first_run(tmp_path, write_sweep):
    """While libraries are imported, and while what is there is looked through."""
    code = ("import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # of any shell
            "from stepscope import cli\n"
            "class Signals:  # itself, when this module is first asked for\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name == 'stepscope.runs.sweep_file': os.kill(os.getpid(), signal.SIGINT)\n"
            "sys.meta_path.insert(0, Signals()); cli.main()")
    done = subprocess.run(
        [sys.executable, "-c", code, "sweep", str(write_sweep(block(OK))), "--runs", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 75 and done.stderr.startswith("stopped by SIGINT") and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("workers", [None, "1"])
def test_a_signal_before_the_first_run_leaves_all_runs_and_starts_no_workers(
    workers, write_sweep, store, monkeypatch
):
    monkeypatch.setattr("stepscope.runs.sweep.clear_dead", lambda: signal.raise_signal(signal.SIGTERM))
    end = run_sweep([write_sweep(block(OK, tiny(seed=1)))], store, How(workers=workers, notebook=finished))
    assert end.stopped_by == "SIGTERM" and end.left == [OK, tiny(seed=1)] and store.records() == ([], [])
    assert list((store.root / "sweeps").iterdir()) == [store.root / "sweeps" / "some.yaml"]  # to be resumed


def test_resume_knows_every_sweep_that_was_begun_whatever_its_files_name_ended_in(
    command, write_sweep, tmp_path
):
    for seed, name in enumerate(("one.yaml", "two.yml", "three")):
        file = write_sweep(block(tiny(seed=seed)), name)
        assert command("sweep", file, "--runs", tmp_path / "runs", "--time-budget", "0s")[0] == 75
        file.unlink()
    status, said = command("resume", "--runs", tmp_path / "runs", "--time-budget", "0s")
    assert status == 75 and "3 left" in said
