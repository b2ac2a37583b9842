"""Execute runs on Dask workers, which run on this machine or belong to an existing scheduler.

A worker is a machine with GPUs, or a share of a machine without GPUs. Its Dask resources are its number of GPUs
(``GPU``) or its number of parallel runs on the CPU (``RUNS``). A run on a GPU has exclusive use of that GPU and of
a share of the machine's cores, because concurrent work would change a measurement.

The sweep assigns runs to workers itself and polls them every half second, because Dask's own scheduling isn't
suitable: ``resources=`` checks a worker's total resources rather than its free resources, so a run could wait for
one worker while another worker has a free GPU; ``priority=`` only orders the tasks of one worker; and
``as_completed`` keeps waiting after a signal.
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
from stepscope.runs.run import CORES, DASKS, IMAGES, NOTEBOOKS, kill_run_processes, make_run

RESOURCE = {"cuda": "GPU", "cpu": "RUNS"}  # the Dask resource that a run on each device needs
# Timeouts in seconds: to connect to a scheduler, to wait for its first worker, and to close.
ANSWER_S, WORKERS_S, CLOSE_S = 10, 60, 5
START = (
    "dask worker ADDRESS --nthreads 2 --resources GPU=2 on a machine with two GPUs"
    " (without a GPU, --nthreads 1 --resources RUNS=1)"
)


class WorkersError(StepscopeError, RuntimeError):
    """Raised if workers are unavailable, or unsuitable for a sweep's runs."""


class WorkerDied(StepscopeError, RuntimeError):
    """The outcome of a run whose worker died or returned an error."""


class SchedulerGone(StepscopeError, RuntimeError):
    """Raised if the scheduler is unreachable, so that the state of its runs is unknown."""


@dataclass
class Assignment:
    """A run and the worker to which it is assigned."""

    config: RunConfig
    folder: Path
    address: str
    future: Any


