"""Run a sweep: execute and record a run for each requested configuration that doesn't have a valid record.

To resume a sweep, repeat its command. It then skips finished runs and retries failed runs.
"""

import hashlib
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.process import current_process
from pathlib import Path
from time import monotonic

from rich.console import Console

from stepscope.config import RunConfig, require_device
from stepscope.runs.machine import gpus_here, machine
from stepscope.runs.record import Record, RecordError
from stepscope.runs.run import NOTEBOOKS, PRINTED, kill_run_processes, notebook_of
from stepscope.runs.source import notebook_source
from stepscope.runs.store import Store
from stepscope.runs.sweep_file import SweepError, SweepPlan, load_sweeps, peak_gib
from stepscope.runs.workers import (
    Assignment,
    SchedulerGone,
    Workers,
    WorkersError,
    joined_workers,
    local_workers,
)

# Signals within this time are one request, because a closing terminal sends its signal repeatedly.
SAME_REQUEST_S = 1.0


@dataclass
class SweepOptions:
    """Options for a sweep. By default, its runs use all of this machine's GPUs, or its CPU if it has no GPU.

    Args:
        workers: the maximum number of GPUs to use. On a machine without a GPU, the number of parallel runs, at
            most one per core.
        scheduler: the address of a Dask scheduler whose workers execute the runs.
        timeout_s: the time limit for each run, in seconds. A run that exceeds it is killed and recorded as failed.
        time_budget_s: the time in seconds after which the sweep starts no more runs.
        notebooks: a folder with notebooks to execute instead of the package's notebooks of the same names.
        images: whether to keep the images in executed notebooks.
        replace: whether to rerun configurations whose runs used a different version of their notebook, and replace
            the old runs.
        progress: whether to print the output of the notebooks while they run.
    """

    workers: int | None = None
    scheduler: str | None = None
    timeout_s: float | None = None
    time_budget_s: float | None = None
    notebooks: Path | None = None
    images: bool = True
    replace: bool = False
    progress: bool = False


@dataclass
class SweepEnd:
    """A sweep's outcome.

    Args:
        counts: the number of runs with each status, including runs that were already done.
        left: the configurations that still have to be run.
        stopped_by: the reason why the sweep stopped early, or None.
    """

    counts: Counter = field(default_factory=Counter)
    left: list[RunConfig] = field(default_factory=list)
    stopped_by: str | None = None


def run_sweep(sources: list[Path | dict], store: Store, options: SweepOptions, console: Console) -> SweepEnd:
    """Run the sweeps' configurations that the store doesn't contain yet, and print the outcome of each run.

    Args:
        sources: as in :func:`stepscope.runs.sweep_file.load_sweeps`.

    Raises:
        SweepError, WorkersError: If the sweep can't start, or a worker's device differs from the folder's device.
        StoreBusy: If another sweep is writing to the folder.
        StoreError: If the folder isn't writable.
    """
    began = monotonic()
    with _signals_noted() as signals, ExitStack() as closing:
        # Reject invalid requests before changing any folder.
        if options.scheduler:
            client = closing.enter_context(joined_workers(options.scheduler, signals))
            workers = Workers(client, options.timeout_s, options.notebooks, options.images)
            plan = load_sweeps(sources, (workers.devices() or ["cpu"])[0], workers.gpu_gib())
            _require(plan.configs, workers.devices(), store, None, max(workers.gpus(), default=0))
        else:
            gpus = gpus_here()[: options.workers]
            device, name = ("cuda", gpus[0]["name"]) if gpus else ("cpu", machine("cpu")["device_name"])
            plan = load_sweeps(sources, device, min((gpu["gib"] for gpu in gpus), default=None))
            _require(plan.configs, [device, "cpu"], store, name, len(gpus))
        closing.enter_context(store.writing())
        end = _what_is_left(plan, store, console, _sources(plan, options), options.replace)
        if end.left and not signals:
            try:
                if not options.scheduler:
                    _name_semaphores(store.root)
                    client = closing.enter_context(
                        local_workers(gpus, options.workers or 1, store.partial / "dask")
                    )
                    workers = Workers(client, options.timeout_s, options.notebooks, options.images)
                runs = "run" if len(end.left) == 1 else "runs"
                console.print(f"{len(end.left)} {runs} to do; Dask dashboard: {client.dashboard_link}")
                _Sweep(workers, store, options, console, end, signals, began).run()
            except SchedulerGone as error:
                end.stopped_by = str(error)
        if signals and end.left:
            end.stopped_by = signals[0]
    return end


