"""Sweeps: each run's end is a record, what is done is not done again, runs that share a GPU take turns."""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

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
    """Run a sweep over these seeds in this process; its end. What it printed is ``sweep.said``."""

    def run(seeds, how=HERE, **fields):
        path = write_sweep({"study": "benchmark", "fixed": TINY | fields, "axes": {"seed": seeds}})
        console = Console(
            record=True, width=400, file=io.StringIO(), markup=False, highlight=False, soft_wrap=True
        )
        end = run_sweep([path], store, how, console)
        run.said = console.export_text()
        return end

    return run


def by_seed(store):
    return {record.config["seed"]: record for record in store.records(check_files=True)[0]}


def test_each_end_of_a_run_is_a_record_and_what_failed_is_tried_again(sweep, store, faults):
    end = sweep(
        [0, RAISES, LACKS_MEMORY, DIES, KILLS_RUN, UNFINISHED, BAD_RESULT, PATHS], SweepOptions(workers=2)
    )
    records = by_seed(store)
    assert {seed: record.status for seed, record in records.items()} == {
        0: "ok",
        RAISES: "failed",
        LACKS_MEMORY: "oom",
        DIES: "failed",
        KILLS_RUN: "failed",
        UNFINISHED: "failed",
        BAD_RESULT: "failed",
        PATHS: "ok",
    }
    assert records[RAISES].cause == "ValueError: as asked" and "died" in records[DIES].cause
    assert "killed by SIGKILL" in records[KILLS_RUN].cause
    assert "Run.keep" in records[UNFINISHED].cause and "results.list" in records[BAD_RESULT].cause
    assert end.counts == {"ok": 2, "oom": 1, "failed": 5} and not end.left
    assert re.search(
        r"\): seed 9(?: \(about|$)", sweep.said, re.MULTILINE
    )  # markdown, as a terminal shows it
    said = [line for line in sweep.said.splitlines() if re.match(r"\d/8 ", line)]
    assert len(said) == 8 and [bool(re.search(r" \(about \d+ min left\)$", line)) for line in said] == [
        True
    ] * 7 + [False]
    assert not store.partial.exists() and not list(store.root.rglob("tmp"))

    before = {path: path.read_bytes() for path in store.root.rglob("record.json")}
    (faults / "mended").touch()
    (faults / "began").unlink()
    end = sweep([0, RAISES, LACKS_MEMORY])
    assert end.counts == {"ok": 2, "oom": 1}
    assert (faults / "began").read_text().split()[0] == str(RAISES)  # and no other
    assert len((faults / "began").read_text().splitlines()) == 1
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert changed == {path for path in before if json.loads(before[path])["config"]["seed"] == RAISES}


def test_a_notebook_names_no_place_of_this_machine(sweep, store, tiny, tmp_path):
    sweep([PATHS])
    place = store.folder(tiny(seed=PATHS))
    text = (place / "notebook.ipynb").read_text() + (place / "record.json").read_text()
    printed = json.loads((place / "notebook.ipynb").read_text())["cells"][-1]["outputs"][0]["text"][0]
    assert printed.startswith("<run> <python> ~ ") and printed.endswith(" <tmp>\n")
    for name in (str(tmp_path), sys.prefix, str(Path.home()), os.uname().nodename):
        assert len(name) < 4 or name not in text
    assert not (place / LOG).exists()


def test_a_run_is_killed_at_its_limit(sweep, store, faults):
    end = sweep([HANGS], SweepOptions(timeout_s=0.5))  # wherever it is by then
    assert end.counts == {"failed": 1} and "exceeded the time limit of 0.5 s" in by_seed(store)[HANGS].cause


def test_a_run_is_killed_with_all_it_has_started(store, faults, tiny):
    folder = store.new_staging_folder()
    with pytest.raises(Abandoned):
        make_run(tiny(seed=HANGS), folder, {}, abandoned=(faults / "child").exists)
    assert ended(int((faults / "child").read_text()))
    assert ended(int((faults / "began").read_text().split()[1]))


def test_what_is_ended_lies_within_the_folder(tmp_path):
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


def test_a_worker_that_dies_hands_its_runs_over_once(sweep, store, faults):
    end = sweep([KILLS_WORKER, 0])
    assert end.counts == {"ok": 1, "failed": 1}
    assert "its worker died" in by_seed(store)[KILLS_WORKER].cause
    began = [line.split()[0] for line in (faults / "began").read_text().splitlines()]
    assert began == [str(KILLS_WORKER)] * 2 + ["0"]
    assert "running it again" in sweep.said
    assert ended(int((faults / "child").read_text()))


