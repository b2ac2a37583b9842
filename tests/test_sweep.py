"""Test sweeps: every run is recorded, finished runs are skipped, and each run uses a GPU exclusively."""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from conftest import (
    BAD_RESULT,
    DIES,
    HANGS,
    KILLS_RUN,
    KILLS_WORKER,
    LACKS_MEMORY,
    PATHS,
    PRINTS,
    RAISES,
    TINY,
    TURNS,
    UNFINISHED,
    ended,
    put,
    record_of,
)
from stepscope.config import StepConfig
from stepscope.model.accounting import peak
from stepscope.runs import run as running
from stepscope.runs import sweep as sweeping
from stepscope.runs.record import LOG, append_outcome, read_outcome
from stepscope.runs.run import MARK, Abandoned, kill_run_processes, make_run, without_machine
from stepscope.runs.sweep import SweepEnd, SweepOptions, plain, run_sweep
from stepscope.runs.sweep_file import SweepError, SweepPlan, peak_gib
from stepscope.runs.workers import WorkersError

HERE = SweepOptions()


@pytest.fixture
def sweep(write_sweep, store, faults):
    """Return a function that sweeps over seeds in this process; its attribute ``output`` is the printed text."""

    def run(seeds, how=HERE, **fields):
        path = write_sweep({"study": "benchmark", "fixed": TINY | fields, "axes": {"seed": seeds}})
        console = Console(
            record=True, width=400, file=io.StringIO(), markup=False, highlight=False, soft_wrap=True
        )
        end = run_sweep([path], store, how, console)
        run.output = console.export_text()
        return end

    return run


def by_seed(store):
    return {record.config["seed"]: record for record in store.records(check_files=True)[0]}


def test_sweep_records_every_run_and_repeats_failed_runs(sweep, store, faults):
    expected = {
        0: "ok",
        RAISES: "failed",
        LACKS_MEMORY: "oom",
        DIES: "failed",
        KILLS_RUN: "failed",
        UNFINISHED: "failed",
        BAD_RESULT: "failed",
        PATHS: "ok",
    }
    end = sweep([*expected], SweepOptions(workers=2))
    records = by_seed(store)
    assert {seed: record.status for seed, record in records.items()} == expected
    assert records[RAISES].cause == "ValueError: as asked" and "died" in records[DIES].cause
    assert "killed by SIGKILL" in records[KILLS_RUN].cause
    assert "Run.keep" in records[UNFINISHED].cause and "results.list" in records[BAD_RESULT].cause
    assert end.counts == {"ok": 2, "oom": 1, "failed": 5} and not end.left
    assert re.search(r"\): seed 9(?: \(about|$)", sweep.output, re.MULTILINE)  # the text contains no markdown
    lines = [line for line in sweep.output.splitlines() if re.match(r"\d/8 ", line)]
    has_estimate = [bool(re.search(r" \(about \d+ min left\)$", line)) for line in lines]
    assert has_estimate == [True] * 7 + [False]
    assert not store.partial.exists() and not list(store.root.rglob("tmp"))

    before = {path: path.read_bytes() for path in store.root.rglob("record.json")}
    (faults / "mended").touch()
    (faults / "began").unlink()
    assert sweep([0, RAISES, LACKS_MEMORY]).counts == {"ok": 2, "oom": 1}
    assert [line.split()[0] for line in (faults / "began").read_text().splitlines()] == [str(RAISES)]
    changed = [path for path, content in before.items() if path.read_bytes() != content]
    assert [json.loads(before[path])["config"]["seed"] for path in changed] == [RAISES]


def test_progress_shows_what_a_notebook_prints_while_it_runs(write_sweep, store, faults):
    class Terminal(io.StringIO):
        def write(self, text):
            if "half done" in text:
                (faults / "shown").touch()  # the notebook waits for this file
            return super().write(text)

    terminal = Terminal()
    path = write_sweep({"study": "benchmark", "fixed": TINY | {"seed": PRINTS}})
    options = SweepOptions(progress=True, timeout_s=60)
    end = run_sweep([path], store, options, Console(file=terminal, markup=False, highlight=False))
    assert end.counts == {"ok": 1} and terminal.getvalue().splitlines()[1] == "  half done"


