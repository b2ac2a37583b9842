"""Where runs go on: one after another in this process, or side by side on Dask workers.

Both take a configuration with ``submit`` and give back, from ``wait``, what
:func:`stepscope.runs.one_run.make_run` made of it. A worker makes a run in the runs folder's ``.partial/``,
which it has to see as well; only the sweep puts it in its place.
"""
import asyncio
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np

from stepscope import StepscopeError
from stepscope.config import RunConfig, configure
from stepscope.runs.jupyter_kernel import THREADS, asked, clear_dead, set_environment
from stepscope.runs.one_run import make_run
from stepscope.runs.record import Record
from stepscope.runs.store import AlreadyBegun, Store
from stepscope.traces import turns

ANSWER_S = 10  # a scheduler that is there answers within this time
WORKERS_S = 60  # a scheduler's first worker is waited for so long
CLOSE_S = 5  # what is closed and does not answer is left after this time
DIED = "the worker that ran it died (killed, or its machine went down)"
TURNS = "stepscope-turns-"
RESOURCE = {"cuda": "GPU", "cpu": "CPU"}  # by device: what a worker must offer, and a run takes one of


class WorkersError(StepscopeError, RuntimeError):
    """Workers that cannot be had, or that cannot do this sweep's runs."""


class WorkerDied(StepscopeError, RuntimeError):
    """The worker that had a run is gone."""


class NotBegun(StepscopeError, RuntimeError):
    """A worker is gone that had been given a run and had not begun it."""


class SchedulerGone(StepscopeError, RuntimeError):
    """The scheduler cannot be reached any more; what it was given is not known to be done."""


class Stopped(StepscopeError, RuntimeError):
    """A signal asked the sweep to end before it was known what there is to do."""


class ClusterFailed(StepscopeError, RuntimeError):
    """A local cluster did not come up: its workers were killed meanwhile, or there is no memory for them."""


@dataclass
class Task:
    """What a worker is given. Plain values, since it may be on another machine."""

    config: dict
    root: str
    timeout_s: float | None
    where: str
    environment: dict[str, str | None]
    cores: list[int]
    notebook: Callable | None = None
    turns: str | None = None  # the folder of those that share its GPU


class Here:
    """One run after another, in this process."""

    size = 1
    parallel = False
    where = "here"

    def __init__(self, store: Store, timeout_s: float | None = None, notebook: Callable | None = None):
        self.store, self.timeout_s, self.notebook = store, timeout_s, notebook
        self.given: RunConfig | None = None

    def refresh(self) -> None:
        """This process is always there."""

    def free(self, config: RunConfig) -> bool:
        return self.given is None

    def running(self) -> list[RunConfig]:
        return [self.given] if self.given else []

    def submit(self, config: RunConfig) -> None:
        self.given = config

    def wait(self) -> list[tuple[RunConfig, tuple[Path, Record] | Exception]]:
        config, self.given = self.given, None
        if config is None:
            return []
        try:
            return [(config, make_run(config, self.store, self.timeout_s, self.notebook, self.where))]
        except OSError as error:
            return [(config, error)]


