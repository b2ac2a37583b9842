"""Test that sweeps on external Dask workers can be stopped and resumed like local sweeps."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from distributed import Security

from conftest import HANGS, RAISES, TINY, ended
from stepscope.runs.workers import RESOURCE, local_workers, workers_of

QUIET = {"DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "error"}


class Cluster:
    """A scheduler and its workers, all started with Dask's command line."""

    def __init__(self, folder, environment):
        self.folder, self.environment, self.started = folder, os.environ | QUIET | environment, []
        self.file = folder / "scheduler.json"
        self.scheduler = self._start(
            "scheduler",
            "--scheduler-file",
            self.file,
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--protocol",
            "tls" if environment else "tcp",
        )
        deadline = time.monotonic() + 60
        while not self.file.exists() or not self.file.read_text().endswith("}"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.address = json.loads(self.file.read_text())["address"]

    def _start(self, *arguments):
        command = [sys.executable, "-m", "dask", *map(str, arguments)]
        with (self.folder / "dask.log").open("a") as log:
            self.started.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        return self.started[-1]

    def worker(self, resources="RUNS=1", threads=1):
        return self._start(
            "worker",
            self.address,
            "--nthreads",
            threads,
            "--no-dashboard",
            "--resources",
            resources,
            "--local-directory",
            self.folder,
        )

    def close(self):
        for process in reversed(self.started):
            process.terminate()
        for process in self.started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def cluster(tmp_path, faults):  # faults sets the environment that workers inherit
    made = []

    def make(**environment):
        folder = tmp_path / "dask"
        folder.mkdir()
        made.append(Cluster(folder, environment))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def sweep(program, write_sweep, store):
    def start(cluster, seeds, **fields):
        path = write_sweep({"study": "benchmark", "fixed": TINY | fields, "axes": {"seed": seeds}})
        return program("sweep", path, "--runs", store.root, "--scheduler", cluster.address)

    return start


def seeds(store, status="ok"):
    return {record.config["seed"] for record in store.records(check_files=True)[0] if record.status == status}


def test_sweep_on_external_workers_can_be_stopped_killed_and_continued(cluster, sweep, store, faults):
    dask = cluster()
    worker = dask.worker()
    for number, status in ((signal.SIGTERM, 75), (signal.SIGKILL, -9)):
        (faults / "child").unlink(missing_ok=True)
        first = sweep(dask, [0, HANGS])
        first.wait_for((faults / "child").exists)
        first.process.send_signal(number)
        assert first.process.wait(60) == status
        # The worker is still alive; it has killed the abandoned run.
        assert ended(int((faults / "child").read_text())) and worker.poll() is None
        assert seeds(store) == {0}
    (faults / "mended").touch()
    assert sweep(dask, [0, HANGS]).process.wait(120) == 0
    assert seeds(store) == {0, HANGS} and not store.partial.exists()


def test_run_moves_to_another_worker_when_its_worker_dies(cluster, sweep, store, faults):
    dask = cluster()
    workers = [dask.worker()]
    first = sweep(dask, [HANGS, RAISES])
    first.wait_for((faults / "child").exists)
    (faults / "mended").touch()
    workers.append(dask.worker())
    os.killpg(workers[0].pid, signal.SIGKILL)  # the nanny is killed too, because it would restart the worker
    assert first.process.wait(120) == 0 and seeds(store) == {HANGS, RAISES}
    assert first.output_file.read_text().count("running it again") == 1
    assert ended(int((faults / "child").read_text()))


@pytest.mark.slow
def test_dead_scheduler_is_reported_and_its_runs_are_ended(cluster, sweep, store, faults):
    dask = cluster()
    dask.worker()
    first = sweep(dask, [0, HANGS])
    first.wait_for((faults / "child").exists)
    dask.scheduler.kill()
    assert first.process.wait(120) == 75 and "the loss of the scheduler" in first.output_file.read_text()
    assert seeds(store) == {0} and ended(int((faults / "child").read_text()))


def test_workers_without_resources_are_rejected_before_creating_a_folder(cluster, sweep, store):
    dask = cluster()
    dask.worker("OTHER=1")
    first = sweep(dask, [0])
    assert first.process.wait(60) == 2
    assert "offer neither the resource GPU nor the resource RUNS" in first.output_file.read_text()
    assert not store.root.exists()


@pytest.mark.slow
def test_sweep_joins_tls_scheduler_with_dask_configuration(cluster, sweep, store, tmp_path, monkeypatch):
    security, tls = Security.temporary(), "DASK_DISTRIBUTED__COMM__TLS__"
    files = {"CA_FILE": "tls_ca_file"} | {
        f"{role}__{part}": f"tls_client_{part.lower()}"
        for role in ("SCHEDULER", "WORKER", "CLIENT")
        for part in ("CERT", "KEY")
    }
    for name in files.values():
        (tmp_path / name).write_text(getattr(security, name))
    environment = {f"{tls}{option}": str(tmp_path / name) for option, name in files.items()}
    dask = cluster(DASK_DISTRIBUTED__COMM__DEFAULT_SCHEME="tls", **environment)
    assert dask.address.startswith("tls://")
    dask.worker()
    refused = sweep(dask, [0])
    assert refused.process.wait(60) == 2 and not store.root.exists()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    joined = sweep(dask, [0])
    assert joined.process.wait(120) == 0, joined.output_file.read_text()


def test_local_workers_listen_only_on_loopback_and_end_with_the_sweep(tmp_path):
    gpus = [{"visible": "3", "name": "x", "gib": 79.6}, {"visible": "GPU-ab", "name": "x", "gib": 79.6}]
    with local_workers(gpus, 2, tmp_path / "scratch") as client:
        workers = workers_of(client)
        assert [worker["resources"] for worker in workers.values()] == [{RESOURCE["cuda"]: 2}]
        assert {worker["nthreads"] for worker in workers.values()} == {2}
        visible = set(client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).values())
        assert visible == {"3,GPU-ab"}
        here = psutil.Process()
        family = [here, *here.children(recursive=True)]
        listens = {
            connection.laddr.ip
            for process in family
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listens == {"127.0.0.1"}
        pids = set(client.run(os.getpid).values())
    assert all(ended(pid) for pid in pids)