def test_executed_notebook_contains_no_machine_paths(sweep, store, tiny, tmp_path):
    sweep([PATHS])
    place = store.folder(tiny(seed=PATHS))
    text = (place / "notebook.ipynb").read_text() + (place / "record.json").read_text()
    printed = json.loads((place / "notebook.ipynb").read_text())["cells"][-1]["outputs"][0]["text"][0]
    assert printed.startswith("<run> <python> ~ ") and printed.endswith(" <tmp>\n")
    for name in (str(tmp_path), sys.prefix, str(Path.home()), os.uname().nodename):
        assert len(name) < 4 or name not in text
    assert not (place / LOG).exists()


def test_run_is_killed_at_its_time_limit(sweep, store, faults):
    end = sweep([HANGS], SweepOptions(timeout_s=0.5))
    assert end.counts == {"failed": 1} and "exceeded the time limit of 0.5 s" in by_seed(store)[HANGS].cause


def test_abandoned_run_is_killed_with_its_children(store, faults, tiny):
    folder = store.new_staging_folder()
    with pytest.raises(Abandoned):
        make_run(tiny(seed=HANGS), folder, {}, abandoned=(faults / "child").exists)
    assert ended(int((faults / "child").read_text()))
    assert ended(int((faults / "began").read_text().split()[1]))


def test_only_processes_of_runs_in_the_folder_are_killed(tmp_path):
    within, beside = (
        subprocess.Popen(["sleep", "1000"], env=os.environ | {MARK: f"{tmp_path}/{place}"})
        for place in ("a/b", "a2")
    )
    try:
        kill_run_processes(tmp_path / "a")
        assert within.wait(30) == -9 and beside.poll() is None
    finally:
        for process in (within, beside):
            process.kill()
            process.wait()


def test_run_is_repeated_once_when_its_worker_dies(sweep, store, faults):
    end = sweep([KILLS_WORKER, 0])
    assert end.counts == {"ok": 1, "failed": 1}
    assert "the worker died" in by_seed(store)[KILLS_WORKER].cause
    began = [line.split()[0] for line in (faults / "began").read_text().splitlines()]
    assert began == [str(KILLS_WORKER)] * 2 + ["0"]
    assert "running it again" in sweep.output
    assert ended(int((faults / "child").read_text()))


def test_no_run_starts_after_the_time_budget_is_used_up(sweep, store, monkeypatch):
    end = sweep([0, 30], SweepOptions(time_budget_s=0))
    assert end.stopped_by == "the time budget" and len(end.left) == 2 and not store.records()[0]
    # The run in progress may exceed the budget, and is kept.
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(sweeping, "monotonic", lambda: next(clock, 99.0))
    end = sweep([0, 30], SweepOptions(time_budget_s=50))
    assert end.stopped_by == "the time budget" and len(end.left) == 1 and end.counts == {"ok": 1}


@pytest.fixture
def gpus(monkeypatch, faults):
    """Simulate two GPUs."""
    found = [{"visible": name, "name": "H200", "gib": 80.0} for name in ("GPU-aaaa", "MIG-bbbb")]
    monkeypatch.setattr(sweeping, "gpus_here", lambda: found)
    (faults / "device").write_text("H200")


def test_each_run_uses_a_gpu_exclusively(sweep, store, faults, gpus):
    end = sweep([TURNS, *range(11, 18)], device="auto")
    assert end.counts == {"ok": 8}  # a run fails if another run uses its GPU
    assert {record.config["device"] for record in by_seed(store).values()} == {"cuda"}


def test_largest_runs_start_first_on_several_gpus(write_sweep, store, faults, gpus):
    sizes = {11: "nano", 12: "micro", 13: "tiny"}
    fields = TINY | {"device": "auto"}
    blocks = [
        {"study": "benchmark", "fixed": fields | {"size": size, "seed": seed}} for seed, size in sizes.items()
    ]
    run_sweep([write_sweep(blocks)], store, HERE, Console(quiet=True))
    began = [int(line.split()[0]) for line in (faults / "began").read_text().splitlines()]
    assert set(began[:2]) == {12, 13}


