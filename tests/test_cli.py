"""The command line: one sentence and status 2 for what cannot be done, and names that are the same everywhere."""

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
    """Run a command; its exit status, what it printed and what it said beside that."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["stepscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return call


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
        (["ladder"], "got neither, but expected either a size"),
        (["ladder", "small", "--shape", "8/8/1/1"], "got both, but expected either a size"),
        (["ladder", "--shape", "8/8/1/\u0662"], "expected four numbers"),
        (["ladder", "--shape", "9" * 5000 + "/8/1/1"], "expected four numbers"),
        (["ladder", "--shape", "8/8/1/1", "--edition", "2026"], "--edition: got 2026"),
        (["ladder", "2.7B", "--edition", "2026"], "calls 2.7B xl"),
        (["ladder", "nano", "--context", "0"], "context_length: got 0"),
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
        (
            ["sweep", "/proc/self/mem"],
            "/proc/self/mem: Input/output error, expected plain YAML",
        ),  # read by nobody
        (["check", "--runs", ".", "--out", ""], "got an empty string"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(run, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "ANSWER_S", 1)
    if arguments[0] in ("sweep", "ladder"):
        arguments = [*arguments, "--runs", str(tmp_path / "runs")]
    code, out, err = run(*arguments)
    assert code == 2 and words in re.sub(r"\s+", " ", err) and "Traceback" not in err and not out
    assert "/tmp/" not in err.replace(str(tmp_path), "")  # no file that nobody wrote
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
def test_a_name_that_is_none_is_refused_with_the_nearest_that_is_one(run, arguments, wrong, nearest):
    code, out, err = run(*arguments)
    assert code == 2 and wrong in err and nearest in err and not out


@pytest.mark.parametrize("folder, words", [("", "got an empty string"), ("a" * 300, "File name too long")])
@pytest.mark.parametrize("command", [["sweep", "cpu"], ["ladder", "nano"], ["report"], ["list"], ["render"]])
def test_a_folder_that_cannot_be_is_refused_before_anything_runs(
    run, monkeypatch, tmp_path, command, folder, words
):
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
def test_an_output_that_takes_nothing_is_said_in_one_sentence(tmp_path, tiny, closed, code, words):
    put(Store(tmp_path), tiny())
    # Who reads the output has gone before anything is written.
    shell = f"(sleep 0.2; '{sys.executable}' -m stepscope.cli list --runs '{tmp_path}') {closed}; exit ${{PIPESTATUS[0]}}"
    told = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (code, words)


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
def test_fit_needs_no_torch_where_the_memory_is_given(arguments, words):
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'pandas', 'numpy')); sys.argv[0] = 'stepscope';"
        "from stepscope.cli import main; main()"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, "fit", *arguments, "--memory", "80"], capture_output=True, text=True
    )
    said = " ".join(told.stdout.split())
    assert told.returncode == 0 and "CUDA graph" in said, told.stderr
    assert not [one for one in words if one not in said]


def test_one_thing_has_one_name():
    """An option is called the same, and means the same, in every command that has it."""
    meant: dict[str, set] = {}
    for command in get_command(cli.app).commands.values():
        for parameter in command.params:
            meant.setdefault(parameter.name, set()).add(tuple(parameter.opts))
    assert {name: ways for name, ways in meant.items() if len(ways) > 1} == {}
    assert {"shape", "vocab", "batch", "context", "edition", "runs", "time_budget"} <= meant.keys()


def test_sweep_says_what_happened_and_list_what_there_is(run, write_sweep, faults, tmp_path):
    path, runs = (
        write_sweep({"study": "benchmark", "fixed": TINY, "axes": {"seed": [0, RAISES]}}),
        tmp_path / "runs",
    )
    code, out, err = run("sweep", path, "--runs", runs, "--time-budget", 0)
    assert code == 75 and "stopped by the time budget; runs left: 2" in err and not out
    code, out, err = run("sweep", path, "--runs", runs)
    assert code == 1 and "1 done, 0 out of memory, 1 failed" in err and "ValueError: as asked" in err
    code, out, _ = run("list", "--runs", runs)
    header, *rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0 and header[:2] == ["study", "run"] and {row[3] for row in rows} == {"ok", "failed"}


def test_list_names_what_was_altered(run, tmp_path, tiny):
    store = Store(tmp_path / "runs")
    put(store, tiny(), cause="\x1b[31m<b>red", status="failed")
    place = put(store, tiny(seed=1))
    (place / "record.json").write_text("{}")
    (store.root / "benchmark" / "[bold]odd\n").mkdir()
    code, out, err = run("list", "--runs", store.root)
    assert code == 1 and "\x1b" not in out + err and "<b>red" in out
    assert tiny(seed=1).run_id in err and "[bold]odd" in err


def test_a_machines_own_runs_go_into_a_folder_that_git_ignores(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "PROJECT", tmp_path)
    monkeypatch.setattr(cli, "gpus_here", lambda: [{"name": "NVIDIA H200 (x)"}])
    assert cli._local_runs(None) == tmp_path / "runs" / "local-nvidia-h200-x-"
    monkeypatch.setattr(cli, "gpus_here", list)
    assert cli._local_runs(None) == tmp_path / "runs" / "local-cpu"
    (tmp_path / "runs" / "local-b200").mkdir(parents=True)
    assert cli._local_runs(None, reading=True) == tmp_path / "runs" / "local-b200"
    assert cli._local_runs(tmp_path, reading=True) == tmp_path
    (tmp_path / "runs" / "local-h200").mkdir()
    assert cli._local_runs(None, reading=True) == tmp_path / "runs" / "local-cpu", "of two neither is meant"


@pytest.mark.parametrize("command", [["sweep", "cpu"], ["report"]])
def test_the_time_of_a_run_and_of_all_of_them_are_not_confused(run, monkeypatch, tmp_path, command):
    asked = []
    monkeypatch.setattr(cli, "gpus_here", list)
    monkeypatch.setattr(cli, "_sweep", lambda sources, runs, options: asked.append(options) or 0)
    assert run(*command, "--runs", tmp_path, "--timeout", 0.5, "--time-budget", 60)[0] == 0
    assert [(options.timeout_s, options.time_budget_s) for options in asked] == [(30, 3600)]


def test_report_measures_what_is_missing_and_renders(run, monkeypatch, faults, tmp_path, tiny, write_sweep):
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
    assert code == 75 and len(rendered) == 2 and "ladder nano ctx64" in err  # what there is is shown


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
def test_how_a_sweep_ended_is_its_exit_status_and_its_counts(
    run, monkeypatch, tmp_path, tiny, counts, left, code
):
    end = SweepEnd(Counter(counts), [tiny(seed=7), tiny(seed=9)][:left], "the time budget")
    monkeypatch.setattr(sweep, "run_sweep", lambda *_: end)
    found, _, err = run("sweep", "cpu", "--runs", tmp_path)
    assert (
        found == code
        and "{ok} done, {oom} out of memory, {failed} failed".format(
            **{"ok": 0, "oom": 0, "failed": 0} | counts
        )
        in err
    )
    assert (f"runs left: {left}, beginning with {tiny(seed=7).label}." in err) == (left > 0)


def test_list_has_each_runs_own_and_only_those_that_all_filters_fit(run, tmp_path, tiny):
    store = Store(tmp_path / "runs")
    ends = [
        ("ok", 3.4, "a", None),
        ("failed", 70.6, "b", "it fell"),
        ("oom", 12.0, "a", "too large"),
        ("ok", 9.0, "c", None),
    ]
    for seed, (status, lasted, source, cause) in enumerate(ends):
        place = put(
            store,
            tiny(seed=seed, batch_size=1 + seed // 2),
            status=status,
            duration_s=lasted,
            cause=cause,
            software={"notebook_source": source},
            results={"inconsistent": "it swings"} if seed == 3 else {},
        )
        if status == "failed":
            (place / "kernel.log").write_text("Segmentation fault")

    ids = [tiny(seed=seed, batch_size=1 + seed // 2).run_id for seed in range(4)]
    code, out, err = run("list", "--runs", store.root)
    rows = {row[1]: row[3:] for row in (line.split("\t") for line in out.splitlines()[1:])}
    assert code == 0 and [*rows] == sorted(ids)
    assert [rows[name] for name in ids] == [
        ["ok", "3", "a", ""],
        ["failed", "71", "b", f"it fell (see benchmark/{ids[1]}/kernel.log)"],
        ["oom", "12", "a", "too large"],
        ["ok", "9", "c", ""],
    ]
    assert (
        "2 notebook versions (a, c)" in err and f"benchmark/{ids[3]}: inconsistent" in err
    )  # what failed measured nothing


def test_what_fits_is_told_for_the_smallest_gpu_here_or_for_80_gib(run, monkeypatch):
    from stepscope.report import fit_table

    asked = []
    monkeypatch.setattr(
        fit_table,
        "fit_table",
        lambda config, *told: asked.append((config.batch_size, config.context_length, *told)) or "",
    )
    for gpus, options in (
        (list, []),
        (lambda: [{"gib": gib} for gib in (141.0, 24.0, 80.0)], ["--edition", 2026]),
        (list, ["--memory", 48]),
    ):
        monkeypatch.setattr(cli, "gpus_here", gpus)
        assert run("fit", "small", "--context", 256, "--batch", 3, *options)[0] == 0
    assert asked == [(3, 256, 80.0, 2025), (3, 256, 24.0, 2026), (3, 256, 48.0, 2025)]


@pytest.mark.parametrize("study", studies())
def test_study_sweep_is_its_part_of_the_cpu_sweep_without_a_gpu(run, monkeypatch, tmp_path, study):
    asked = []
    monkeypatch.setattr(cli, "gpus_here", list)
    monkeypatch.setattr(cli, "_sweep", lambda sources, runs, options: asked.append(sources) or 0)
    code, _, err = run("sweep", study, "--runs", tmp_path)
    (sources,) = asked
    assert code == 0 and err.count("\n") == 1 and f"{study}: this machine has no CUDA GPU" in err
    plan = load_sweeps(sources, "cpu")
    everything = load_sweeps(find_sweeps("cpu"), "cpu")
    assert plan.configs == [config for config in everything.configs if config.study == study]


def test_sweep_of_all_studies_needs_a_gpu_or_a_scheduler(run, monkeypatch, tmp_path, write_sweep):
    asked = []
    monkeypatch.setattr(cli, "gpus_here", list)
    monkeypatch.setattr(cli, "_sweep", lambda sources, runs, options: asked.append(sources) or 0)
    code, _, err = run("sweep", "cpu", "tour", "--runs", tmp_path)
    assert code == 2 and "tour: needs a CUDA GPU" in err and not asked
    own = write_sweep({"study": "benchmark", "fixed": TINY})
    assert run("sweep", "cpu", own, "--runs", tmp_path)[0] == 0
    assert run("sweep", "tour", "benchmark", "--scheduler", "tcp://a:1", "--runs", tmp_path)[0] == 0
    assert asked == [[*find_sweeps("cpu"), own], [*find_sweeps("tour"), *find_sweeps("benchmark")]]
