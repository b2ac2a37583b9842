"""A sweep: of what its files ask for, what has no valid record yet is run, and its records are put in place.

To resume one is to give the same command again: what is done is skipped, what failed is tried again.
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
from stepscope.runs.run import NOTEBOOKS, kill_run_processes, notebook_of
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

SAME_REQUEST_S = 1.0  # a terminal that is closed sends a signal more than once


@dataclass
class SweepOptions:
    """How a sweep's runs are executed; the default is on all GPUs of this machine, or on its CPU.

    Args:
        workers: so many GPUs at most; without a GPU, so many runs side by side, at most one for each core.
        scheduler: address of a Dask scheduler, whose workers are used instead.
        timeout_s: a run's processes are killed after so long, and it has failed.
        time_budget_s: no run is started when the sweep has taken so long.
        notebooks: a folder of notebooks that are run in place of the package's of the same names.
        replace: measure again, in place, what another version of a notebook measured.
    """

    workers: int | None = None
    scheduler: str | None = None
    timeout_s: float | None = None
    time_budget_s: float | None = None
    notebooks: Path | None = None
    replace: bool = False


@dataclass
class SweepEnd:
    """How a sweep ended.

    Args:
        counts: by status, of all its runs.
        left: what is still to be run, and ``stopped_by`` what.
    """

    counts: Counter = field(default_factory=Counter)
    left: list[RunConfig] = field(default_factory=list)
    stopped_by: str | None = None


def run_sweep(sources: list[Path | dict], store: Store, options: SweepOptions, console: Console) -> SweepEnd:
    """Run what the sweep files ask for and the store does not hold yet; each end is said on the console.

    Raises:
        SweepError, WorkersError: before anything starts. StoreBusy: another sweep is writing into the folder.
        StoreError: the folder cannot be written to.
    """
    began = monotonic()
    with _signals_noted() as signals, ExitStack() as closing:
        # What cannot be done is said before a folder is touched.
        if options.scheduler:
            client = closing.enter_context(joined_workers(options.scheduler, signals))
            workers = Workers(client, options.timeout_s, options.notebooks)
            plan = load_sweeps(sources, (workers.devices() or ["cpu"])[0], workers.gpu_gib())
            _require(plan.configs, workers.devices(), store, None)
        else:
            gpus = gpus_here()[: options.workers]
            device, name = ("cuda", gpus[0]["name"]) if gpus else ("cpu", machine("cpu")["device_name"])
            plan = load_sweeps(sources, device, min((gpu["gib"] for gpu in gpus), default=None))
            _require(plan.configs, [device, "cpu"], store, name)
        closing.enter_context(store.writing())
        end = _what_is_left(plan, store, console, _sources(plan, options), options.replace)
        if end.left and not signals:
            try:
                if not options.scheduler:
                    _name_semaphores(store.root)
                    client = closing.enter_context(
                        local_workers(gpus, options.workers or 1, store.partial / "dask")
                    )
                    workers = Workers(client, options.timeout_s, options.notebooks)
                console.print(f"{len(end.left)} runs to do; Dask's dashboard: {client.dashboard_link}")
                _Sweep(workers, store, options, console, end, signals, began).run()
            except SchedulerGone as error:
                end.stopped_by = str(error)
        if signals and end.left:
            end.stopped_by = signals[0]
    return end


def semaphores(root: Path) -> list[Path]:
    """The named semaphores of a folder's sweeps, of 32 bytes each, as Linux shows them."""
    return [*Path("/dev/shm").glob(f"sem.{_prefix(root)}-*")]


def _prefix(root: Path) -> str:
    return f"mp-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:12]}"


def _name_semaphores(root: Path) -> None:
    """Name what multiprocessing makes for Dask's nannies after the folder, which this sweep alone holds: so
    what an earlier one has left can be known and removed, that was killed with its whole group, and so with
    the process that would have removed it."""
    for left in semaphores(root):
        with suppress(OSError):  # another user's
            left.unlink()
    current_process()._config["semprefix"] = f"/{_prefix(root)}"  # type: ignore[attr-defined]