def test_runs_that_use_all_gpus_keep_their_order(write_sweep, store, faults, gpus):
    sizes = {11: "nano", 12: "micro", 13: "tiny"}
    blocks = [
        {"study": "distributed", "fixed": {"gpus": 2, "context_length": 16, "size": size, "seed": seed}}
        for seed, size in sizes.items()
    ]
    run_sweep([write_sweep(blocks)], store, HERE, Console(quiet=True))
    began = [int(line.split()[0]) for line in (faults / "began").read_text().splitlines()]
    assert began == [11, 12, 13]


@pytest.mark.parametrize(
    "fields, how, words",
    [
        ({"device": "cuda"}, HERE, "no GPU here"),
        ({"precision": "tf32"}, HERE, "don't support TF32"),
        ({}, SweepOptions(scheduler="nowhere"), "expected an address"),
    ],
)
def test_impossible_sweep_is_rejected_before_creating_folders(sweep, store, fields, how, words):
    with pytest.raises((SweepError, WorkersError, ValueError), match=words):
        sweep([0], how, **fields)
    assert not store.root.exists()


def test_sweep_stops_at_an_invalid_record_without_changing_it(sweep, store, tiny):
    place = put(store, tiny(seed=0), results={"x": 1.0})
    (place / "record.json").write_text("{}")
    with pytest.raises(SweepError, match=f"{tiny(seed=0).run_id}/record.json: not a valid record"):
        sweep([0, 30])
    assert (place / "record.json").read_text() == "{}"


def test_sweep_rejects_a_folder_with_runs_of_a_different_gpu(sweep, store, tiny):
    put(store, tiny(seed=77), machine={"device_name": "another"})
    with pytest.raises(SweepError, match="contains runs from 'another'"):
        sweep([0])


def test_device_name_comes_from_the_first_record_with_a_device(store, tiny):
    put(store, tiny(study="benchmark"), status="failed")  # a run that failed before it recorded its device
    assert store.device_name() is None
    put(store, tiny(study="memory"), machine={"device_name": "H200"})
    assert store.device_name() == "H200"


def collect(store, console, configs, all_fields, signals=(), began=0.0) -> sweeping._Sweep:
    """Pass records with these fields to a sweep, as if the runs of these configurations had returned them."""
    workers: Any = SimpleNamespace(places=lambda device: 1)
    end = SweepEnd(left=configs)
    running_sweep = sweeping._Sweep(workers, store, HERE, console, end, [*signals], began)
    for config, fields in zip(configs, all_fields):
        assignment: Any = SimpleNamespace(config=config, folder=store.new_staging_folder())
        running_sweep._collect(assignment, record_of(config, **fields))
    return running_sweep


def test_run_that_fails_after_a_signal_stays_pending(store, tiny):
    configs = [tiny(seed=0), tiny(seed=1)]
    statuses = [{"status": "failed"}, {"status": "ok"}]
    end = collect(store, Console(quiet=True), configs, statuses, ["SIGTERM"]).end
    assert by_seed(store).keys() == {1} and end.counts == {"ok": 1}


def test_workers_with_different_gpus_are_rejected(store, tiny):
    configs = [tiny(seed=0), tiny(seed=1)]
    machines = [{"machine": {"device_name": name}} for name in ("H200", "another")]
    with pytest.raises(WorkersError, match="ran on 'another', but the folder's other runs ran on 'H200'"):
        collect(store, Console(quiet=True), configs, machines)
    assert by_seed(store).keys() == {0}


def test_findings_are_printed_without_markup():
    assert plain("**a** `b` [c](http://d)\n\x1b[31me") == "a b c  [31me"


