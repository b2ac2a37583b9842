"""Sweeps on real Dask workers, and what can go wrong with those: nothing is lost, nothing doubled, every end has its cause."""
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import faults
import psutil
import pytest
from conftest import TINY
from faults import FILLS, HANGS, KILLS_SCHEDULER, KILLS_WORKER, LOCKS, MEETS
from rich.console import Console
from stepscope.runs import workers
from stepscope.config import configure
from stepscope.runs.logs import run_log
from stepscope.runs.notebook_side import OUTCOME
from stepscope.runs.record import RecordError
from stepscope.runs.sweep import How, SweepError, run_sweep, work_estimate

LIMIT_S = 20  # a kernel's start has room in it on a busy machine


def config_of(seed):
    return configure("benchmark", **TINY, seed=seed)


@pytest.fixture
def fault_folder(tmp_path, monkeypatch):
    folder = tmp_path / "faults"
    folder.mkdir()
    faults.make_notebooks(folder)
    monkeypatch.setenv("STEPSCOPE_TEST_FAULTS", str(folder))
    return folder


@pytest.fixture
def sweep_of(write_sweep):
    def make(*seeds):
        return write_sweep({"study": "benchmark", "fixed": TINY, "axes": {"seed": list(seeds)}})
    return make


def content(store):
    return {path.parent.name: path.read_bytes() for path in store.root.glob("benchmark/*/record.json")}


def ended(pid, within_s=30):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_a_killed_worker_a_hanging_run_and_a_second_sweep_cost_what_they_hit(store, fault_folder, sweep_of):
    sweep = sweep_of(0, KILLS_WORKER, HANGS, 1, 2)
    second = {}

    def another_person():
        while not list(store.root.glob(".partial/claims/*")):
            time.sleep(0.05)
        done = subprocess.run([sys.executable, "-m", "stepscope.cli", "sweep", str(sweep), "--runs", str(store.root), "--workers", "2"],
                              capture_output=True, text=True)
        second.update(status=done.returncode, said=done.stderr)
    thread = threading.Thread(target=another_person)
    thread.start()
    end = run_sweep([sweep], store, How(workers="2", notebook=faults.notebook, timeout_s=LIMIT_S), Console(quiet=True))
    thread.join()
    assert second["status"] == 2 and "another sweep is writing here (process" in second["said"], second

    causes = {store.find(config_of(seed)).cause for seed in (0, 1, 2)}
    assert causes == {None} and end.counts == {"ok": 3, "failed": 2} and not end.left, end
    assert store.find(config_of(KILLS_WORKER)).cause == "the worker that ran it died (killed, or its machine went down)"
    assert store.find(config_of(HANGS)).cause == f"no end after {LIMIT_S} s, the limit for a run; its processes were ended"
    assert store.records()[1] == [] and not store.partial.exists() and not (store.root / "set-aside").exists()
    for name in ("of_the_killed", "of_the_hanging"):  # their GPU, if they had one, is free
        assert ended(int((fault_folder / name).read_text())), name
    assert f"cause: no end after {LIMIT_S} s" in run_log(store, config_of(HANGS).run_id)

    # Without Dask, it goes on where that was.
    before = content(store)
    (fault_folder / "mended").touch()
    end = run_sweep([sweep], store, How(notebook=faults.notebook), Console(quiet=True))
    assert end.counts == {"ok": 5} and not end.left
    after = content(store)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {config_of(KILLS_WORKER).run_id, config_of(HANGS).run_id}


def test_what_a_killed_worker_left_is_ended_also_if_no_run_follows(store, fault_folder, sweep_of):
    end = run_sweep([sweep_of(KILLS_WORKER)], store, How(workers="1", notebook=faults.notebook, timeout_s=120), Console(quiet=True))
    assert end.counts == {"failed": 1} and "the worker that ran it died" in end.failed[0][1], end
    assert ended(int((fault_folder / "of_the_killed").read_text()))


