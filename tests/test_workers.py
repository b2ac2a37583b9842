"""Sweeps on real Dask workers, and what can go wrong with those: nothing is lost, nothing doubled, every end
has its cause."""
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from rich.console import Console
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

import faults
from conftest import TINY
from faults import ENVIRONMENT, FILLS, HANGS, KILLS_SCHEDULER, KILLS_WORKER, LOCKS, MEETS, ended, finished
from stepscope.config import configure
from stepscope.runs import workers
from stepscope.runs.logs import run_log
from stepscope.runs.record import OUTCOME, RecordError
from stepscope.runs.sweep import How, SweepError, run_sweep, work_estimate

LIMIT_S = 20  # a kernel's start has room in it on a busy machine


def config_of(seed):
    return configure("benchmark", **TINY, seed=seed)


@pytest.fixture
def sweep_of(write_sweep):
    def make(*seeds):
        return write_sweep({"study": "benchmark", "fixed": TINY, "axes": {"seed": list(seeds)}})
    return make


def content(store):
    return {path.parent.name: path.read_bytes() for path in store.root.glob("benchmark/*/record.json")}


# A local cluster

async def handshake(url, origin, protocols):
    """Whether a websocket opens for a page of this origin."""
    try:
        connection = await websocket_connect(
            HTTPRequest(url, headers={"Origin": origin}), subprotocols=protocols
        )
    except HTTPClientError as refused:
        return refused.code
    connection.close()
    return "open"


def test_a_local_clusters_faults_and_its_dashboard(store, fault_folder, sweep_of):
    """One cluster for several: a killed worker and a hanging run cost what they hit, and no other page reads
    the dashboard."""
    client, places = workers.local_cluster("2")
    try:
        pages_of_other_origins_are_refused(client.dashboard_link)
        sweep = sweep_of(*MEETS, KILLS_WORKER, HANGS)
        how = How(cluster=(client, places), notebook=faults.notebook, timeout_s=LIMIT_S)
        end = run_sweep([sweep], store, how, Console(quiet=True))
    finally:
        workers.close_cluster(client)
    assert end.counts == {"ok": 2, "failed": 2} and not end.left, end
    one, other = map(config_of, MEETS)
    assert (
        f"benchmark/{other.run_id}" in store.find(one).beside
        and f"benchmark/{one.run_id}" in store.find(other).beside
    )
    assert (
        store.find(config_of(KILLS_WORKER)).cause
        == "the worker that ran it died (killed, or its machine went down)"
    )
    assert (
        store.find(config_of(HANGS)).cause
        == f"no end after {LIMIT_S} s, the limit for a run; its processes were ended"
    )
    assert store.records()[1] == [] and not store.partial.exists() and not (store.root / "set-aside").exists()
    for name in ("of_the_killed", "of_the_hanging"):  # their GPU, if they had one, is free
        assert ended(int((fault_folder / name).read_text())), name
    assert f"cause: no end after {LIMIT_S} s" in run_log(store, config_of(HANGS).run_id)

    # Without Dask, it goes on where that was.
    before = content(store)
    end = run_sweep([sweep], store, How(notebook=finished), Console(quiet=True))
    assert end.counts == {"ok": 4} and not end.left
    after = content(store)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {
        config_of(KILLS_WORKER).run_id,
        config_of(HANGS).run_id,
    }


def pages_of_other_origins_are_refused(link):
    place = urlsplit(link)
    token = re.search(r'"token":"([^"]+)"', urllib.request.urlopen(link).read().decode())[1]
    url, protocols = f"ws://{place.netloc}/status/ws", ["bokeh", token]
    its_own = f"http://{place.netloc}"
    assert asyncio.run(handshake(url, its_own, protocols)) == "open"
    for origin in (
        "http://example.com",
        f"http://{place.hostname}:1",
        f"http://localhost.example.com:{place.port}",
    ):
        assert asyncio.run(handshake(url, origin, protocols)) == 403, origin


def starting(sweeping, faults):
    return len(sweeping.processes()) > 1


def hanging(sweeping, faults):
    return (faults / "of_the_hanging").exists()