@pytest.mark.parametrize("threads", [{}, {"OMP_NUM_THREADS": "3"}])
def test_run_does_not_inherit_the_environment_of_dask_workers(monkeypatch, tmp_path, tiny, threads):
    import dask.config
    import distributed  # noqa: F401  importing it sets the defaults

    nanny = dask.config.get("distributed.nanny")
    names = nanny["pre-spawn-environ"] | nanny["environ"]
    assert "OMP_NUM_THREADS" in names
    for name in names:
        monkeypatch.setenv(name, "1")

    class Started(Exception):
        pass

    def start(command, *, env, **options):
        raise Started({name: env[name] for name in names if name in env})

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(Started) as started:
        make_run(tiny(), tmp_path, threads)
    assert started.value.args == (threads,)


@pytest.mark.parametrize("checkout", ["{home}/code/steps", "{tmp}/code/steps"])
def test_longest_machine_path_is_replaced_first(monkeypatch, checkout):
    home, tmp = Path.home(), tempfile.gettempdir()
    place = checkout.format(home=home, tmp=tmp)
    monkeypatch.setattr(running, "PROJECT", Path(place))
    folder = Path(place) / "runs" / ".partial" / "ab12cd"
    text = f"{place}/lib/x.py {folder}/tmp/y {folder}/z {home}/w {tmp}/v"
    assert without_machine(text, folder) == "./lib/x.py <tmp>/y <run>/z ~/w <tmp>/v"


def test_memory_request_matches_the_baseline_step(tiny):
    """A run requests enough memory for its baseline step, which may need more than the configured step."""
    large = {"device": "cuda", "size": "large", "vocab_size": 10_000, "context_length": 512, "batch_size": 4}
    baseline = StepConfig(**large)
    needed_gib = peak(baseline).allocated / 2**30
    changes = [
        {},
        {"attention": "sdpa"},
        {"precision": "bf16"},
        {"optimizer": "fused"},
        {"compile": "blocks"},
    ]
    assert [peak_gib(tiny(**large | change)) for change in changes] == [needed_gib] * 5
    assert peak(baseline.model_copy(update={"attention": "sdpa"})).allocated / 2**30 < needed_gib


@pytest.fixture
def recording() -> Console:
    return Console(record=True, width=400, file=io.StringIO(), markup=False, soft_wrap=True)


def test_runs_of_a_different_notebook_version_are_repeated_only_with_replace(store, tiny, recording):
    configs = [tiny(seed=seed) for seed in range(7)]
    ends = [("ok", "now"), ("oom", "now"), ("failed", "now"), ("ok", "then"), ("oom", "then"), ("ok", None)]
    for config, (status, source) in zip(configs, ends):
        put(store, config, status=status, software={"notebook_source": source} if source else {})
    plan, sources = SweepPlan(configs, [tiny(seed=90)]), {"benchmark": "now"}
    with pytest.raises(SweepError, match="another version of the notebook measured .*--replace"):
        sweeping._what_is_left(plan, store, recording, sources, replace=False)
    end = sweeping._what_is_left(plan, store, recording, sources, replace=True)
    assert end.counts == {"ok": 2, "oom": 1} and [config.seed for config in end.left] == [2, 3, 4, 6]
    output = recording.export_text()
    assert "another version of the notebook measured 2 of the runs" in output
    assert f"GPU's memory: {tiny(seed=90).label}" in output


def test_progress_line_shows_run_time_and_remaining_time(store, tiny, monkeypatch, recording):
    configs = [tiny(seed=0), *(tiny(device="cuda", seed=seed) for seed in range(1, 5))]
    monkeypatch.setattr(sweeping, "monotonic", lambda: 1000.0)
    ends = [
        {"duration_s": 31.0},
        {"duration_s": 7.0, "results": {"finding": "**quick**", "inconsistent": "it swings"}},
        {"status": "oom"},
        {"status": "failed", "cause": "it fell"},
    ]
    collect(store, recording, configs, ends, began=400.0)
    lines = recording.export_text().splitlines()
    # The four lines report one to four finished runs out of five; the elapsed time is always ten minutes.
    minutes = [re.search(r"\(about (\d+) min left\)$", line)[1] for line in lines]
    assert minutes == ["40", "15", "7", "2"]
    assert "quick; inconsistent: it swings" in lines[1] and "failed: it fell" in lines[3]
    assert [re.search(r"\(([^()]*)\): ", line)[1] for line in lines[:2]] == ["31 s", "7 s"]
    assert [line[:4] for line in lines] == ["1/5 ", "2/5 ", "3/5 ", "4/5 "]


