"""Test the command line: exit status, one-line errors and option names."""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from typer.main import get_command

from conftest import RAISES, TINY, put
from stepscope import cli
from stepscope.config import studies
from stepscope.runs import sweep, sweep_file, workers
from stepscope.runs.store import Store
from stepscope.runs.sweep import SweepEnd
from stepscope.runs.sweep_file import find_sweeps, load_sweeps


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command and returns its exit status, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["stepscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return call


@pytest.fixture
def asked(monkeypatch):
    """Return a list that collects the sources and options of sweeps, which don't run; there are no GPUs."""
    calls = []
    monkeypatch.setattr(cli, "gpus_here", list)
    monkeypatch.setattr(cli, "_sweep", lambda sources, runs, options: calls.append((sources, options)) or 0)
    return calls


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["sweep", "nothing"], "nothing: expected a sweep file or the name of a built-in sweep"),
        (["sweep", "reference"], "needs a CUDA GPU"),
        (["sweep", "cpu", "--time-budget", "-1"], "--time-budget"),
        (["sweep", "cpu", "--timeout", "1 day"], "--timeout"),
        (["sweep", "cpu", "--timeout", "0"], "--timeout"),
        (["sweep", "cpu", "--scheduler", "tcp://127.0.0.1:1"], "nothing answers"),
        (["sweep", "cpu", "--scheduler", "not an address"], "expected an address"),
        (["ladder"], "got neither a size nor --shape"),
        (["ladder", "small", "--shape", "8/8/1/1"], "got both a size and --shape"),
        (["ladder", "--shape", "8/8/1/\u0662"], "expected four numbers"),
        (["ladder", "--shape", "9" * 5000 + "/8/1/1"], "expected four numbers"),
        (["ladder", "--shape", "8/8/1/1", "--edition", "2026"], "--edition: got 2026"),
        (["ladder", "2.7B", "--edition", "2026"], "calls 2.7B xl"),
        (["ladder", "nano", "--context", "0"], "context_length: got 0"),
        (["ladder", "nowhere.py:build"], "model: there is no file nowhere.py"),
        (["ladder", "mine.py:"], "expected FILE.py:FUNCTION"),
        (["ladder", "mine.py:build", "--shape", "8/8/1/1"], "use -p NAME=VALUE"),
        (
            ["ladder", "nano", "-p", "batch=1"],
            "-p: got 'batch=1', but -p only applies to your own model",
        ),
        (["ladder", "stepscope.config:configure", "-p", "a=<b>"], "-p: got 'a=<b>', but expected NAME=VALUE"),
        (["fit", "huge"], "known sizes are"),
        (["fit", "small", "--memory", "nan"], "--memory"),
        (["fit", "small", "--memory", "0"], "--memory"),
        (["fit", "small", "--batch", "0"], "batch_size: got 0"),
        (["fit", "small", "--vocab", "9" * 400], "vocab"),
        (["fit", "small", "--edition", "2024"], "editions are 2025 and 2026"),
        (["fit", "--edition", "2024"], "editions are 2025 and 2026"),
        (["fit", "--context", "0"], "context_length: got 0"),
        (["list", "--runs", "/nowhere"], "no such runs folder"),
        (["render", "--runs", "/nowhere"], "/nowhere"),
        (["check", "--runs", "/nowhere"], "/nowhere"),
        (["profile", "/nowhere"], "/nowhere"),
        # a file that exists but can't be read
        (["sweep", "/proc/self/mem"], "/proc/self/mem: Input/output error; expected plain YAML"),
        (["check", "--runs", ".", "--out", ""], "got an empty string"),
    ],
)
def test_invalid_input_exits_with_one_line_error_and_status_2(run, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "ANSWER_S", 1)
    if arguments[0] in ("sweep", "ladder"):
        arguments = [*arguments, "--runs", str(tmp_path / "runs")]
    code, out, err = run(*arguments)
    assert code == 2 and words in re.sub(r"\s+", " ", err) and "Traceback" not in err and not out
    assert "/tmp/" not in err.replace(str(tmp_path), "")  # the message doesn't name a temporary file
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments, wrong, nearest",
    [
        (["ladder", "nano", "--contxt", "64"], "--contxt", "--context"),
        (["fit", "small", "--memry", "80"], "--memry", "--memory"),
        (["sweep", "cpu", "--workrs", "1"], "--workrs", "--workers"),
        (["swep", "cpu"], "'swep'", "'sweep'"),
    ],
)
def test_unknown_name_error_suggests_the_nearest_known_name(run, arguments, wrong, nearest):
    code, out, err = run(*arguments)
    assert code == 2 and wrong in err and nearest in err and not out