@pytest.fixture
def cluster(fault_folder):
    """A scheduler and two workers, as somebody would start them on other machines; the scheduler's address."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(faults.execute.PROJECT / "lib")])}
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler"], [sys.executable, "-m", "distributed.cli.dask_worker"]
    file = fault_folder / "scheduler.json"
    scheduler = subprocess.Popen([*dask[0], "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)],
                                 env=environment, stderr=subprocess.DEVNULL)
    (fault_folder / "scheduler").write_text(str(scheduler.pid))
    processes = [scheduler, *(subprocess.Popen([*dask[1], "--scheduler-file", str(file), "--nthreads", "1", "--resources", "CPU=1",
                                                "--no-dashboard", "--death-timeout", "20"], env=environment, stderr=subprocess.DEVNULL)
                              for _ in range(2))]
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    yield json.loads(file.read_text())["address"]
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def test_a_joined_scheduler_that_is_killed_leaves_what_is_done_and_the_rest_can_be_resumed(cluster, store, fault_folder, sweep_of):
    first = run_sweep([sweep_of(*MEETS)], store, How(scheduler=cluster, notebook=faults.notebook, timeout_s=120), Console(quiet=True))
    assert first.counts == {"ok": 2} and not first.left, first
    one, other = map(config_of, MEETS)  # each record says what ran beside it
    assert [store.find(config).beside for config in (one, other)] == [[f"benchmark/{other.run_id}"], [f"benchmark/{one.run_id}"]]
    before = content(store)
    sweep = sweep_of(*MEETS, KILLS_SCHEDULER, 2)
    end = run_sweep([sweep], store, How(scheduler=cluster, notebook=faults.notebook, time_budget_s=500), Console(quiet=True))
    assert end.stopped_by.startswith("the scheduler is gone") and config_of(KILLS_SCHEDULER) in end.left
    assert before.items() <= content(store).items() and store.records()[1] == [] and not store.partial.exists()
    (fault_folder / "mended").touch()
    end = run_sweep([sweep], store, How(workers="1", notebook=faults.notebook), Console(quiet=True))  # another number of workers
    assert end.counts == {"ok": 4} and before.items() <= content(store).items()


def can_mount():
    return subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this system lets nobody mount in a namespace of their own, so no disk can be made small")
@pytest.mark.parametrize("seed, told", [(FILLS, "No space left on device"), (LOCKS, "Read-only file system")])
def test_a_full_disk_and_a_folder_that_turns_read_only_stop_the_sweep_and_lose_nothing(seed, told, fault_folder, sweep_of):
    done = subprocess.run(["unshare", "-rm", sys.executable, faults.__file__, str(fault_folder), str(sweep_of(0, 1, seed, 2)), str(seed)],
                          capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(faults.execute.PROJECT / "lib")}, timeout=300)
    assert done.returncode == 0, done.stderr
    stopped, resumed = json.loads(done.stdout.splitlines()[-1])
    assert stopped["stopped_by"] == f"the runs folder, which cannot be written to ({told})", stopped
    assert stopped["left"] == 4 - len(stopped["records"]) and stopped["left"] >= 1 and stopped["failed"] == []
    assert stopped["errors"] == resumed["errors"] == [] and not resumed["set_aside"]
    assert {int(key): status for key, (status, _) in resumed["records"].items()} == {0: "ok", 1: "ok", 2: "ok", seed: "ok"}
    assert stopped["records"].items() <= resumed["records"].items()


# Without a cluster

def swallows(config, folder, timeout_s, more):
    """A run in which the signal comes where an exception would be lost, as in the middle of an import."""
    with suppress(BaseException):
        signal.raise_signal(signal.SIGTERM)
    return faults.notebook(config, folder, timeout_s, more)


def test_a_signal_ends_the_run_that_goes_on_whatever_it_came_upon(store, fault_folder, sweep_of):
    end = run_sweep([sweep_of(HANGS, 1)], store, How(notebook=swallows, timeout_s=60), Console(quiet=True))
    assert end.stopped_by == "SIGTERM" and end.left == [config_of(HANGS), config_of(1)] and not end.counts
    assert content(store) == {} and not store.partial.exists()


def at_its_end(config, folder, timeout_s, more):
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


@pytest.mark.parametrize("how, told", [
    (How(workers="many"), "expected gpus or a number"), (How(workers="0"), "expected gpus or a number"),
    (How(workers="2", scheduler="tcp://127.0.0.1:1"), "one or the other"), (How(exclusive=("speed",)), "expected all or a study"),
    (How(scheduler="tcp://127.0.0.1:1"), "nothing answers at 'tcp://127.0.0.1:1'"),
])
def test_what_cannot_be_done_is_said_in_a_sentence(how, told, store, sweep_of, monkeypatch):
    monkeypatch.setattr(workers, "ANSWER_S", 1)
    with pytest.raises((SweepError, workers.WorkersError), match=re.escape(told)):
        run_sweep([sweep_of(0)], store, how, Console(quiet=True))
    assert content(store) == {}


def test_runs_that_no_worker_takes_are_refused_and_not_waited_for():
    pool = workers.Dask.__new__(workers.Dask)
    pool.workers = {"tcp://somewhere": {"resources": {"GPU": 1}}}
    with pytest.raises(workers.WorkersError, match="no worker offers CPU=1, which a run with device 'cpu' takes"):
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
        self.store, self.given, self.seen, self.more = store, [], [], []

    def free(self, config):
        return len(self.given) < self.size

    def running(self):
        return list(self.given)

    def submit(self, config, more):
        self.given.append(config)
        self.more.append(more)
        self.seen.append(sorted((c.study, c.size) for c in self.given))

    def wait(self):
        config = self.given.pop(0)
        return [(config, workers.make_run(config, self.store, notebook=finished))]

    def close(self):
        pass


def finished(config, folder, timeout_s, more):
    (folder / "outcome.json").write_text('{"finished": true}')
    return "ok", None


def test_the_longest_runs_go_first_and_exclusive_ones_alone(store, write_sweep, monkeypatch):
    slots = Slots(store)
    monkeypatch.setattr("stepscope.runs.sweep.Here", lambda *arguments: slots)
    sweep = write_sweep([{"study": study, "fixed": {key: value for key, value in TINY.items() if key != "size"}, "axes": {"size": ["nano", "tiny", "micro"]}}
                         for study in ("warmup", "benchmark")])
    assert run_sweep([sweep], store, How(exclusive=("warmup",)), Console(quiet=True)).counts == {"ok": 6}
    assert slots.seen == [[("benchmark", "tiny")], [("benchmark", "micro"), ("benchmark", "tiny")], [("benchmark", "micro"), ("benchmark", "nano")],
                          [("warmup", "tiny")], [("warmup", "micro")], [("warmup", "nano")]]
    assert not any(slots.more)  # a spare would be made ready beside one of those
    beside = {record.run_id[:4]: record.beside for record in store.records()[0] if record.study == "warmup"}
    assert beside == {"nano": [], "tiny": [], "micr": []}
    assert work_estimate(configure("benchmark", **TINY | {"size": "tiny"})) > work_estimate(configure("benchmark", **TINY))


class AtOnce(Slots):
    """All that it was given goes on at the same time and comes back together."""

    def wait(self):
        given, self.given, met = self.given, [], threading.Barrier(len(self.given), timeout=60)
        with ThreadPoolExecutor() as pool:
            return list(zip(given, pool.map(lambda config: workers.make_run(
                config, self.store, notebook=lambda *arguments: met.wait() < 0 or finished(*arguments)), given)))


def test_runs_that_come_back_together_were_beside_each_other(store, sweep_of, monkeypatch):
    monkeypatch.setattr("stepscope.runs.sweep.Here", lambda *arguments: AtOnce(store))
    assert run_sweep([sweep_of(1, 2)], store, How(), Console(quiet=True)).counts == {"ok": 2}
    one, other = (config_of(seed) for seed in (1, 2))
    assert store.find(one).beside == [f"benchmark/{other.run_id}"] and store.find(other).beside == [f"benchmark/{one.run_id}"]


def test_a_log_is_found_by_the_beginning_of_an_id_and_only_if_that_is_one_runs(store, fault_folder, sweep_of):
    run_sweep([sweep_of(0, 1)], store, How(notebook=finished), Console(quiet=True))
    assert run_log(store, f"benchmark/{config_of(0).run_id}").startswith(f"benchmark/{config_of(0).run_id}: ok")
    with pytest.raises(RecordError, match="'nano' names 2 runs .benchmark/nano"):
        run_log(store, "nano")
    with pytest.raises(RecordError, match="'large' names no run"):
        run_log(store, "large")