def test_read_outcome_merges_lines_and_ignores_a_truncated_line(tmp_path):
    assert read_outcome(tmp_path) == {}
    append_outcome(tmp_path, machine={"cpu_cores": 3}, status="failed", results={"a": 1, "b": 2})
    append_outcome(tmp_path, status="ok", results={"b": 5})
    with (tmp_path / "outcome.jsonl").open("a") as file:
        file.write('{"status": "oom", "resul')
    assert read_outcome(tmp_path) == {
        "machine": {"cpu_cores": 3},
        "status": "ok",
        "results": {"a": 1, "b": 5},
    }


@pytest.mark.parametrize(
    "errors, end",
    [
        (
            [("show", "KeyError"), ("", "OutOfMemoryError"), ("", "ValueError")],
            ("oom", "OutOfMemoryError: 1"),
        ),
        ([("", "ValueError"), ("show", "OutOfMemoryError")], ("failed", "ValueError: 0")),
        (
            [("show", "OutOfMemoryError"), ("show", "ValueError")],
            ("ok", "a cell that only displays results failed: OutOfMemoryError: 0"),
        ),
    ],
)
def test_cause_is_the_first_serious_error_in_the_notebook(tmp_path, errors, end):
    cells = [
        {
            "cell_type": "code",
            "source": "",
            "metadata": {"tags": [tag] if tag else []},
            "outputs": [{"output_type": "error", "ename": name, "evalue": str(number)}],
        }
        for number, (tag, name) in enumerate(errors)
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert running._errors(tmp_path / "a.ipynb") == end


@pytest.mark.parametrize("keep_images", [True, False])
def test_executed_notebook_keeps_images_only_when_requested(tmp_path, keep_images):
    outputs = [{"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "<Figure>"}}]
    cell = {"cell_type": "code", "source": "", "outputs": outputs}
    (tmp_path / "notebook.ipynb").write_text(json.dumps({"cells": [cell], "metadata": {}}))
    (tmp_path / "kernel.log").touch()
    running._tidy(tmp_path, "ok", keep_images)
    saved = json.loads((tmp_path / "notebook.ipynb").read_text())["cells"][0]["outputs"][0]["data"]
    assert ("image/png" in saved) == keep_images and saved["text/plain"] == "<Figure>"


def test_each_gpu_gets_a_share_of_the_cores(monkeypatch):
    from stepscope.runs import workers

    monkeypatch.setattr(workers, "_gpus", workers.queue.SimpleQueue())
    monkeypatch.setattr(workers, "_gpus_listed", workers.threading.Lock())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 16)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-ab")
    with workers._free_gpus(2, 1) as first, workers._free_gpus(2, 1) as second:
        assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("3", "GPU-ab")
        assert (first[workers.CORES], second[workers.CORES]) == ("10,11,12", "13,14,15")
    with workers._free_gpus(2, 1) as again:
        assert again == second, "the next run uses the GPU that was freed first"
    with workers._free_gpus(2, 2) as both:
        assert sorted(both["CUDA_VISIBLE_DEVICES"].split(",")) == ["3", "GPU-ab"]
        assert sorted(both[workers.CORES].split(",")) == ["10", "11", "12", "13", "14", "15"]


@pytest.mark.parametrize(("visible", "ids"), [(None, ["0", "1"]), ("3, MIG-b", ["3", "MIG-b"])])
def test_gpus_are_listed_by_cuda_id(monkeypatch, capsys, visible, ids):
    import torch

    from stepscope.runs.machine import print_gpus

    gpus = [SimpleNamespace(name=f"GPU {number}", total_memory=(number + 1) * 2**30) for number in (0, 1)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    print_gpus()
    expected = [{"visible": ids[number], "name": f"GPU {number}", "gib": number + 1} for number in (0, 1)]
    assert json.loads(capsys.readouterr().out) == expected
