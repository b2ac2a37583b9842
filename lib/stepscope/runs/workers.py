"""Where runs go on: Dask workers, of this machine or of somebody's scheduler, used in one and the same way.

A worker is a GPU, or a part of a machine without one. It has a few threads, each of which can make a run, and
says as Dask resources what it can give: GiB of its GPU's memory (``GPU_GIB``), or runs on a CPU (``RUNS``).
The sweep gives each run to a worker with a thread and memory for it; runs that share a GPU measure
one at a time (:mod:`stepscope.gpu_lock`).

It is the sweep that places runs, and looks after them each half second: Dask's ``resources=`` asks what a
worker has, not what is free there, so that a run would wait at one worker while another has room;
``priority=`` orders what waits at one worker; ``as_completed`` waits on when a signal has been noted.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from stepscope import StepscopeError
from stepscope.config import RunConfig
from stepscope.files import one_line
from stepscope.gpu_lock import GPU_LOCK
from stepscope.runs.record import Record
from stepscope.runs.run import DASKS, NOTEBOOKS, end_marked, make_run

RESOURCE = {"cuda": "GPU_GIB", "cpu": "RUNS"}  # by device: what a worker must offer
MOST_A_GPU, CORES_A_RUN = 4, 4  # so many runs share a GPU where each has so many cores
ANSWER_S, WORKERS_S, CLOSE_S = 10, 60, 5  # waited for a scheduler's answer, its first worker, a close
START = (
    "dask worker ADDRESS --nthreads 4 --resources GPU_GIB=139 (or, without a GPU, --nthreads 1"
    " --resources RUNS=1)"
)


class WorkersError(StepscopeError, RuntimeError):
    """Workers that cannot be had, or that cannot do this sweep's runs."""


class WorkerDied(StepscopeError, RuntimeError):
    """The worker that had a run is gone."""


class SchedulerGone(StepscopeError, RuntimeError):
    """The scheduler cannot be reached any more; what it was given is not known to be done."""


@dataclass
class Assignment:
    """A run that a worker has."""

    config: RunConfig
    folder: Path
    address: str
    takes: float  # of the worker's resource
    future: Any