def semaphores(root: Path) -> list[Path]:
    """Return the paths of the files that, on Linux, represent the named semaphores of a folder's sweeps."""
    return [*Path("/dev/shm").glob(f"sem.{_prefix(root)}-*")]


def _prefix(root: Path) -> str:
    return f"mp-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:12]}"


def _name_semaphores(root: Path) -> None:
    """Name the semaphores of Dask's nannies after the folder, and remove the semaphores of earlier sweeps.

    If a sweep is killed together with its process group, the process that would remove its semaphores dies, too.
    The names identify such leftovers. Removing them is safe, because only one sweep at a time can lock the folder.
    """
    for left in semaphores(root):
        with suppress(OSError):  # the semaphore belongs to another user
            left.unlink()
    current_process()._config["semprefix"] = f"/{_prefix(root)}"  # type: ignore[attr-defined]


@contextmanager
def _signals_noted() -> Iterator[list[str]]:
    """Collect the names of received signals that ask the sweep to end, so that the sweep's loops can poll them.

    The handler doesn't raise an exception, because imports and C code could swallow it, and because it could
    interrupt the shutdown of the workers. A second request ends this process immediately, and the workers and
    their runs exit with it.
    """
    noted: list[str] = []
    first = [0.0]

    def note(number: int, frame: object) -> None:
        if noted and monotonic() - first[0] > SAME_REQUEST_S:
            os._exit(128 + number)
        first[0] = first[0] if noted else monotonic()
        noted.append(signal.Signals(number).name)

    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in asking}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _require(configs: list[RunConfig], devices: list[str], store: Store, name: str | None, gpus: int) -> None:
    """Check that the required devices exist and match the device that measured the folder's runs.

    A runs folder contains only one device's runs, because a report compares them.

    Args:
        name: the name of this machine's device; None if the workers may be on other machines.
        gpus: the largest number of GPUs on a single machine.

    Raises:
        WorkersError: If a device isn't available, or there aren't enough GPUs for a run.
        ConfigError: If the CPU can't run a configuration.
        SweepError: If the sweep's runs don't belong in this folder.
    """
    for config in configs:
        if config.device not in devices:
            raise WorkersError(
                f"device: got {config.device!r} ({config.label}), but there is no"
                f" {'GPU' if config.device == 'cuda' else 'worker for CPU runs'} here"
            )
        if config.device == "cpu":
            require_device(config)
        elif config.gpus_needed > gpus:
            raise WorkersError(
                f"gpus: got {config.gpus_needed} ({config.label}), but a run can use at most {gpus} GPUs here"
            )
    if len({config.device for config in configs}) > 1:
        raise SweepError(
            "the sweep has runs on a GPU and runs on a CPU, but a runs folder can only contain runs from one"
            " device; split the sweep in two, with separate --runs folders"
        )
    older = [record for record in store.records()[0] if record.schema_version == 3]
    if older:
        raise SweepError(
            f"{store.root} contains {len(older)} runs from stepscope 0.2 (schema 3), and this version can't add"
            " runs to them; choose another --runs folder"
        )
    if name and (folder_device := store.device_name()) and folder_device != name:
        raise SweepError(
            f"{store.root} contains runs from {folder_device!r}, but this machine's device is {name!r};"
            " choose another --runs folder"
        )