def test_no_run_starts_after_the_time_budget(sweep, store, monkeypatch):
    end = sweep([0, 30], SweepOptions(time_budget_s=0))
    assert end.stopped_by == "the time budget" and len(end.left) == 2 and not store.records()[0]
    # The clock is the sweep's own: it passes the budget while the first run goes on, and that run is kept.
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(sweeping, "monotonic", lambda: next(clock, 99.0))
    end = sweep([0, 30], SweepOptions(time_budget_s=50))
    assert end.stopped_by == "the time budget" and len(end.left) == 1 and end.counts == {"ok": 1}


@pytest.fixture
def gpus(monkeypatch, faults):
    """Two GPUs that are none: what shares them can be seen all the same."""
    found = [{"visible": name, "name": "H200", "gib": 80.0} for name in ("GPU-aaaa", "MIG-bbbb")]
    monkeypatch.setattr(sweeping, "gpus_here", lambda: found)
    (faults / "device").write_text("H200")


def test_each_run_has_a_gpu_to_itself(sweep, store, faults, gpus):
    end = sweep([TURNS, *range(11, 18)], device="auto")
    assert end.counts == {"ok": 8}  # none found another run's file on its GPU
    assert {record.config["device"] for record in by_seed(store).values()} == {"cuda"}


def test_run_waits_until_a_gpu_is_free(tiny):
    from stepscope.runs.workers import Assignment, Workers

    workers = Workers.__new__(Workers)
    workers.running = []
    workers.offers = {
        "a": {"nthreads": 2, "resources": {"GPU": 2}},
        "b": {"nthreads": 1, "resources": {"GPU": 1}},
        "c": {"nthreads": 1, "resources": {"RUNS": 1}},
    }
    given = []
    while address := workers.place("cuda"):
        workers.running.append(Assignment(tiny(device="cuda"), None, address, SimpleNamespace()))
        given.append(address)
    assert sorted(given) == ["a", "a", "b"] and workers.places("cuda") == 3
    assert workers.place("cpu") == "c" and not workers.busy()
    workers.running.pop(given.index("b"))
    assert workers.place("cuda") == "b"


def test_largest_runs_start_first_on_several_gpus(write_sweep, store, faults, gpus):
    sizes = {11: "nano", 12: "micro", 13: "tiny"}
    fields = TINY | {"device": "auto"}
    blocks = [
        {"study": "benchmark", "fixed": fields | {"size": size, "seed": seed}} for seed, size in sizes.items()
    ]
    run_sweep([write_sweep(blocks)], store, HERE, Console(quiet=True))
    began = [int(line.split()[0]) for line in (faults / "began").read_text().splitlines()]
    assert set(began[:2]) == {12, 13}


@pytest.mark.parametrize(
    "fields, how, words",
    [
        ({"device": "cuda"}, HERE, "no GPU here"),
        ({"precision": "tf32"}, HERE, "no TF32"),
        ({}, SweepOptions(scheduler="nowhere"), "expected an address"),
    ],
)
def test_what_cannot_be_done_is_said_before_a_folder_is_touched(sweep, store, fields, how, words):
    with pytest.raises((SweepError, WorkersError, ValueError), match=words):
        sweep([0], how, **fields)
    assert not store.root.exists()


def test_a_folder_that_is_no_run_is_named_and_nothing_is_touched(sweep, store, tiny):
    place = put(store, tiny(seed=0), results={"x": 1.0})
    (place / "record.json").write_text("{}")
    with pytest.raises(SweepError, match=f"{tiny(seed=0).run_id}/record.json: not a valid record"):
        sweep([0, 30])
    assert (place / "record.json").read_text() == "{}"


def test_one_folder_holds_one_devices_runs(sweep, store, tiny):
    put(store, tiny(seed=77), machine={"device_name": "another"})
    with pytest.raises(SweepError, match="holds runs of 'another'"):
        sweep([0])


def test_a_folders_device_is_what_the_first_record_says_that_says_one(store, tiny):
    put(store, tiny(study="benchmark"), status="failed")  # before it knew
    assert store.device_name() is None
    put(store, tiny(study="memory"), machine={"device_name": "H200"})
    assert store.device_name() == "H200"


def test_what_fails_after_a_signal_is_left_to_be_run(store, tiny):
    configs = [tiny(seed=0), tiny(seed=1)]
    under_way = sweeping._Sweep(
        None, store, SweepOptions(), Console(file=io.StringIO()), SweepEnd(left=configs), ["SIGTERM"], 0.0
    )
    for config, status in zip(configs, ("failed", "ok")):
        under_way._collect(
            SimpleNamespace(config=config, folder=store.new_staging_folder()),
            record_of(config, status=status),
        )
    assert by_seed(store).keys() == {1} and under_way.end.counts == {"ok": 1}