@pytest.mark.parametrize("folder, words", [("", "got an empty string"), ("a" * 300, "File name too long")])
@pytest.mark.parametrize("command", [["sweep", "cpu"], ["ladder", "nano"], ["report"], ["list"], ["render"]])
def test_invalid_folder_is_rejected_before_anything_runs(run, monkeypatch, tmp_path, command, folder, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "gpus_here", list)
    code, out, err = run(*command, "--runs", folder)
    assert code == 2 and words in re.sub(r"\s+", " ", err) and not out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "closed, code, words",
    [
        (">/dev/full", 2, "error: output: No space left on device\n"),
        (">&-", 2, "error: output: Bad file descriptor\n"),
        ("| true", 1, ""),
    ],
)
def test_unwritable_output_prints_a_one_line_error(tmp_path, tiny, closed, code, words):
    put(Store(tmp_path), tiny())
    # The process that reads the pipe exits before the program writes anything.
    shell = f"(sleep 0.2; '{sys.executable}' -m stepscope.cli list --runs '{tmp_path}') {closed}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, words)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["2.7B"], ["2.7B, context 512, batch 4, vocabulary 10,000", "65.81"]),
        (["--shape", "64/256/2/4", "--context", "128"], ["micro, context 128", "vocabulary 10,000"]),
        (
            [],
            [
                "128 256 512 1,024",
                "forward + backward",
                "65.81",
                "no 109.70",
                "largest size that fits",
                "forward is inference",
            ],
        ),
        (
            ["--edition", "2026", "--context", "2048", "--batch", "1"],
            ["Peaks in GiB, batch 1", "10B forward (inference)", "2,048"],
        ),
    ],
)
def test_fit_command_does_not_import_torch_when_memory_is_given(arguments, words):
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'pandas', 'numpy')); sys.argv[0] = 'stepscope';"
        "from stepscope.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "fit", *arguments, "--memory", "80"]
    done = subprocess.run(command, capture_output=True, text=True)
    output = " ".join(done.stdout.split())
    assert done.returncode == 0 and "CUDA graph" in output, done.stderr
    assert not [each for each in words if each not in output]


def test_options_have_the_same_name_in_every_command():
    flags: dict[str, set] = {}
    for command in get_command(cli.app).commands.values():
        for parameter in command.params:
            flags.setdefault(parameter.name, set()).add(tuple(parameter.opts))
    assert {name: spellings for name, spellings in flags.items() if len(spellings) > 1} == {}
    assert {"shape", "vocab", "batch", "context", "edition", "runs", "time_budget"} <= flags.keys()


def test_sweep_command_reports_run_counts_and_failure_causes(run, write_sweep, faults, tmp_path):
    path = write_sweep({"study": "benchmark", "fixed": TINY, "axes": {"seed": [0, RAISES]}})
    code, out, err = run("sweep", path, "--runs", tmp_path / "runs", "--time-budget", 0)
    assert code == 75 and "stopped by the time budget; runs left: 2" in err and not out
    code, out, err = run("sweep", path, "--runs", tmp_path / "runs")
    assert code == 1 and "1 done, 0 out of memory, 1 failed" in err and "ValueError: as asked" in err


def test_list_command_reports_altered_runs(run, tmp_path, tiny):
    store = Store(tmp_path / "runs")
    put(store, tiny(), cause="\x1b[31m<b>red", status="failed")
    place = put(store, tiny(seed=1))
    (place / "record.json").write_text("{}")
    (store.root / "benchmark" / "[bold]odd\n").mkdir()
    code, out, err = run("list", "--runs", store.root)
    assert code == 1 and "\x1b" not in out + err and "<b>red" in out
    assert tiny(seed=1).run_id in err and "[bold]odd" in err