class Workers:
    """A scheduler's workers, and the runs that are assigned to them."""

    def __init__(
        self,
        client: Any,
        timeout_s: float | None = None,
        notebooks: Path | None = None,
        images: bool = True,
    ):
        self.client, self.timeout_s = client, timeout_s
        self.offers: dict[str, dict] = {}  # keyed by worker address: a dict with name, nthreads, resources
        self.running: list[Assignment] = []
        self.refresh()
        cores = len(os.sched_getaffinity(0))
        parts = max(len(self.offers), 1) if client.cluster and "cuda" not in self.devices() else 1
        self.environment = {name: os.environ[name] for name in DASKS if name in os.environ}
        if notebooks:
            self.environment[NOTEBOOKS] = str(notebooks.absolute())
        if not images:
            self.environment[IMAGES] = "no"
        if parts > 1:
            self.environment.setdefault("OMP_NUM_THREADS", str(max(cores // parts, 1)))

    def refresh(self) -> None:
        """Update the list of workers.

        Raises:
            SchedulerGone: If the scheduler is unreachable.
        """
        try:
            # also true while the client reconnects; reconnecting cancels its futures
            if self.client.status != "running":
                raise OSError(f"the connection is {self.client.status}")
            self.offers = workers_of(self.client)
        except Exception as error:  # noqa: BLE001 Dask raises many types of errors for a lost scheduler
            raise SchedulerGone(f"the loss of the scheduler ({error})") from None

    def devices(self) -> list[str]:
        """Return the devices that the workers offer, ``cuda`` before ``cpu``."""
        return [
            device
            for device, resource in RESOURCE.items()
            if any(resource in worker["resources"] for worker in self.offers.values())
        ]

    def gpu_gib(self) -> float | None:
        """Return the smallest GPU's memory in GiB, or None if there are no GPUs."""
        with_gpus = [address for address, worker in self.offers.items() if "GPU" in worker["resources"]]
        answers = self.client.run(gpus_here, workers=with_gpus) if with_gpus else {}
        return min((gpu["gib"] for gpus in answers.values() for gpu in gpus), default=None)

    def gpus(self) -> list[int]:
        """Return the number of GPUs that each worker offers."""
        return [int(worker["resources"].get("GPU", 0)) for worker in self.offers.values()]

    def busy(self) -> bool:
        """Return whether all worker threads are busy."""
        return len(self.running) >= sum(worker["nthreads"] for worker in self.offers.values())

    def place(self, config: RunConfig) -> str | None:
        """Return the address of the least busy worker that can start this run, or None if no worker can."""
        resource, places = RESOURCE[config.device], []
        for address, worker in self.offers.items():
            running = [assignment.config for assignment in self.running if assignment.address == address]
            used = sum(other.gpus_needed for other in running)
            has_room = used + config.gpus_needed <= worker["resources"].get(resource, 0)
            if has_room and len(running) < worker["nthreads"]:
                places.append((used, address))
        return min(places)[1] if places else None

    def submit(self, config: RunConfig, folder: Path, address: str) -> None:
        task = config, str(folder), self.timeout_s, self.environment
        future = self.client.submit(
            work,
            *task,
            key=f"{config.study}-{config.run_id}-{folder.name}",
            workers=[address],
            resources={RESOURCE[config.device]: config.gpus_needed},
            retries=0,
            pure=False,
        )
        self.running.append(Assignment(config, folder, address, future))

    def wait(self) -> list[tuple[Assignment, Record | Exception]]:
        """Wait for up to half a second; return the runs that have ended, each with its record or error."""
        until = time.monotonic() + 0.5
        while time.monotonic() < until and not any(assignment.future.done() for assignment in self.running):
            time.sleep(0.05)
        self.refresh()
        ended = [
            assignment
            for assignment in self.running
            if assignment.future.done() or assignment.address not in self.offers
        ]
        self.running = [assignment for assignment in self.running if assignment not in ended]
        return [(assignment, self._result(assignment)) for assignment in ended]

    def _result(self, assignment: Assignment) -> Record | Exception:
        if assignment.future.status not in ("finished", "error"):
            assignment.future.cancel(force=True)
            return WorkerDied("the worker died (it was killed, or its machine went down)")
        try:
            return Record.model_validate_json(assignment.future.result())
        except OSError as error:
            return error
        except Exception as error:  # noqa: BLE001 a lost worker, a bug, or another stepscope version
            return WorkerDied(f"the worker returned an error: {type(error).__name__}: {_describe(error)}")

    def close(self, partial: Path) -> None:
        """Cancel the remaining tasks, and kill all runs whose folders are in ``partial``, on all workers."""
        if self.running:
            with suppress(Exception):  # the scheduler or a worker may be gone, together with its runs
                self.client.cancel([assignment.future for assignment in self.running], force=True)
                self.client.run(kill_run_processes, partial)


def workers_of(client: Any) -> dict[str, dict]:
    """Return the workers, keyed by address.

    The list comes from the scheduler, because the client's own list is sometimes empty.
    """
    return dict(client.sync(client.scheduler.identity, n_workers=-1)["workers"])


def work(config: RunConfig, folder: str, timeout_s: float | None, environment: dict[str, str]) -> str:
    """Execute one run on a worker; return the run's record as JSON.

    Raises:
        FileNotFoundError: If this worker can't access ``folder``.
        OSError, Abandoned: As in :func:`stepscope.runs.run.make_run`.
    """
    from distributed import Status, get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def abandoned() -> bool:
        """Return whether the scheduler has canceled this thread's task or has disappeared."""
        state = worker.state.tasks.get(key)
        lives = worker.status in (Status.running, Status.paused)
        return state is None or state.state == "cancelled" or not lives

    if not Path(folder).is_dir():
        raise FileNotFoundError(
            2,
            f"worker {worker.name} cannot access this folder; the runs folder must be on a"
            " file system that all workers share",
            folder,
        )
    if config.device == "cpu":
        return make_run(config, Path(folder), environment, timeout_s, abandoned).model_dump_json()
    with _free_gpus(int(worker.state.total_resources["GPU"]), config.gpus_needed) as gpus:
        return make_run(config, Path(folder), environment | gpus, timeout_s, abandoned).model_dump_json()


# The worker's free GPUs, each represented by the environment variables for its runs.
_gpus: queue.SimpleQueue = queue.SimpleQueue()
_gpus_listed = threading.Lock()


def _list_gpus(count: int) -> None:
    """Fill the queue of free GPUs. Only the first call has an effect."""
    if _gpus_listed.acquire(blocking=False):
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = named.split(",") if named else [str(index) for index in range(count)]
        cores = sorted(os.sched_getaffinity(0))
        share = max(len(cores) // count, 1)
        for index, name in enumerate(names[:count]):
            gpu_cores = cores[index * share : (index + 1) * share] or cores
            _gpus.put({"CUDA_VISIBLE_DEVICES": name.strip(), CORES: ",".join(map(str, gpu_cores))})


@contextmanager
def _free_gpus(count: int, needed: int) -> Iterator[dict[str, str]]:
    """Wait for ``needed`` of this worker's ``count`` GPUs, and yield the environment that selects them.

    Dask starts a run only if enough GPUs are free, so two runs never wait for each other's GPUs.
    """
    _list_gpus(count)
    gpus = [_gpus.get() for _ in range(needed)]
    try:
        yield {name: ",".join(gpu[name] for gpu in gpus) for name in gpus[0]}
    finally:
        for gpu in gpus:
            _gpus.put(gpu)


@contextmanager
def local_workers(gpus: list[dict], count: int, scratch: Path) -> Iterator[Any]:
    """Start one Dask worker for all GPUs, or ``count`` workers on the CPU (at most one per core); yield a client.

    The workers exit together with this process, regardless of how it ends.

    Args:
        gpus: the GPUs to use, as returned by :func:`stepscope.runs.machine.gpus_here`.
        count: the number of workers on the CPU. This number is used only if ``gpus`` is empty.
        scratch: a folder for Dask's temporary files.

    Raises:
        SchedulerGone: If the workers can't be started.
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
    # Anyone who can connect to a scheduler can run code as its owner. So the scheduler listens only on the
    # loopback interface, and TLS with a temporary key keeps out other users of this machine. The dashboard
    # accepts WebSocket connections only from its own pages.
    security = Security.temporary()
    loopback = {
        "host": "127.0.0.1",
        "protocol": "tls://",
        "security": security,
        "dashboard_address": "127.0.0.1:0",
    }
    worker_options = loopback | {
        "memory_limit": 0,
        "local_directory": str(scratch),
        "silence_logs": "CRITICAL",
    }
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
                workers={
                    index: {"cls": Nanny, "options": worker_options | offer}
                    for index, offer in enumerate(offers)
                },
                security=security,
                silence_logs="CRITICAL",
            )
            client = Client(cluster, set_as_default=False)
            client.wait_for_workers(len(offers), timeout=WORKERS_S)
    except Exception as error:  # noqa: BLE001 many error types: worker process, nanny, connection
        if cluster:
            cluster.close(timeout=CLOSE_S)
        raise SchedulerGone(f"an error while starting the local workers ({_describe(error)})") from None
    try:
        yield client
    finally:
        with suppress(Exception):  # the scheduler may be gone, but all results are on disk
            client.close(timeout=CLOSE_S)
        with suppress(Exception):  # as above; the workers exit with this process at the latest
            cluster.close(timeout=2 * CLOSE_S)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT and SIGHUP within the context, so that processes started there inherit the block.

    Ctrl-C or a closing terminal sends a signal to all of the terminal's processes. However, the runs must not
    receive this signal, because the sweep itself ends its runs.
    """
    signals = {signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    resource_tracker.ensure_running()  # the tracker must inherit the block, too; starting it unblocks SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _describe(error: BaseException) -> str:
    return one_line(error, 200) or type(error).__name__


@contextmanager
def joined_workers(address: str, signals: list[str]) -> Iterator[Any]:
    """Connect to an existing scheduler, with TLS if Dask's configuration requires it, and yield a client.

    Args:
        address: the scheduler's address, such as tcp://10.0.0.1:8786.
        signals: the list of signals received so far that ask the sweep to end. A signal also ends the wait for
            workers.

    Raises:
        WorkersError: If the address is invalid, the scheduler doesn't answer, or no worker offers GPU or RUNS.
    """
    from distributed import Client

    if not re.fullmatch(r"[a-z]+://[^/\s]+:\d+", address):
        raise WorkersError(
            f"--scheduler: got {address!r:.100}, but expected an address such as tcp://10.0.0.1:8786"
        )
    try:
        client = Client(address, set_as_default=False, timeout=ANSWER_S)
    except Exception as error:  # noqa: BLE001 many error types: unknown host, no answer, no certificate
        raise WorkersError(f"--scheduler: nothing answers at {address!r:.100} ({_describe(error)})") from None
    try:
        deadline = time.monotonic() + WORKERS_S
        while not workers_of(client) and time.monotonic() < deadline and not signals:
            time.sleep(0.2)
        offered = {resource for worker in workers_of(client).values() for resource in worker["resources"]}
        if not offered & set(RESOURCE.values()) and not signals:
            problem = (
                "its workers offer neither the resource GPU nor the resource RUNS"
                if workers_of(client)
                else "it has no workers"
            )
            raise WorkersError(f"--scheduler: {address}: {problem}; start some with: {START}")
        yield client
    finally:
        with suppress(Exception):
            client.close(timeout=CLOSE_S)