class Dask:
    """Runs side by side, at most one on each worker.

    The sweep hands a worker its next run when the last has come back, so that which run goes where is decided
    here and a run is never queued on a worker. Each also takes the worker's GPU (a resource), against other
    clients of the scheduler.
    """

    parallel = True

    def __init__(self, client, store: Store, timeout_s: float | None = None, notebook: Callable | None = None,
                 places: dict[object, dict] | None = None, limit: int | None = None):
        """Args:
            places: of each worker by name, ``environment``, ``cores`` and ``turns``, the folder in which
                those that share a GPU take turns (:mod:`stepscope.traces.turns`); None leaves workers as
                they are.
            limit: use so many workers at most.
        """
        self.client, self.store, self.timeout_s, self.notebook = client, store, timeout_s, notebook
        self.places, self.limit = places or {}, limit
        self.tasks: dict[str, tuple] = {}  # by the worker's address: (configuration, future)
        self.workers: dict[str, dict] = {}
        self.refresh()

    def refresh(self) -> None:
        try:
            if self.client.status != "running":  # also while it tries again: its futures are cancelled then
                raise OSError(f"the connection is {self.client.status}")
            self.workers = workers_of(self.client)
        except Exception as error:  # noqa: BLE001 Dask's own errors for a lost scheduler are of many types
            raise SchedulerGone(f"the scheduler is gone ({error})") from None

    @property
    def size(self) -> int:
        return min(len(self.workers), self.limit or len(self.workers))

    def require(self, configs: list[RunConfig]) -> None:
        """Raises :class:`WorkersError` where no worker offers what a run takes, which would wait for ever."""
        offered = {name for worker in self.workers.values() for name in worker["resources"]}
        for config in configs if offered else ():
            if RESOURCE[config.device] not in offered:
                raise WorkersError(f"no worker offers {RESOURCE[config.device]}=1, which a run with device"
                                   f" {config.device!r} takes ({config.study}/{config.run_id}); they offer"
                                   f" {' and '.join(sorted(offered))}")

    def _idle(self, config: RunConfig) -> list[str]:
        needs = RESOURCE[config.device]
        return [address for address, worker in self.workers.items()
                if address not in self.tasks and needs in worker["resources"]]

    def free(self, config: RunConfig) -> bool:
        return len(self.tasks) < (self.limit or len(self.workers)) and bool(self._idle(config))

    def running(self) -> list[RunConfig]:
        return [config for config, _ in self.tasks.values()]

    def submit(self, config: RunConfig) -> None:
        address = self._idle(config)[0]
        name = self.workers[address]["name"]
        place = self.places.get(name, {})
        threads = {variable: os.environ.get(variable) for variable in THREADS}
        task = Task(config.model_dump(mode="json"), str(self.store.root.resolve()), self.timeout_s,
                    f"worker {name}", threads | place.get("environment", {}), place.get("cores", []),
                    self.notebook, place.get("turns"))
        key = f"{config.study}-{config.run_id}-{uuid.uuid4().hex[:8]}"
        future = self.client.submit(work, task, key=key, workers=[address], pure=False,
                                    resources={RESOURCE[config.device]: 1})
        self.tasks[address] = (config, future)

    def wait(self) -> list[tuple[RunConfig, tuple[Path, Record] | Exception]]:
        """What has come back within half a second: results, or why there is none."""
        from distributed import wait
        try:
            with self.client.as_current():
                futures = [future for _, future in self.tasks.values()]
                wait(futures, timeout=0.5, return_when="FIRST_COMPLETED")
        except TimeoutError:
            self.refresh()
        except Exception:  # noqa: BLE001 Dask has several for a future that its scheduler's or its worker's end cancelled
            time.sleep(1)
            self.refresh()
        results = []
        for address, (config, future) in list(self.tasks.items()):
            if future.status in ("finished", "error"):
                result = self._result(future)
            elif future.status in ("cancelled", "lost") or address not in self.workers:
                future.cancel(force=True)
                result = WorkerDied(DIED) if self.store.claim(config) else NotBegun()
            else:
                continue
            del self.tasks[address]
            results.append((config, result))
        if results:
            self.refresh()
        return results

    @staticmethod
    def _result(future) -> tuple[Path, Record] | Exception:
        from distributed.scheduler import KilledWorker
        try:
            folder, record = future.result()
        except (KilledWorker, AlreadyBegun):
            return WorkerDied(DIED)
        except OSError as error:
            return error
        except Exception as error:  # noqa: BLE001 a bug, or another version of this package there: this run's end only
            return WorkerDied(f"the worker gave it back: {type(error).__name__}: {error}")
        return Path(folder), Record.model_validate_json(record)

    def close(self) -> None:
        if self.tasks:  # stopped: each run's watch sees that its folder is gone, and ends it
            shutil.rmtree(self.store.partial, ignore_errors=True)
        if self.client.status == "running":
            with suppress(Exception):  # a worker may be gone; the next sweep on its machine does this as well
                self.client.run(_clear)


def workers_of(client) -> dict[str, dict]:
    """The scheduler's workers by address. Asked for directly: the client's copy is at times empty."""
    return dict(client.sync(client.scheduler.identity, n_workers=-1)["workers"])


async def _clear() -> None:
    """A worker's end of a sweep: nothing of a worker that was killed here stays, also if no run followed."""
    await asyncio.to_thread(clear_dead)


def work(task: Task) -> tuple[str, str]:
    """What a Dask worker does: make one run in ``.partial/``; its path, and the record as JSON."""
    clear_dead()  # what a worker that was killed here has left: its GPU is to be free
    if task.cores:
        os.sched_setaffinity(0, task.cores)  # of this thread, which the kernel and its threads inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # of this thread, for the kernel
    mark = Path(task.turns) / str(os.getpid()) if task.turns else None
    set_environment(task.environment | ({turns.MARK: str(mark)} if mark else {}))
    try:
        turns.begin_work(mark)
        folder, record = make_run(configure(**task.config), Store(Path(task.root)), task.timeout_s,
                                  task.notebook, task.where, _abandoned())
    finally:
        turns.end_work(mark)
    return str(folder), record.model_dump_json()