def test_workers_of_two_devices_do_not_fill_one_folder(store, tiny):
    configs = [tiny(seed=0), tiny(seed=1)]
    under_way = sweeping._Sweep(
        None, store, SweepOptions(), Console(file=io.StringIO()), SweepEnd(left=configs), [], 0.0
    )

    def take(config, name):
        given = SimpleNamespace(config=config, folder=store.new_staging_folder())
        under_way._collect(given, record_of(config, machine={"device_name": name}))

    take(configs[0], "H200")
    with pytest.raises(WorkersError, match="ran on 'another', but the folder's other runs ran on 'H200'"):
        take(configs[1], "another")
    assert by_seed(store).keys() == {0}


def test_findings_are_plain_in_a_terminal():
    assert plain("**a** `b` [c](http://d)\n\x1b[31me") == "a b c  [31me"


def test_a_run_finds_nothing_that_dasks_nanny_has_set_for_its_workers(monkeypatch, tmp_path, tiny):
    import dask.config
    import distributed  # noqa: F401  whose defaults these are

    nannys = dask.config.get("distributed.nanny.pre-spawn-environ") | dask.config.get(
        "distributed.nanny.environ"
    )
    assert "OMP_NUM_THREADS" in nannys
    for name in nannys:
        monkeypatch.setenv(name, "1")
    environments = []

    class Started(Exception):
        pass

    def start(command, *, env, **rest):
        environments.append(env)
        raise Started

    monkeypatch.setattr(subprocess, "Popen", start)
    for number, own in enumerate(({}, {"OMP_NUM_THREADS": "3"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(Started):
            make_run(tiny(), folder, own)
    assert not nannys.keys() & environments[0].keys()
    assert environments[1]["OMP_NUM_THREADS"] == "3"  # as the sweep had it


@pytest.mark.parametrize("checkout", ["{home}/code/steps", "{tmp}/code/steps"])
def test_the_longest_of_a_machines_places_is_replaced_first(monkeypatch, checkout):
    home, tmp = Path.home(), tempfile.gettempdir()
    place = checkout.format(home=home, tmp=tmp)
    monkeypatch.setattr(running, "PROJECT", Path(place))
    folder = Path(place) / "runs" / ".partial" / "ab12cd"
    text = f"{place}/lib/x.py {folder}/tmp/y {folder}/z {home}/w {tmp}/v"
    assert without_machine(text, folder) == "./lib/x.py <tmp>/y <run>/z ~/w <tmp>/v"


def test_a_run_is_given_what_the_assignments_own_step_would_take(tiny):
    large = {"device": "cuda", "size": "large", "vocab_size": 10_000, "context_length": 512, "batch_size": 4}
    own = StepConfig(**large)
    assert (own.mode, own.precision, own.attention, own.compile, own.optimizer) == (
        "step",
        "fp32",
        "naive",
        "none",
        "foreach",
    )
    plain = tiny(**large)
    assert peak_gib(plain) == peak(own).allocated / 2**30
    for change in (
        {"attention": "sdpa"},
        {"precision": "bf16"},
        {"optimizer": "fused"},
        {"compile": "blocks"},
    ):
        changed = tiny(**large | change)
        assert changed != plain and peak_gib(changed) == peak_gib(plain), change
    assert peak(own.model_copy(update={"attention": "sdpa"})).allocated / 2**30 < peak_gib(
        plain
    )  # it would be too little


def said_by(call) -> str:
    console = Console(record=True, width=400, file=io.StringIO(), markup=False, soft_wrap=True)
    call(console)
    return console.export_text()


def test_only_what_this_notebook_has_measured_is_done(store, tiny):
    configs = [tiny(seed=seed) for seed in range(7)]
    ends = [("ok", "now"), ("oom", "now"), ("failed", "now"), ("ok", "then"), ("oom", "then"), ("ok", None)]
    for config, (status, source) in zip(configs, ends):
        put(store, config, status=status, software={"notebook_source": source} if source else {})
    found, plan = [], SweepPlan(configs, [tiny(seed=90)])
    with pytest.raises(SweepError, match="another version of the notebook measured .*--replace"):
        sweeping._what_is_left(plan, store, Console(quiet=True), {"benchmark": "now"}, replace=False)
    said = said_by(
        lambda console: found.append(
            sweeping._what_is_left(plan, store, console, {"benchmark": "now"}, replace=True)
        )
    )
    (end,) = found
    assert end.counts == {"ok": 2, "oom": 1} and [config.seed for config in end.left] == [2, 3, 4, 6]
    assert (
        "another version of the notebook measured 2 of them" in said
        and f"GPU's memory: {tiny(seed=90).label}" in said
    )


def test_what_is_said_of_a_run_is_its_own_time_and_what_is_left(store, tiny, monkeypatch):
    configs = [tiny(seed=0), *(tiny(device="cuda", seed=seed) for seed in range(1, 5))]
    monkeypatch.setattr(sweeping, "monotonic", lambda: 1000.0)

    def take(console):
        under_way = sweeping._Sweep(
            SimpleNamespace(places=lambda device: 1),
            store,
            SweepOptions(),
            console,
            SweepEnd(left=configs),
            [],
            400.0,
        )
        for config, fields in zip(
            configs,
            (
                {"duration_s": 31.0},
                {"duration_s": 7.0, "results": {"finding": "**quick**", "inconsistent": "it swings"}},
                {"status": "oom"},
                {"status": "failed", "cause": "it fell"},
            ),
        ):
            under_way._collect(
                SimpleNamespace(config=config, folder=store.new_staging_folder()), record_of(config, **fields)
            )

    lines = said_by(take).splitlines()
    # ten minutes for one run, for two, three and four: at that rate the others take forty, fifteen, seven and three
    assert [line.partition("): ")[2] for line in lines] == [
        "done (about 40 min left)",
        "quick; inconsistent: it swings (about 15 min left)",
        "out of memory (about 7 min left)",
        "failed: it fell (about 2 min left)",
    ]
    assert [re.search(r"\(([^()]*)\): ", line)[1] for line in lines[:2]] == ["31 s", "7 s"]
    assert [line[:4] for line in lines] == ["1/5 ", "2/5 ", "3/5 ", "4/5 "]


def test_what_a_run_hands_over_adds_up_and_a_line_cut_short_is_none(tmp_path):
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
def test_of_a_notebooks_errors_the_first_that_costs_something_counts(tmp_path, errors, end):
    cells = [
        {
            "cell_type": "code",
            "source": "",
            "metadata": {"tags": [tag] if tag else []},
            "outputs": [
                {"output_type": "stream"},
                {"output_type": "error", "ename": name, "evalue": str(at)},
            ],
        }
        for at, (tag, name) in enumerate(errors)
    ]
    (tmp_path / "a.ipynb").write_text(
        json.dumps({"cells": [{"cell_type": "markdown", "source": ""}, *cells]})
    )
    assert running._errors(tmp_path / "a.ipynb") == end


@pytest.mark.parametrize("keep_images", [True, False])
def test_executed_notebook_has_images_unless_they_are_dropped(tmp_path, keep_images):
    outputs = [{"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "<Figure>"}}]
    cell = {"cell_type": "code", "source": "", "outputs": outputs}
    (tmp_path / "notebook.ipynb").write_text(json.dumps({"cells": [cell], "metadata": {}}))
    (tmp_path / "kernel.log").touch()
    running._tidy(tmp_path, "ok", keep_images)
    saved = json.loads((tmp_path / "notebook.ipynb").read_text())["cells"][0]["outputs"][0]["data"]
    assert ("image/png" in saved) == keep_images and saved["text/plain"] == "<Figure>"


def test_run_ends_at_its_time_limit_or_when_it_is_abandoned():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert running._wait(process, 0.2, lambda: False).startswith("exceeded the time limit of 0.2 s")
        with pytest.raises(Abandoned):
            running._wait(process, None, lambda: True)
    finally:
        process.kill()
        process.wait()
    assert running._wait(process, 0.2, lambda: False) is None


def test_each_gpu_gets_its_share_of_the_cores(monkeypatch):
    from stepscope.runs import workers

    monkeypatch.setattr(workers, "_gpus", workers.queue.SimpleQueue())
    monkeypatch.setattr(workers, "_gpus_listed", workers.threading.Lock())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 16)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-ab")
    with workers._free_gpu(2) as first, workers._free_gpu(2) as second:
        assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("3", "GPU-ab")
        assert (first[workers.CORES], second[workers.CORES]) == ("10,11,12", "13,14,15")
    with workers._free_gpu(2) as again:
        assert again == second, "the GPU that was freed first"


@pytest.mark.parametrize(("named", "visible"), [(None, ["0", "1"]), ("3, MIG-b", ["3", "MIG-b"])])
def test_each_gpu_is_told_with_its_own_name_for_cuda_and_its_own_memory(monkeypatch, capsys, named, visible):
    import torch

    from stepscope.runs.machine import print_gpus

    found = [
        SimpleNamespace(name="H200", total_memory=141 * 2**30),
        SimpleNamespace(name="T4", total_memory=15 * 2**30),
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    print_gpus()
    assert json.loads(capsys.readouterr().out) == [
        {"visible": visible[0], "name": "H200", "gib": 141},
        {"visible": visible[1], "name": "T4", "gib": 15},
    ]
