"""Where runs go on: Dask workers, of this machine or of somebody's scheduler, used in one and the same way.

A worker is a machine with GPUs, or a part of a machine without one. As Dask resources it offers how many GPUs it
has (``GPU``), or how many runs it makes at a time on its CPU (``RUNS``). A run on a GPU has it to itself, with
that GPU's share of the machine's cores: whatever runs next to a measurement changes it.

The sweep places runs, and looks after them each half second: Dask's ``resources=`` asks what a worker has, not
what is free there, so that a run would wait at one worker while another has a free GPU; ``priority=`` orders what
waits at one worker; ``as_completed`` waits on when a signal has been noted.
"""

import os
import queue
import re
import signal
import threading
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
from stepscope.runs.machine import gpus_here
from stepscope.runs.record import Record
from stepscope.runs.run import CORES, DASKS, NOTEBOOKS, kill_run_processes, make_run

RESOURCE = {"cuda": "GPU", "cpu": "RUNS"}  # by device: what a worker must offer
ANSWER_S, WORKERS_S, CLOSE_S = 10, 60, 5  # waited for a scheduler's answer, its first worker, a close
START = (
    "dask worker ADDRESS --nthreads 2 --resources GPU=2 on a machine with two GPUs"
    " (without a GPU, --nthreads 1 --resources RUNS=1)"
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
        """Memory of the smallest GPU, in GiB."""
        with_gpus = [address for address, worker in self.offers.items() if "GPU" in worker["resources"]]
        answers = self.client.run(gpus_here, workers=with_gpus) if with_gpus else {}
        return min((gpu["gib"] for gpus in answers.values() for gpu in gpus), default=None)

    def places(self, device: str) -> int:
        """Return how many runs on this device all workers make at a time."""
        offered = [
            min(worker["nthreads"], int(worker["resources"].get(RESOURCE[device], 0)))
            for worker in self.offers.values()
        ]
        return sum(offered)

    def busy(self) -> bool:
        """Whether no worker has a thread to spare."""
        return len(self.running) >= sum(worker["nthreads"] for worker in self.offers.values())

    def place(self, device: str) -> str | None:
        """Return the address of a worker that is free for a run on this device, of several the one with the least
        to do; None: there is none at the moment."""
        resource, places = RESOURCE[device], []
        for address, worker in self.offers.items():
            runs = sum(assignment.address == address for assignment in self.running)
            if runs < min(worker["nthreads"], worker["resources"].get(resource, 0)):
                places.append((runs, address))
        return min(places)[1] if places else None

    def submit(self, config: RunConfig, folder: Path, address: str) -> None:
        task = config, str(folder), self.timeout_s, self.environment
        future = self.client.submit(
            work,
            *task,
            key=f"{config.study}-{config.run_id}-{folder.name}",
            workers=[address],
            resources={RESOURCE[config.device]: 1},
            retries=0,
            pure=False,
        )
        self.running.append(Assignment(config, folder, address, future))

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
                self.client.run(kill_run_processes, partial)


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
    if config.device == "cpu":
        return make_run(config, Path(folder), environment, timeout_s, abandoned).model_dump_json()
    with _free_gpu(int(worker.state.total_resources["GPU"])) as gpu:
        return make_run(config, Path(folder), environment | gpu, timeout_s, abandoned).model_dump_json()


_gpus: queue.SimpleQueue = (
    queue.SimpleQueue()
)  # the free GPUs of a worker's machine: a run's environment on each
_gpus_listed = threading.Lock()


def _list_gpus(count: int) -> None:
    """Fill the queue of free GPUs, once in a worker's life."""
    if _gpus_listed.acquire(blocking=False):
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = named.split(",") if named else [str(index) for index in range(count)]
        cores = sorted(os.sched_getaffinity(0))
        share = max(len(cores) // count, 1)
        for index, name in enumerate(names[:count]):
            own = cores[index * share : (index + 1) * share] or cores
            _gpus.put({"CUDA_VISIBLE_DEVICES": name.strip(), CORES: ",".join(map(str, own))})


@contextmanager
def _free_gpu(count: int) -> Iterator[dict[str, str]]:
    """Wait for one of this worker's ``count`` GPUs, and have it with its share of the machine's cores."""
    _list_gpus(count)
    gpu = _gpus.get()
    try:
        yield gpu
    finally:
        _gpus.put(gpu)


@contextmanager
def local_workers(gpus: list[dict], count: int, scratch: Path) -> Iterator[Any]:
    """A client of workers of this machine: one for its GPUs; without any, ``count``, each with its part of the
    cores. They end with this process, however it does.

    Args:
        gpus: of :func:`stepscope.runs.machine.gpus_here`, those to use.
        scratch: a folder for Dask's own files.

    Raises:
        SchedulerGone: they did not start.
    """
    import dask
    from distributed import Client, Nanny, Scheduler, Security, SpecCluster

    offers: list[dict[str, Any]]
    if gpus:
        visible = ",".join(gpu["visible"] for gpu in gpus)
        offer = {
            "nthreads": len(gpus),
            "resources": {"GPU": len(gpus)},
            "env": {"CUDA_VISIBLE_DEVICES": visible},
        }
        offers = [offer]
    else:
        places = min(count, len(os.sched_getaffinity(0)))
        offers = [{"nthreads": 1, "resources": {"RUNS": 1}} for _ in range(places)]
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
            has = "its workers offer neither GPU nor RUNS" if workers_of(client) else "it has no worker"
            raise WorkersError(f"--scheduler: {address}: {has}; start some with: {START}")
        yield client
    finally:
        with suppress(Exception):
            client.close(timeout=CLOSE_S)