def _sources(plan: SweepPlan, options: SweepOptions) -> dict[str, str]:
    """Return the current digest of each notebook that the plan's runs execute, keyed by the notebook's name.

    Raises:
        SweepError: If a notebook is missing, unreadable or invalid.
    """
    environment = {NOTEBOOKS: str(options.notebooks)} if options.notebooks else os.environ
    try:
        one_of_each = {config.notebook: config for config in plan.configs}
        return {
            name: notebook_source(notebook_of(config, environment)) for name, config in one_of_each.items()
        }
    except OSError as error:
        every = (
            "; the folder must contain a notebook for each study in the sweep" if options.notebooks else ""
        )
        raise SweepError(f"{error.filename}: cannot read the notebook ({error.strerror}){every}") from None
    except ValueError as error:
        raise SweepError(f"{options.notebooks or 'notebooks'}: invalid notebook ({error})") from None


def _what_is_left(
    plan: SweepPlan, store: Store, console: Console, sources: dict[str, str], replace: bool
) -> SweepEnd:
    """Return the state of the sweep before it starts: the counts of finished runs, and the remaining runs.

    A run is finished if its record is valid, its status isn't "failed", and the current version of its notebook
    measured it.

    Raises:
        SweepError: If a run's folder contains no usable record, or some runs were measured by a different version
            of their notebook and ``replace`` is False.
    """
    end, replaced = SweepEnd(), []
    for config in plan.configs:
        try:
            record = store.find(config)
        except RecordError as error:
            raise SweepError(
                f"{store.root}: {error}; remove the run's folder to run this configuration again"
            ) from None
        if record and record.done and record.matches_notebook(sources[config.notebook]):
            end.counts[record.status] += 1
        else:
            if record and record.done:
                replaced.append(_name(config))
            end.left.append(config)
    if replaced and not replace:
        named = ", ".join([*replaced[:3], *[f"{len(replaced) - 3} more"] * (len(replaced) > 3)])
        raise SweepError(
            f"{store.root}: another version of the notebook measured {named}; choose another --runs folder, or"
            " use --replace to measure them again and replace the old runs"
        )
    if replaced:
        console.print(
            f"another version of the notebook measured {len(replaced)} of the runs; they will be replaced"
        )
    for config in plan.too_large:
        console.print(f"skipped, because it would not fit into the GPU's memory: {config.label}")
    return end