def test_default_runs_folder_is_named_after_the_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "PROJECT", tmp_path)
    monkeypatch.setattr(cli, "gpus_here", lambda: [{"name": "NVIDIA H200 (x)"}])
    assert cli._local_runs(None) == tmp_path / "runs" / "local-nvidia-h200-x-"
    monkeypatch.setattr(cli, "gpus_here", list)
    assert cli._local_runs(None) == tmp_path / "runs" / "local-cpu"
    (tmp_path / "runs" / "local-b200").mkdir(parents=True)
    assert cli._local_runs(None, reading=True) == tmp_path / "runs" / "local-b200"
    assert cli._local_runs(tmp_path, reading=True) == tmp_path
    (tmp_path / "runs" / "local-h200").mkdir()
    assert cli._local_runs(None, reading=True) == tmp_path / "runs" / "local-cpu"


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [(1, [], ["tour"]), (2, [], ["tour", "two_gpus"]), (2, ["--workers", 1], ["tour"])],
)
def test_report_also_measures_two_gpus(run, asked, monkeypatch, tmp_path, count, options, expected):
    monkeypatch.setattr(cli, "gpus_here", lambda: [{"name": "NVIDIA H200"}] * count)
    assert run("report", "--runs", tmp_path, *options)[0] == 0
    ((sources, _),) = asked
    assert [path.stem for path in sources] == expected


@pytest.mark.parametrize("command", [["sweep", "cpu"], ["report"]])
def test_timeout_and_time_budget_are_in_minutes(run, asked, tmp_path, command):
    assert run(*command, "--runs", tmp_path, "--timeout", 0.5, "--time-budget", 60)[0] == 0
    assert [(options.timeout_s, options.time_budget_s) for _, options in asked] == [(30, 3600)]


def test_report_command_measures_missing_runs_and_renders_all_runs(
    run, monkeypatch, faults, tmp_path, tiny, write_sweep
):
    path = write_sweep({"study": "benchmark", "fixed": TINY, "axes": {"seed": [0, 1]}})
    store, rendered = Store(tmp_path / "runs"), []
    for seed in (0, 1):
        put(store, tiny(seed=seed))
    monkeypatch.setattr(sweep_file, "find_sweeps", lambda name, device: [path])
    monkeypatch.setattr(cli, "_render", lambda folder, out: rendered.append(folder))
    code, _, err = run("report", "--runs", store.root)
    assert code == 0 and rendered == [store.root] and "2 done" in err
    assert str(store.root / "report.html") in err and "stepscope" in err.rpartition("your own model: ")[2]
    code, _, err = run("ladder", "nano", "--runs", store.root, "--time-budget", 0)
    assert code == 75 and len(rendered) == 2 and "ladder nano ctx64" in err  # finished runs are rendered


@pytest.mark.parametrize(
    "counts, left, code",
    [
        ({"ok": 2}, 0, 0),
        ({"oom": 3}, 0, 0),
        ({"ok": 1, "failed": 4}, 0, 1),
        ({"ok": 2, "failed": 1}, 2, 75),
        ({}, 1, 75),
    ],
)
def test_exit_status_reflects_failed_and_remaining_runs(run, monkeypatch, tmp_path, tiny, counts, left, code):
    end = SweepEnd(Counter(counts), [tiny(seed=7), tiny(seed=9)][:left], "the time budget")
    monkeypatch.setattr(sweep, "run_sweep", lambda *_: end)
    status, _, err = run("sweep", "cpu", "--runs", tmp_path)
    assert status == code
    assert (f"runs left: {left}, beginning with {tiny(seed=7).label}." in err) == (left > 0)