def _abandoned() -> Callable[[], bool]:
    """Whether the scheduler has taken back this thread's task: the sweep that asked for it is gone."""
    from distributed import get_worker
    worker = get_worker()
    key = worker.get_current_task()

    def abandoned() -> bool:
        task = worker.state.tasks.get(key)
        return task is None or task.state == "cancelled"
    return abandoned


def gpus_here() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch  # not above: a worker imports this module as well, and starts sooner without
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def core_slices(count: int) -> list[list[int]]:
    """This process's cores in ``count`` parts that share no physical core, if possible each of one socket."""
    def topology(core: int, name: str) -> int:
        with suppress(OSError, ValueError):
            return int(Path(f"/sys/devices/system/cpu/cpu{core}/topology/{name}").read_text())
        return core if name == "core_id" else 0
    cores: dict[tuple[int, int], list[int]] = {}
    for core in sorted(os.sched_getaffinity(0)):
        cores.setdefault((topology(core, "physical_package_id"), topology(core, "core_id")), []).append(core)
    physical = [threads for _, threads in sorted(cores.items())]
    if len(physical) < count:  # fewer cores than workers: hardware threads, and then shared ones
        flat = [core for threads in physical for core in threads]
        return [[flat[index * len(flat) // count]] for index in range(count)]
    return [sorted(core for index in part for core in physical[index])
            for part in np.array_split(range(len(physical)), count)]


def check_workers(workers: str, shared: bool = False) -> None:
    """Raises :class:`WorkersError` where it is neither ``gpus`` nor a number, or more GPUs than there are.

    Args:
        shared: whether several workers may share a GPU, since their runs take turns.
    """
    if workers != "gpus" and not re.fullmatch("[1-9][0-9]*", workers):
        raise WorkersError(f"--workers: got {workers!r}, but expected gpus or a number of workers")
    gpus = gpus_here()
    if workers == "gpus" and not gpus:
        raise WorkersError("--workers: got 'gpus', but there is no GPU here; a number makes so many workers,"
                           " each with its part of the cores")
    if gpus and workers != "gpus" and int(workers) > len(gpus) and not shared:
        raise WorkersError(f"--workers: got {workers}, but there are {len(gpus)} GPUs here, and two timed"
                           " runs never share one; only those of the nsys study take turns, and may share"
                           " one in a sweep of their own")


def local_cluster(workers: str, shared: bool = False):
    """A cluster of this machine, one worker for each GPU, and of each worker its environment and cores.

    Args:
        workers: ``gpus`` or a number; on a machine without GPUs, a number of slices of its cores.
        shared: runs take turns, so workers may share a GPU and its part of the cores; without GPUs, all of
            the cores.

    Raises:
        WorkersError: no such number, or fewer GPUs than that. ClusterFailed: it did not come up.
    """
    import dask
    from distributed import Client, LocalCluster
    check_workers(workers, shared)
    gpus = gpus_here()
    count = len(gpus) if workers == "gpus" else int(workers)
    parts = min(count, len(gpus) or 1) if shared else count
    slices, most = core_slices(parts), os.environ.get("OMP_NUM_THREADS", "")
    places: dict[object, dict] = {}
    for index in range(count):
        cores = slices[index % parts]
        threads = min(len(cores), int(most)) if most.isdigit() else len(cores)
        gpu = {"CUDA_VISIBLE_DEVICES": gpus[index % parts]} if gpus else {}
        environment = {"OMP_NUM_THREADS": str(threads)} | gpu
        places[index] = {"environment": environment, "cores": cores, "turns": None}
    # Whoever can speak to a scheduler runs code as its owner. It listens on the loopback only, and TLS with a
    # key of this moment keeps out the machine's other users. No page of another origin than the dashboard's
    # may read what it shows.
    settings = {"temporary-directory": tempfile.gettempdir(),
                "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin": []}
    cluster = None
    try:
        with dask.config.set(settings), _interrupts_blocked():
            cluster = LocalCluster(n_workers=count, threads_per_worker=1, security=True, memory_limit=0,
                                   silence_logs="CRITICAL", dashboard_address="127.0.0.1:0",
                                   resources={"CPU": 1} | ({"GPU": 1} if gpus else {}))
        client = Client(cluster, set_as_default=False)
        client.run(_be_deaf)
    except Exception as error:  # noqa: BLE001 of many types: of the worker's process, its nanny, the connection to it
        if cluster:
            cluster.close(timeout=CLOSE_S)
        raise ClusterFailed(f"the local cluster, which did not start ({_in_words(error)})") from None
    folders = [tempfile.mkdtemp(prefix=TURNS) if count > parts else None for _ in range(parts)]
    for index in range(count):
        places[index]["turns"] = folders[index % parts]
    return client, places


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C in a terminal reaches every process there; those started meanwhile inherit not to hear it."""
    resource_tracker.ensure_running()  # multiprocessing's, whose start would unblock it again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _be_deaf() -> None:
    """A worker leaves Ctrl-C to its sweep. Kernels do not inherit this, as they would a blocked signal."""
    signal.signal(signal.SIGINT, lambda number, frame: None)


def _in_words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def close_cluster(client) -> None:
    """Let go of a scheduler, and end the cluster where it is one of :func:`local_cluster`."""
    with suppress(Exception):  # the scheduler may be gone, and what was done is on disk
        client.close(timeout=CLOSE_S)
    if client.cluster:
        with suppress(Exception):  # the same; its workers' processes end with this one at the latest
            client.cluster.close(timeout=2 * CLOSE_S)
        clear_dead()  # of its workers, now that none is left


def join_cluster(address: str, store: Store):
    """A client of a scheduler that exists, and what its workers are: ``device``, ``device_name``.

    Raises:
        WorkersError: it does not answer, has no worker yet, or workers that this sweep cannot use.
    """
    from distributed import Client
    try:
        client = Client(address, set_as_default=False, timeout=ANSWER_S)
    except (OSError, ValueError, TimeoutError) as error:
        raise WorkersError(f"--scheduler: nothing answers at {address!r} ({_in_words(error)})") from None
    deadline = time.monotonic() + WORKERS_S
    while not workers_of(client) and time.monotonic() < deadline and not asked:
        time.sleep(0.2)
    if asked:
        client.close()
        raise Stopped(f"stopped by {asked[0]} while waiting for workers; nothing was started")
    if not workers_of(client):
        client.close()
        raise WorkersError(f"--scheduler: {address} has no worker; start some with:"
                           f" dask worker {address} --nthreads 1 --resources GPU=1")
    token = store.partial / f"seen-{uuid.uuid4().hex}"
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch()
        facts = client.run(_facts, str(token.resolve()))
        token.unlink()
    except Exception as error:  # noqa: BLE001 the folder's, the scheduler's, or that of a worker's Python
        client.close()
        raise WorkersError(f"--scheduler: {address}: its workers cannot be asked what they run on"
                           f" ({_in_words(error)}); nothing was started") from None
    offered = {name for worker in workers_of(client).values() for name in worker["resources"]}
    wrong = None
    if blind := [worker for worker, fact in facts.items() if not fact["sees"]]:
        wrong = (f"the worker {blind[0]} does not see {store.root.resolve()};"
                 " the runs folder has to be on a file system that all share")
    elif len(devices := {fact["device_name"] for fact in facts.values()}) > 1:
        wrong = f"has workers with {' and '.join(sorted(devices))}; one runs folder holds one machine's runs"
    elif (gpus := [fact["gpu"] for fact in facts.values() if fact["gpu"]]) and len(set(gpus)) < len(gpus):
        wrong = "two of its workers see the same GPU first; start each with its own CUDA_VISIBLE_DEVICES"
    elif not offered & set(RESOURCE.values()):
        wrong = ("its workers offer neither GPU nor CPU; start them with:"
                 " dask worker ... --nthreads 1 --resources GPU=1 (or CPU=1)")
    if wrong:
        client.close()
        raise WorkersError(f"--scheduler: {address}: {wrong}")
    return client, next(iter(facts.values()))


def _facts(token: str) -> dict:
    """Of this worker: ``device``, ``device_name``, ``gpu`` (its UUID), and whether it ``sees`` a file."""
    return json.loads(_what_is_here()) | {"sees": Path(token).exists()}


@functools.cache
def _what_is_here() -> str:
    """Asked of a process of its own: the worker itself is to touch no GPU."""
    code = ("import json, torch; from stepscope.config import device_here;"
            " from stepscope.runs.machine import machine; device = device_here('auto');"
            " gpu = str(torch.cuda.get_device_properties(0).uuid) if device == 'cuda' else None;"
            " name = machine(device)['device_name'];"
            " print(json.dumps({'device': device, 'device_name': name, 'gpu': gpu}))")
    # Not in the worker's folder: while it ends a run that nobody waits for, that is the run's, and may be
    # gone.
    told = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    if told.returncode:
        raise RuntimeError((told.stderr.strip().splitlines() or [f"Python ended with {told.returncode}"])[-1])
    return told.stdout