@pytest.mark.parametrize("stage, times, pause_s", [
    (hanging, 2, 0.5),
    *(pytest.param(stage, times, pause_s, marks=pytest.mark.trials)
      for stage in (starting, hanging) for times, pause_s in ((1, 0.1), (2, 0.02), (8, 0.3)))])
def test_ctrl_c_ends_a_sweep_with_workers_in_one_sentence(
    stage, times, pause_s, program, store, fault_folder, sweep_of
):
    sweeping = program("sweep", sweep_of(HANGS, 1), "--runs", store.root, "--workers", "1")
    sweeping.wait_for(lambda: stage(sweeping, fault_folder))
    for _ in range(times):  # as a terminal does it: to every process there
        with suppress(ProcessLookupError):
            os.killpg(sweeping.process.pid, signal.SIGINT)
        time.sleep(pause_s)
    status, said = sweeping.process.wait(60), sweeping.said.read_text()
    assert (
        status == 75
        and "stopped by SIGINT; 2 left" in said
        and "Traceback" not in said
        and "Error" not in said
    ), said
    assert sweeping.all_ended() and content(store) == {} and not store.partial.exists()


def test_workers_that_are_killed_while_they_start_leave_all_runs(program, store, fault_folder, sweep_of):
    sweeping = program("sweep", sweep_of(0, 1), "--runs", store.root, "--workers", "1")

    def killed():
        found = [process for process in sweeping.processes() if "spawn_main" in " ".join(process.cmdline())]
        for process in found:
            process.kill()
        return found
    sweeping.wait_for(killed)
    status, said = sweeping.process.wait(60), sweeping.said.read_text()
    assert (
        status == 75 and "stopped by the local cluster, which did not start" in said and "; 2 left" in said
    ), said
    assert "Traceback" not in said and sweeping.all_ended() and not store.partial.exists()


# Somebody's cluster

@pytest.fixture
def cluster(fault_folder):
    """A scheduler and a worker, as somebody would start them on other machines; the scheduler's address."""
    file = fault_folder / "scheduler.json"

    def start(module, *arguments):
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--scheduler-file", str(file), "--no-dashboard"],
            env=os.environ | ENVIRONMENT,
            stderr=subprocess.DEVNULL,
        )
    scheduler = start("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0")
    worker = start(
        "distributed.cli.dask_worker",
        "--nthreads",
        "1",
        "--resources",
        "CPU=1",
        "--no-nanny",
        "--death-timeout",
        "20",
    )
    (fault_folder / "scheduler").write_text(str(scheduler.pid))
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    yield json.loads(file.read_text())["address"]
    for process in (scheduler, worker):
        process.terminate()
    for process in (scheduler, worker):
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def test_a_sweep_and_then_a_scheduler_that_are_killed_leave_what_is_done_and_nothing_that_runs(
        cluster, program, store, fault_folder, sweep_of):
    sweep = sweep_of(0, HANGS, KILLS_SCHEDULER)
    first = program("sweep", sweep, "--runs", store.root, "--scheduler", cluster, "--exclusive", "all")
    hanging = fault_folder / "of_the_hanging"
    first.wait_for(lambda: hanging.exists() and hanging.read_text())  # it is there before its text is
    first.process.kill()
    # the worker, which lives, has ended what nobody waits for
    assert ended(int(hanging.read_text()))
    before = content(store)
    assert list(before) == [config_of(0).run_id]

    sweep = sweep_of(0, 1, KILLS_SCHEDULER)
    end = run_sweep(
        [sweep], store, How(scheduler=cluster, notebook=faults.notebook, timeout_s=120), Console(quiet=True)
    )
    assert end.stopped_by.startswith("the scheduler is gone") and end.left == [config_of(KILLS_SCHEDULER)], (
        end
    )
    assert (
        before.items() <= content(store).items() and store.records()[1] == [] and not store.partial.exists()
    )
    before = content(store)
    end = run_sweep([sweep], store, How(notebook=finished), Console(quiet=True))  # without a cluster
    assert end.counts == {"ok": 3} and before.items() <= content(store).items()


# Disks