@contextmanager
def _signals_noted() -> Iterator[list[str]]:
    """Signals that ask the sweep to end are noted: whoever waits looks there.

    Raised in the middle of anything, an exception may be swallowed (by imports, by C), or cut short the end
    of the workers. Who asks a second time has an end at once: workers end with this process, runs with them.
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


def _require(configs: list[RunConfig], devices: list[str], store: Store, name: str | None) -> None:
    """What can be known before anything starts: that the devices are there, and that the folder's runs are of
    the same one, with which these would be compared.

    Args:
        name: of the device here; None where workers elsewhere will tell.
    """
    for config in configs:
        if config.device not in devices:
            raise WorkersError(
                f"device: got {config.device!r} ({config.label}), but there is no"
                f" {'GPU' if config.device == 'cuda' else 'worker for a CPU'} here"
            )
        if config.device == "cpu":
            require_device(config)
    if len({config.device for config in configs}) > 1:
        raise SweepError(
            "the sweep asks for runs on a GPU and on a CPU, and a runs folder holds one"
            " device's; make it two sweeps, each with its --runs folder"
        )
    older = [record for record in store.records()[0] if record.schema_version == 3]
    if older:
        raise SweepError(
            f"{store.root}: holds {len(older)} runs of stepscope 0.2 (records of schema 3), and this version"
            " would measure them again under new names; give another --runs folder"
        )
    if name and (there := store.device_name()) and there != name:
        raise SweepError(
            f"{store.root}: holds runs of {there!r}, and this sweep's are of {name!r};"
            " choose another --runs folder"
        )


def _sources(plan: SweepPlan, options: SweepOptions) -> dict[str, str]:
    """The digest of each notebook that the plan's runs execute, as it would run now.

    Raises:
        SweepError: there is none, or it cannot be read.
    """
    own = {NOTEBOOKS: str(options.notebooks)} if options.notebooks else os.environ
    try:
        one_of_each = {config.notebook: config for config in plan.configs}
        return {name: notebook_source(notebook_of(config, own)) for name, config in one_of_each.items()}
    except OSError as error:
        every = "; each study of the sweep needs its copy there" if options.notebooks else ""
        raise SweepError(f"{error.filename}: the notebook cannot be read ({error.strerror}){every}") from None
    except ValueError as error:
        raise SweepError(f"{options.notebooks or 'notebooks'}: a notebook there is none ({error})") from None


def _what_is_left(
    plan: SweepPlan, store: Store, console: Console, sources: dict[str, str], replace: bool
) -> SweepEnd:
    """Return the sweep's end if nothing were run. A run is done if it has a valid record of this notebook.

    Raises:
        SweepError: where a run should be there is something that is none; or another version of a notebook
            measured some of the runs, and they are not to be replaced.
    """
    end, others = SweepEnd(), []
    for config in plan.configs:
        try:
            record = store.find(config)
        except RecordError as error:
            raise SweepError(f"{store.root}: {error}; remove the folder, and the run is done again") from None
        if record and record.done and record.matches_notebook(sources[config.notebook]):
            end.counts[record.status] += 1
        else:
            if record and record.done:
                others.append(_name(config))
            end.left.append(config)
    if others and not replace:
        named = ", ".join([*others[:3], *[f"{len(others) - 3} more"] * (len(others) > 3)])
        raise SweepError(
            f"{store.root}: another version of its notebook measured {named}; give another --runs folder, or"
            " --replace to measure again and replace what is there"
        )
    if others:
        console.print(
            f"{len(others)} of them were measured by another version of their notebook, and are replaced"
        )
    for config in plan.too_large:
        console.print(f"left out, it would not fit into the GPU's memory: {config.label}")
    return end


def plain(markdown: str) -> str:
    """A sentence of markdown as a terminal shows it, in one line."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("**", "").replace("`", "")
    return "".join(c if c.isprintable() else " " for c in text)


class _Sweep:
    """The runs of one sweep under way: what is to be done, what goes on where, what has come back."""

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
        self.asked = {_name(config): config for config in end.left}
        self.todo = dict(self.asked)
        self.done: set[str] = set()
        self.died: set[str] = set()  # runs whose worker died once
        self.device_name = store.device_name()

    def run(self) -> None:
        """Give out runs and take them back until there is none left, or a reason to stop."""
        if self.workers.places("cuda") > 1:  # the largest first, so that none of them is alone at the end
            by_size = sorted(self.asked.items(), key=lambda item: peak_gib(item[1]), reverse=True)
            self.todo = dict(by_size)
        try:
            while (self.todo or self.workers.running) and not self.signals:
                self._assign()
                if self.end.stopped_by and not self.workers.running:
                    return
                for assignment, result in self.workers.wait():
                    self._collect(assignment, result)
        except OSError as error:  # also where a worker met it
            place = error.filename or self.store.root
            self.end.stopped_by = f"{place}, which cannot be written to ({error.strerror or error})"
        finally:
            self.end.left = [config for name, config in self.asked.items() if name not in self.done]
            self.workers.close(self.store.partial)
            kill_run_processes(self.store.partial)

    def _assign(self) -> None:
        """Give each free place the first run, in the sweep's order, that fits there."""
        for name, config in list(self.todo.items()):
            budget_s = self.options.time_budget_s
            if budget_s is not None and monotonic() - self.began >= budget_s:
                self.end.stopped_by = "the time budget"
            if self.end.stopped_by or self.signals or self.workers.busy():
                return
            if address := self.workers.place(config.device):
                del self.todo[name]
                self.workers.submit(config, self.store.new_staging_folder(), address)

    def _collect(self, assignment: Assignment, result: Record | Exception) -> None:
        config, folder = assignment.config, assignment.folder
        if isinstance(result, OSError):
            raise result
        if self.signals and (isinstance(result, Exception) or not result.done):
            return  # the signal may have ended it as well, and what failed is tried again anyway
        if isinstance(result, Exception):
            kill_run_processes(folder)  # of this machine's
            shutil.rmtree(folder, ignore_errors=True)
            if _name(config) not in self.died:
                self.died.add(_name(config))
                self.todo = {_name(config): config} | self.todo
                self.console.print(f"{result}; once more: {config.label}")
                return
            folder = self.store.new_staging_folder()
            result = Record.of(
                config, status="failed", cause=str(result), started_at=datetime.now(UTC), duration_s=0
            )
        device = result.machine.get("device_name")
        if device and device != (self.device_name or device):
            raise WorkersError(
                f"{config.label} ran on {device!r}, and the other runs here on"
                f" {self.device_name!r}; choose another --runs folder"
            )
        self.device_name = self.device_name or device
        self.store.commit(folder, result)
        self.end.counts[result.status] += 1
        self.done.add(_name(config))
        inconsistent = (
            f"inconsistent: {result.results['inconsistent']}" if result.results.get("inconsistent") else None
        )
        said = [str(result.results.get("finding") or "done"), *filter(None, [inconsistent, result.cause])]
        found = {
            "ok": "; ".join(said),
            "oom": "does not fit: out of memory",
            "failed": f"failed: {result.cause}",
        }[result.status]
        took = f"{result.duration_s:.0f} s"
        self.console.print(
            f"{len(self.done)}/{len(self.asked)} {config.label} ({took}): {plain(found)}{self._about_left()}"
        )

    def _about_left(self) -> str:
        """How long it may still take, at the rate of the runs so far."""
        left = len(self.asked) - len(self.done)
        minutes = (monotonic() - self.began) / 60 / len(self.done) * left
        return f" (about {max(minutes, 1):.0f} min left)" if left else ""


def _name(config: RunConfig) -> str:
    return f"{config.study}/{config.run_id}"