def test_list_command_shows_status_time_notebook_and_cause_of_each_run(run, tmp_path, tiny):
    store = Store(tmp_path / "runs")
    ends = [("ok", 3.4, "a", None), ("failed", 70.6, "b", "it fell"), ("oom", 12.0, "a", "too large")]
    for seed, (status, duration_s, source, cause) in enumerate(ends):
        fields = {"status": status, "duration_s": duration_s, "cause": cause}
        put(store, tiny(seed=seed), **fields, software={"notebook_source": source})
    inconsistent = {"results": {"inconsistent": "it swings"}, "software": {"notebook_source": "c"}}
    put(store, tiny(seed=3), duration_s=9.0, **inconsistent)
    ids = [tiny(seed=seed).run_id for seed in range(4)]
    (store.folder(tiny(seed=1)) / "kernel.log").write_text("Segmentation fault")
    code, out, err = run("list", "--runs", store.root)
    rows = {row[1]: row[3:] for row in (line.split("\t") for line in out.splitlines()[1:])}
    assert code == 0 and [*rows] == sorted(ids)
    assert [rows[name] for name in ids] == [
        ["ok", "3", "a", ""],
        ["failed", "71", "b", f"it fell (see benchmark/{ids[1]}/kernel.log)"],
        ["oom", "12", "a", "too large"],
        ["ok", "9", "c", ""],
    ]
    # failed runs don't count as measured
    assert "2 versions of the notebook (a, c)" in err and f"benchmark/{ids[3]}: inconsistent" in err


@pytest.mark.parametrize(
    ("gpus_gib", "options", "expected"),
    [
        ([], [], (80.0, 2025)),
        ([141.0, 24.0, 80.0], ["--edition", 2026], (24.0, 2026)),
        ([], ["--memory", 48], (48.0, 2025)),
    ],
)
def test_fit_command_defaults_to_the_smallest_gpu_or_80_gib(run, monkeypatch, gpus_gib, options, expected):
    from stepscope.report import fit_table

    monkeypatch.setattr(fit_table, "fit_table", lambda config, *arguments: str(arguments))
    monkeypatch.setattr(cli, "gpus_here", lambda: [{"gib": gib} for gib in gpus_gib])
    code, out, _ = run("fit", "small", "--context", 256, "--batch", 3, *options)
    assert code == 0 and str(expected) in out


@pytest.mark.parametrize("study", [study for study in studies() if study != "your_model"])
def test_study_sweep_without_a_gpu_runs_its_part_of_the_cpu_sweep(run, asked, tmp_path, study):
    code, _, err = run("sweep", study, "--runs", tmp_path)
    ((sources, _),) = asked
    assert code == 0 and err.count("\n") == 1 and f"{study}: this machine has no CUDA GPU" in err
    plan = load_sweeps(sources, "cpu")
    everything = load_sweeps(find_sweeps("cpu"), "cpu")
    assert plan.configs == [config for config in everything.configs if config.study == study]


def test_ladder_command_runs_a_function_with_every_combination_of_arguments(run, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(cli, "_sweep_and_render", lambda sources, runs, options: asked.extend(sources))
    monkeypatch.setenv("STEPSCOPE_MODEL", "")
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "mine.py").write_text("def build(batch=1, width=2): pass")
    monkeypatch.chdir(tmp_path)
    options = ["-p", "batch=1", "-p", "width=4", "-p", "batch=2"]
    assert run("ladder", "mine.py:build", *options, "--runs", tmp_path / "runs")[0] == 0
    configs = load_sweeps(asked, "cpu").configs
    assert [config.arguments for config in configs] == ["batch=1 width=4", "batch=2 width=4"]
    assert {config.model for config in configs} == {"mine:build"}
    assert os.environ["STEPSCOPE_MODEL"] == f"{tmp_path}/mine.py:build"


def test_sweep_of_all_studies_requires_a_gpu_or_a_scheduler(run, asked, tmp_path, write_sweep):
    code, _, err = run("sweep", "cpu", "tour", "--runs", tmp_path)
    assert code == 2 and "tour needs a CUDA GPU" in err and not asked
    own = write_sweep({"study": "benchmark", "fixed": TINY})
    assert run("sweep", "cpu", own, "--runs", tmp_path)[0] == 0
    assert run("sweep", "tour", "benchmark", "--scheduler", "tcp://a:1", "--runs", tmp_path)[0] == 0
    assert [sources for sources, _ in asked] == [
        [*find_sweeps("cpu"), own],
        [*find_sweeps("tour"), *find_sweeps("benchmark")],
    ]