def can_mount():
    return (
        subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.skipif(
    not can_mount(),
    reason="this system lets nobody mount in a namespace of their own, so no disk can be made small",
)
@pytest.mark.parametrize("seed, told, workers", [
    (FILLS, "No space left on device", []),
    pytest.param(LOCKS, "Read-only file system", [], marks=pytest.mark.trials),
    pytest.param(FILLS, "No space left on device", ["--workers", "2"], marks=pytest.mark.trials),
    pytest.param(LOCKS, "Read-only file system", ["--workers", "2"], marks=pytest.mark.trials)])
def test_a_disk_that_is_full_or_read_only_at_the_start_or_later_costs_no_run(
    seed, told, workers, fault_folder, sweep_of
):
    done = subprocess.run(
        [
            "unshare",
            "-rm",
            sys.executable,
            faults.__file__,
            "in_namespace",
            str(fault_folder),
            str(sweep_of(0, seed)),
            str(seed),
            *workers,
        ],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert "Traceback" not in done.stderr and done.stderr.count("nothing was started") == 2
    for name, there in (("full at the start", ["ballast"]), ("read-only at the start", [])):
        assert seen[name]["status"] == 2 and set(seen[name]["files"]) - {".lock", "sweeps"} == set(there), (
            seen[name]
        )
    stopped, resumed = seen["stopped"], seen["resumed"]
    assert stopped["status"] == 75, done.stderr
    assert f"stopped by the runs folder, which cannot be written to ({told})" in done.stderr
    assert str(seed) not in stopped["records"] and resumed["status"] == 0
    assert {seed: record["status"] for seed, record in resumed["records"].items()} == {
        "0": "ok",
        str(seed): "ok",
    }
    assert stopped["records"].items() <= resumed["records"].items()
    assert not any(".tmp" in file or "set-aside" in file or ".partial" in file for file in resumed["files"])


# Without a cluster

def swallows(config, folder, timeout_s, abandoned):
    """A run in which the signal comes where an exception would be lost, as in the middle of an import."""
    with suppress(BaseException):
        signal.raise_signal(signal.SIGTERM)
    return faults.notebook(config, folder, timeout_s, abandoned)


def test_a_signal_ends_the_run_that_goes_on_whatever_it_came_upon(store, fault_folder, sweep_of):
    end = run_sweep([sweep_of(HANGS, 1)], store, How(notebook=swallows, timeout_s=60), Console(quiet=True))
    assert end.stopped_by == "SIGTERM" and end.left == [config_of(HANGS), config_of(1)] and not end.counts
    assert content(store) == {} and not store.partial.exists()


def at_its_end(config, folder, timeout_s, abandoned):
    """A run that is over, and whole, when the signal comes."""
    (folder / OUTCOME).write_text('{"finished": true}')
    signal.raise_signal(signal.SIGINT)
    return "ok", None


def test_a_run_that_came_to_its_own_end_is_kept_though_a_signal_came(store, sweep_of):
    end = run_sweep([sweep_of(1, 2)], store, How(notebook=at_its_end), Console(quiet=True))
    assert end.stopped_by == "SIGINT" and end.counts["ok"] == 1 and end.left == [config_of(2)]
    assert list(content(store)) == [config_of(1).run_id]


def test_core_slices_share_no_core():
    mine = os.sched_getaffinity(0)
    for count in (1, len(mine)):
        parts = workers.core_slices(count)
        assert len(parts) == count and all(parts)
    assert set().union(*workers.core_slices(1)) == mine
    physical = workers.core_slices(2)
    assert len(mine) < 2 or not set(physical[0]) & set(physical[1])


@pytest.mark.parametrize(
    "how, told",
    [
        (How(workers="many"), "expected gpus or a number"),
        (How(workers="0"), "expected gpus or a number"),
        (How(workers="2", scheduler="tcp://127.0.0.1:1"), "one or the other"),
        (How(exclusive=("speed",)), "expected all or a study"),
        (How(scheduler="tcp://127.0.0.1:1"), "nothing answers at 'tcp://127.0.0.1:1'"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(how, told, store, sweep_of, monkeypatch):
    monkeypatch.setattr(workers, "ANSWER_S", 1)
    with pytest.raises((SweepError, workers.WorkersError), match=re.escape(told)):
        run_sweep([sweep_of(0)], store, how, Console(quiet=True))
    assert content(store) == {}


def test_runs_that_no_worker_takes_are_refused_and_not_waited_for():
    pool = workers.Dask.__new__(workers.Dask)
    pool.workers = {"tcp://somewhere": {"resources": {"GPU": 1}}}
    with pytest.raises(
        workers.WorkersError, match="no worker offers CPU=1, which a run with device 'cpu' takes"
    ):
        pool.require([config_of(0)])
    pool.workers = {"tcp://somewhere": {"resources": {"GPU": 1, "CPU": 1}}}
    pool.require([config_of(0)])


def test_two_gpus_are_not_four_workers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert workers.gpus_here() == ["3", "5"]
    with pytest.raises(workers.WorkersError, match="got 4, but there are 2 GPUs here"):
        workers.local_cluster("4")


class Slots:
    """Stands in for workers: keeps what it is given until it is told to give it back."""

    size = 2
    parallel = True

    def __init__(self, store):
        self.store, self.given, self.seen = store, [], []

    def free(self, config):
        return len(self.given) < self.size

    def running(self):
        return list(self.given)

    def submit(self, config):
        self.given.append(config)
        self.seen.append(sorted((c.study, c.size) for c in self.given))

    def wait(self):
        config = self.given.pop(0)
        return [(config, workers.make_run(config, self.store, notebook=finished))]


def test_the_longest_runs_go_first_and_exclusive_ones_alone(store, write_sweep, monkeypatch):
    slots = Slots(store)
    monkeypatch.setattr("stepscope.runs.sweep.Here", lambda *arguments: slots)
    sweep = write_sweep(
        [
            {
                "study": study,
                "fixed": {key: value for key, value in TINY.items() if key != "size"},
                "axes": {"size": ["nano", "tiny", "micro"]},
            }
            for study in ("warmup", "benchmark")
        ]
    )
    assert run_sweep([sweep], store, How(exclusive=("warmup",)), Console(quiet=True)).counts == {"ok": 6}
    assert slots.seen == [
        [("benchmark", "tiny")],
        [("benchmark", "micro"), ("benchmark", "tiny")],
        [("benchmark", "micro"), ("benchmark", "nano")],
        [("warmup", "tiny")],
        [("warmup", "micro")],
        [("warmup", "nano")],
    ]
    beside = {record.run_id[:4]: record.beside for record in store.records()[0] if record.study == "warmup"}
    assert beside == {"nano": [], "tiny": [], "micr": []}
    assert work_estimate(configure("benchmark", **TINY | {"size": "tiny"})) > work_estimate(
        configure("benchmark", **TINY)
    )


class AtOnce(Slots):
    """All that it was given goes on at the same time and comes back together."""

    def wait(self):
        given, self.given, met = self.given, [], threading.Barrier(len(self.given), timeout=60)
        with ThreadPoolExecutor() as pool:
            return list(
                zip(
                    given,
                    pool.map(
                        lambda config: workers.make_run(
                            config,
                            self.store,
                            notebook=lambda *arguments: met.wait() < 0 or finished(*arguments),
                        ),
                        given,
                    ),
                )
            )


def test_runs_that_come_back_together_were_beside_each_other(store, sweep_of, monkeypatch):
    monkeypatch.setattr("stepscope.runs.sweep.Here", lambda *arguments: AtOnce(store))
    assert run_sweep([sweep_of(1, 2)], store, How(), Console(quiet=True)).counts == {"ok": 2}
    one, other = (config_of(seed) for seed in (1, 2))
    assert store.find(one).beside == [f"benchmark/{other.run_id}"] and store.find(other).beside == [
        f"benchmark/{one.run_id}"
    ]


def test_a_log_is_found_by_the_beginning_of_an_id_and_only_if_that_is_one_runs(store, fault_folder, sweep_of):
    run_sweep([sweep_of(0, 1)], store, How(notebook=finished), Console(quiet=True))
    assert run_log(store, f"benchmark/{config_of(0).run_id}").startswith(
        f"benchmark/{config_of(0).run_id}: ok"
    )
    with pytest.raises(RecordError, match="'nano' names 2 runs .benchmark/nano"):
        run_log(store, "nano")
    with pytest.raises(RecordError, match="'large' names no run"):
        run_log(store, "large")