class Workers:
    """The workers of a scheduler."""

    def __init__(self, client: Any, timeout_s: float | None = None, notebooks: Path | None = None):
        self.client, self.timeout_s = client, timeout_s
        self.offers: dict[str, dict] = {}  # by the worker's address: name, nthreads, resources
        self.running: list[Assignment] = []
        self.refresh()
        cores = len(os.sched_getaffinity(0))
        parts = max(len(self.offers), 1) if client.cluster and "cuda" not in self.devices() else 1
        self.environment = {name: os.environ[name] for name in DASKS if name in os.environ}
        if notebooks:
            self.environment[NOTEBOOKS] = str(notebooks.absolute())
        if parts > 1:
            self.environment.setdefault("OMP_NUM_THREADS", str(max(cores // parts, 1)))

    def refresh(self) -> None:
        """See which workers there are."""
        try:
            if self.client.status != "running":  # also while it tries again: its futures are cancelled then
                raise OSError(f"the connection is {self.client.status}")
            self.offers = workers_of(self.client)
        except Exception as error:  # noqa: BLE001 Dask's own errors for a lost scheduler are of many types
            raise SchedulerGone(f"the scheduler is gone ({error})") from None

    def devices(self) -> list[str]:
        """``cuda``, ``cpu``: what some worker offers, the GPU first."""
        return [
            device
            for device, resource in RESOURCE.items()
            if any(resource in worker["resources"] for worker in self.offers.values())
        ]

    def gpu_gib(self) -> float | None:
        """Memory of the smallest GPU."""
        return min(
            (
                worker["resources"]["GPU_GIB"]
                for worker in self.offers.values()
                if "GPU_GIB" in worker["resources"]
            ),
            default=None,
        )

    def busy(self) -> bool:
        """Whether no worker has a thread to spare."""
        return len(self.running) >= sum(worker["nthreads"] for worker in self.offers.values())

    def place(self, device: str, gib: float) -> tuple[str, float] | None:
        """A worker that has a thread and so much memory for a run now, and what the run takes of it; None:
        there is none at the moment. Of several, the one with the least to do."""
        resource, places = RESOURCE[device], []
        for address, worker in self.offers.items():
            has = worker["resources"].get(resource, 0.0)
            here = [one.takes for one in self.running if one.address == address]
            takes = min(gib, has) if device == "cuda" else 1.0
            if has and len(here) < worker["nthreads"] and takes <= has - sum(here):
                places.append((len(here), address, takes))
        return min(places)[1:] if places else None

    def submit(self, config: RunConfig, folder: Path, address: str, takes: float) -> None:
        task = config, str(folder), self.timeout_s, self.environment
        future = self.client.submit(
            work,
            *task,
            key=f"{config.study}-{config.run_id}-{folder.name}",
            workers=[address],
            resources={RESOURCE[config.device]: takes},
            retries=0,
            pure=False,
        )
        self.running.append(Assignment(config, folder, address, takes, future))

    def wait(self) -> list[tuple[Assignment, Record | Exception]]:
        """What has come back within half a second: records, or why there is none."""
        until = time.monotonic() + 0.5
        while time.monotonic() < until and not any(one.future.done() for one in self.running):
            time.sleep(0.05)
        self.refresh()
        over = [one for one in self.running if one.future.done() or one.address not in self.offers]
        self.running = [one for one in self.running if one not in over]
        return [(one, self._result(one)) for one in over]

    def _result(self, assignment: Assignment) -> Record | Exception:
        if assignment.future.status not in ("finished", "error"):
            assignment.future.cancel(force=True)
            return WorkerDied("the worker that ran it died (killed, or its machine went down)")
        try:
            return Record.model_validate_json(assignment.future.result())
        except OSError as error:
            return error
        except Exception as error:  # noqa: BLE001 Dask's for a lost worker, a bug, or another version of this package there
            return WorkerDied(f"the worker gave it back: {type(error).__name__}: {_in_words(error)}")

    def close(self, partial: Path) -> None:
        """End what still runs in folders of ``partial``, wherever."""
        if self.running:
            with suppress(Exception):  # a scheduler or a worker may be gone; its runs end with it
                self.client.cancel([one.future for one in self.running], force=True)
                self.client.run(end_marked, partial)


def workers_of(client: Any) -> dict[str, dict]:
    """The scheduler's workers by address. Asked for directly: the client's copy is at times empty."""
    return dict(client.sync(client.scheduler.identity, n_workers=-1)["workers"])


def work(config: RunConfig, folder: str, timeout_s: float | None, environment: dict[str, str]) -> str:
    """What a worker's thread does: make one run in its folder, and give back its record as JSON."""
    from distributed import Status, get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def abandoned() -> bool:
        """Whether the scheduler has taken back this thread's task, or is gone."""
        state = worker.state.tasks.get(key)
        lives = worker.status in (Status.running, Status.paused)
        return state is None or state.state == "cancelled" or not lives

    if not Path(folder).is_dir():
        raise FileNotFoundError(
            2,
            f"worker {worker.name} does not see it; the runs folder has to be on a"
            " file system that all share",
            folder,
        )
    has_gpu = "GPU_GIB" in worker.state.total_resources
    shared = {GPU_LOCK: str(Path(worker.local_directory) / "gpu-lock")} if has_gpu else {}
    record = make_run(config, Path(folder), environment | shared, timeout_s, abandoned)
    return record.model_dump_json()


@contextmanager
def local_workers(
    gpus: list[dict], count: int, scratch: Path, runs_a_gpu: int | None = None
) -> Iterator[Any]:
    """A client of workers of this machine: one for each GPU; without any, so many, each with its part of the
    cores. They end with this process, however it does.

    Args:
        gpus: of :func:`stepscope.runs.machine.gpus_here`.
        scratch: a folder for Dask's own files.
        runs_a_gpu: so many runs share a GPU; None: as many as its cores allow.

    Raises:
        SchedulerGone: they did not start.
    """
    import dask
    from distributed import Client, Nanny, Scheduler, Security, SpecCluster

    cores = len(os.sched_getaffinity(0)) // max(len(gpus), 1)
    threads = runs_a_gpu or min(max(cores // CORES_A_RUN, 1), MOST_A_GPU)
    offers = [
        {
            "nthreads": threads,
            "resources": {"GPU_GIB": gpu["gib"]},
            "env": {"CUDA_VISIBLE_DEVICES": gpu["visible"]},
        }
        for gpu in gpus
    ]
    offers = offers or [{"nthreads": 1, "resources": {"RUNS": 1}} for _ in range(min(count, cores))]
    # Whoever can speak to a scheduler runs code as its owner. It listens on the loopback only, and TLS with a
    # key of this moment keeps out the machine's other users. The dashboard answers its own pages, and none of
    # another origin.
    security = Security.temporary()
    loopback = {
        "host": "127.0.0.1",
        "protocol": "tls://",
        "security": security,
        "dashboard_address": "127.0.0.1:0",
    }
    own = loopback | {"memory_limit": 0, "local_directory": str(scratch), "silence_logs": "CRITICAL"}
    settings = {
        "temporary-directory": str(scratch),
        "distributed.worker.profile.enabled": False,
        "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin": [],
    }
    cluster = None
    try:
        with dask.config.set(settings), _interrupts_blocked():
            cluster = SpecCluster(
                scheduler={"cls": Scheduler, "options": loopback | {"dashboard": True}},
                workers={index: {"cls": Nanny, "options": own | offer} for index, offer in enumerate(offers)},
                security=security,
                silence_logs="CRITICAL",
            )
            client = Client(cluster, set_as_default=False)
            client.wait_for_workers(len(offers), timeout=WORKERS_S)
    except Exception as error:  # noqa: BLE001 of many types: of the worker's process, its nanny, the connection to it
        if cluster:
            cluster.close(timeout=CLOSE_S)
        raise SchedulerGone(f"the local workers, which did not start ({_in_words(error)})") from None
    try:
        yield client
    finally:
        with suppress(Exception):  # the scheduler may be gone, and what was done is on disk
            client.close(timeout=CLOSE_S)
        with suppress(Exception):  # the same; workers end with this process at the latest
            cluster.close(timeout=2 * CLOSE_S)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C or hanging up a terminal reaches every process there; those started meanwhile inherit not to
    hear it: it is the sweep that ends its runs."""
    deaf = {signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf)
    resource_tracker.ensure_running()  # multiprocessing's, which inherits this; its start unblocks SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, deaf)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_words(error: BaseException) -> str:
    return one_line(error, 200) or type(error).__name__


@contextmanager
def joined_workers(address: str, asked: list[str]) -> Iterator[Any]:
    """A client of a scheduler that exists, with TLS as Dask's own configuration has it.

    Args:
        asked: signals that asked the sweep to end; the wait for workers is then over.

    Raises:
        WorkersError: it does not answer, or has no worker that offers what runs take.
    """
    from distributed import Client

    if not re.fullmatch(r"[a-z]+://[^/\s]+:\d+", address):
        raise WorkersError(
            f"--scheduler: got {address!r:.100}, but expected an address such as tcp://10.0.0.1:8786"
        )
    try:
        client = Client(address, set_as_default=False, timeout=ANSWER_S)
    except Exception as error:  # noqa: BLE001 of many types: no such host, no answer, no certificate
        raise WorkersError(f"--scheduler: nothing answers at {address!r:.100} ({_in_words(error)})") from None
    try:
        deadline = time.monotonic() + WORKERS_S
        while not workers_of(client) and time.monotonic() < deadline and not asked:
            time.sleep(0.2)
        offered = {resource for worker in workers_of(client).values() for resource in worker["resources"]}
        if not offered & set(RESOURCE.values()) and not asked:
            has = "its workers offer neither GPU_GIB nor RUNS" if workers_of(client) else "it has no worker"
            raise WorkersError(f"--scheduler: {address}: {has}; start some with: {START}")
        yield client
    finally:
        with suppress(Exception):
            client.close(timeout=CLOSE_S)