def plain(markdown: str) -> str:
    """Convert a markdown sentence to one line of printable plain text for a terminal."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("**", "").replace("`", "")
    return "".join(c if c.isprintable() else " " for c in text)


class _Sweep:
    """A running sweep, which assigns runs to workers and collects their results."""

    def __init__(
        self,
        workers: Workers,
        store: Store,
        options: SweepOptions,
        console: Console,
        end: SweepEnd,
        signals: list[str],
        began: float,
    ):
        self.workers, self.store, self.options, self.console = workers, store, options, console
        self.end, self.signals, self.began = end, signals, began
        self.requested = {_name(config): config for config in end.left}
        self.todo = dict(self.requested)
        self.done: set[str] = set()
        self.shown: Counter = Counter()  # number of printed lines already shown, by run folder
        self.died: set[str] = set()  # runs whose worker has died; the second time, the run counts as failed
        self.device_name = store.device_name()

    def run(self) -> None:
        """Assign runs and collect their results until no runs are left or there is a reason to stop."""
        fewest_gpus = min((config.gpus_needed for config in self.todo.values()), default=1)
        # Largest first, so that no long run starts last while GPUs idle. If each run uses all GPUs, none can idle.
        if sum(self.workers.gpus()) >= 2 * fewest_gpus:

            def size(item: tuple[str, RunConfig]) -> tuple[int, float]:
                return item[1].gpus_needed, peak_gib(item[1])

            self.todo = dict(sorted(self.requested.items(), key=size, reverse=True))
        try:
            while (self.todo or self.workers.running) and not self.signals:
                self._assign()
                if self.end.stopped_by and not self.workers.running:
                    return
                if self.options.progress:
                    self._show_progress()
                for assignment, result in self.workers.wait():
                    self._collect(assignment, result)
        except OSError as error:  # raised here or in a worker
            place = error.filename or self.store.root
            self.end.stopped_by = f"an error writing to {place} ({error.strerror or error})"
        finally:
            self.end.left = [config for name, config in self.requested.items() if name not in self.done]
            self.workers.close(self.store.partial)
            kill_run_processes(self.store.partial)

    def _assign(self) -> None:
        """Assign runs, in the sweep's order, to workers with a free slot on the device that each run needs."""
        for name, config in list(self.todo.items()):
            budget_s = self.options.time_budget_s
            if budget_s is not None and monotonic() - self.began >= budget_s:
                self.end.stopped_by = "the time budget"
            if self.end.stopped_by or self.signals or self.workers.busy():
                return
            if address := self.workers.place(config):
                del self.todo[name]
                self.workers.submit(config, self.store.new_staging_folder(), address)

    def _show_progress(self) -> None:
        """Print the lines that the running notebooks have printed since this method was last called."""
        for assignment in self.workers.running:
            with suppress(OSError):  # the run hasn't started, or has just ended
                text = (assignment.folder / PRINTED).read_text(encoding="utf-8", errors="replace")
                lines = text.split("\n")[:-1]  # the last line isn't complete
                new = lines[self.shown[assignment.folder] :]
                if new and len(self.requested) > 1:
                    self.console.print(f"{assignment.config.label}:")
                for line in new:
                    self.console.print(f"  {plain(line)}")
                self.shown[assignment.folder] = len(lines)

    def _collect(self, assignment: Assignment, result: Record | Exception) -> None:
        config, folder = assignment.config, assignment.folder
        if isinstance(result, OSError):
            raise result
        if self.signals and (isinstance(result, Exception) or not result.done):
            return  # the signal may have killed the run, so we don't save it, and the next sweep repeats it
        if isinstance(result, Exception):
            kill_run_processes(folder)  # reaches only processes on this machine
            shutil.rmtree(folder, ignore_errors=True)
            if _name(config) not in self.died:
                self.died.add(_name(config))
                self.todo = {_name(config): config} | self.todo
                self.console.print(f"{config.label}: {result}; running it again")
                return
            folder = self.store.new_staging_folder()
            result = Record.of(
                config, status="failed", cause=str(result), started_at=datetime.now(UTC), duration_s=0
            )
        device = result.machine.get("device_name")
        if device and device != (self.device_name or device):
            raise WorkersError(
                f"{config.label} ran on {device!r}, but the folder's other runs ran on"
                f" {self.device_name!r}; choose another --runs folder"
            )
        self.device_name = self.device_name or device
        self.store.commit(folder, result)
        self.end.counts[result.status] += 1
        self.done.add(_name(config))
        inconsistent = (
            f"inconsistent: {result.results['inconsistent']}" if result.results.get("inconsistent") else None
        )
        notes = [str(result.results.get("finding") or "done"), *filter(None, [inconsistent, result.cause])]
        outcome = {
            "ok": "; ".join(notes),
            "oom": "out of memory",
            "failed": f"failed: {result.cause}",
        }[result.status]
        duration = f"{result.duration_s:.0f} s"
        self.console.print(
            f"{len(self.done)}/{len(self.requested)} {config.label} ({duration}): {plain(outcome)}"
            f"{self._time_left()}"
        )

    def _time_left(self) -> str:
        """Format an estimate of the remaining time, extrapolated from the finished runs."""
        left = len(self.requested) - len(self.done)
        minutes = (monotonic() - self.began) / 60 / len(self.done) * left
        return f" (about {max(minutes, 1):.0f} min left)" if left else ""


def _name(config: RunConfig) -> str:
    return f"{config.study}/{config.run_id}"
