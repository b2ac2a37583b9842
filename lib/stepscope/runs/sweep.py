"""A sweep: of what its files ask for, what has no valid record yet is run, here or on workers."""
import hashlib
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from stepscope.config import RunConfig, StepConfig, require_device, studies, varied
from stepscope.files import write_text_durably
from stepscope.runs.estimate import left_s, minutes, said_before
from stepscope.runs.jupyter_kernel import asked, clear_dead
from stepscope.runs.logs import reading, said_last
from stepscope.runs.machine import machine
from stepscope.runs.one_run import require_notebooks
from stepscope.runs.record import Record, RecordError
from stepscope.runs.store import ENDED, Store, StoreError
from stepscope.runs.sweep_file import SweepError, load_sweep, sweep_name
from stepscope.runs.workers import (
    ClusterFailed,
    Dask,
    Here,
    NotBegun,
    SchedulerGone,
    check_workers,
    close_cluster,
    join_cluster,
    local_cluster,
)
from stepscope.step.flops import forward_flops


@dataclass
class How:
    """How a sweep's runs are executed; the default is one after another, in this process.

    Args:
        workers: ``gpus`` or a number: a local Dask cluster of one worker for each GPU, or of so many workers;
            of more than there are GPUs where all runs take turns.
        scheduler: address of a Dask scheduler that exists.
        cluster: a local cluster that exists (of :func:`stepscope.workers.local_cluster`), which stays.
        exclusive: studies whose runs have nothing beside them (``all``: every study's).
        timeout_s: a run's processes are ended after so long, and it has failed.
        time_budget_s: no run is started that would end after it, if it took as long as the longest so far.
        limit: give runs to so many workers at most.
        notebook: stands in for the execution of a notebook, in a simulated sweep.
    """

    workers: str | None = None
    scheduler: str | None = None
    cluster: tuple | None = None
    exclusive: tuple[str, ...] = ()
    timeout_s: float | None = None
    time_budget_s: float | None = None
    limit: int | None = None
    notebook: Callable | None = None

    def check(self) -> None:
        if self.workers is not None and self.scheduler is not None:
            raise SweepError("--workers and --scheduler: one or the other; a scheduler has its own workers")
        if self.workers is not None:
            check_workers(self.workers, shared=True)  # whether they may share depends on the runs
        if self.scheduler is not None and not re.fullmatch(r"[a-z]+://[^/\s]+:\d+", self.scheduler):
            raise SweepError(f"--scheduler: got {self.scheduler!r}, but expected an address such as"
                             " tcp://10.0.0.1:8786")
        if self.timeout_s == 0:
            raise SweepError("--timeout: got 0, but expected a time in which a run can end")
        for name in self.exclusive:
            if name not in (*studies(), "all"):
                raise SweepError(f"--exclusive: got {name!r}, but expected all or a study:"
                                 f" {', '.join(studies())}")


@dataclass
class SweepEnd:
    """How a sweep ended.

    Args:
        counts: by status, of all its runs.
        failed: study/run id and cause.
        stopped_by: what it was stopped by with runs left, in words that follow "stopped by".
    """

    counts: Counter = field(default_factory=Counter)
    left: list[RunConfig] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    stopped_by: str | None = None


@contextmanager
def _signals_noted() -> Iterator[None]:
    """Signals that ask the sweep to end are noted in ``asked``: whoever waits looks there, and so does a
    run's watch.

    Raised in the middle of anything, an exception may be swallowed (by imports, by C), leave a lock taken for
    which the watch then waits, or cut short the end of the workers. All that is waited for is over within
    seconds of a signal, so who asks twice gets no more than that.
    """
    def note(number: int, frame: object) -> None:
        asked.append(signal.Signals(number).name)
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_sweep(paths: list[Path], store: Store, how: How | None = None,
              console: Console | None = None) -> SweepEnd:
    """Run what the sweep files ask for and the store does not hold yet.

    Raises:
        SweepError, ConfigError, WorkersError, NotebooksMissing: before anything starts. StoreBusy: another
        sweep is writing into the folder. StoreError: the folder cannot be written to.
    """
    console, how, began = console or Console(stderr=True), how or How(), time.time()
    how.check()
    asked.clear()
    with _signals_noted():
        # What cannot be done is said before a folder is touched; of a joined cluster, when it has told.
        configs = [] if how.scheduler else _configurations(paths, store, how, {})
        if how.workers is not None:
            check_workers(how.workers, all(config.takes_turns for config in configs))
        with store.writing(), ExitStack() as closing:
            clear_dead()
            client = None
            if how.scheduler:
                client, there = join_cluster(how.scheduler, store)
                closing.callback(close_cluster, client)
                configs = _configurations(paths, store, how, there)
            shared = all(config.takes_turns for config in configs)
            end, workers = _what_is_left(configs, paths, store, console), 0
            todo = len(end.left)
            try:
                if todo and not asked:
                    pool = closing.enter_context(_pool(how, store, client, console, shared))
                    workers = pool.size
                    _Sweep(pool, store, how, console, end, len(configs)).run(end.left)
            except (ClusterFailed, SchedulerGone) as error:
                end.stopped_by = str(error)
            if asked and end.left:
                end.stopped_by = asked[0]
        if workers:
            _note_end(store, began, paths, workers, todo - len(end.left))
    return end


def _configurations(paths: list[Path], store: Store, how: How, there: dict) -> list[RunConfig]:
    """What the files ask for, checked against the machine that is to run it and the runs in the folder.

    Args:
        there: of a joined cluster, what its workers are; empty for this machine.
    """
    device = there.get("device", "auto")
    configs = list({(c.study, c.run_id): c for path in paths for c in load_sweep(path, device)}.values())
    for config in configs if not there else ():
        require_device(config)
    _require_same_machine(store, configs, there)
    if how.notebook is None:
        require_notebooks(configs)
    return configs


def _require_same_machine(store: Store, configs: list[RunConfig], there: dict) -> None:
    """Figures of two kinds of machine in one folder would be compared as if they were one's."""
    devices = {config.device for config in configs}
    if len(devices) > 1:
        raise SweepError(f"the sweep asks for runs on {' and on '.join(sorted(devices))}, and a runs folder"
                         " holds one device's; make it two sweeps, each with its --runs folder")
    device = devices.pop()
    here = there.get("device_name") or machine(device)["device_name"]
    for record in store.records()[0]:
        there_on, there_name = record.config.get("device"), record.machine.get("device_name")
        if there_on != device or there_name not in (here, None):
            words = f"{there_name!r} ({there_on})" if there_name else there_on
            raise SweepError(f"{store.root}: holds runs of {words}, and this sweep's are of {here!r}"
                             f" ({device}); choose another --runs folder")


def _what_is_left(configs: list[RunConfig], paths: list[Path], store: Store, console: Console) -> SweepEnd:
    """The sweep's end if nothing were run; its files are kept.

    Raises:
        StoreError: the folder cannot be written to.
    """
    end = SweepEnd()
    try:
        for path in paths:
            _keep(path, store)
        for config in configs:
            record = _valid_record(config, store, console)
            if record and record.done:
                end.counts[record.status] += 1
            else:
                end.left.append(config)
    except OSError as error:
        place = _place_elsewhere(error, store) or store.root
        words = f"{place}: cannot be written to ({error.strerror or error}); nothing was started"
        raise StoreError(words) from None
    return end


def _place_elsewhere(error: OSError, store: Store) -> Path | None:
    """The file that a file system's error names, where that is none of the runs folder's."""
    if not isinstance(error.filename, str | bytes):
        return None
    file = Path(os.fsdecode(error.filename)).absolute()
    return None if file.is_relative_to(store.root.absolute()) else file


@contextmanager
def _pool(how: How, store: Store, client: Any, console: Console, shared: bool) -> Iterator[Here | Dask]:
    """Where runs go on: this process, a joined cluster (whose client it then is), or a local one, whose
    workers may share a GPU.
    """
    with ExitStack() as closing:
        places: dict = {}
        if how.cluster is not None:
            client, places = how.cluster
        elif how.workers is not None:
            client, places = local_cluster(how.workers, shared)
            for folder in {place["turns"] for place in places.values()} - {None}:
                closing.callback(shutil.rmtree, folder, ignore_errors=True)
            closing.callback(close_cluster, client)
        if client is None:
            yield Here(store, how.timeout_s, how.notebook)
            return
        pool = Dask(client, store, how.timeout_s, how.notebook, places, how.limit)
        closing.callback(pool.close)
        workers = f"{pool.size} worker{'s' * (pool.size > 1)}"
        console.print(f"{workers}; the dashboard: {client.dashboard_link}", soft_wrap=True)
        yield pool


def _note_end(store: Store, began: float, paths: list[Path], workers: int, runs: int) -> None:
    """How long a sweep took, from its workers' start to their end."""
    names = " ".join(sweep_name(path).replace(",", "-") for path in paths)
    path = store.root / ENDED
    started = datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds")
    with suppress(OSError), path.open("a", encoding="utf-8") as file:  # no space: all measured is in place
        if not file.tell():
            file.write("started_at,sweeps,workers,runs,wall_s\n")
        file.write(f"{started},{names},{workers},{runs},{time.time() - began:.3f}\n")


def _keep(path: Path, store: Store) -> None:
    """The sweep stays with its runs, so that a folder alone can say what is still missing and be resumed."""
    text = Path(path).read_text(encoding="utf-8")
    kept = store.root / "sweeps" / f"{sweep_name(path)}.yaml"
    kept.parent.mkdir(exist_ok=True)
    if kept.exists() and kept.read_text(encoding="utf-8") != text:  # another of that name: both are resumed
        kept = kept.with_stem(f"{kept.stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    if kept.resolve() != Path(path).resolve():
        write_text_durably(kept, text)


def _valid_record(config: RunConfig, store: Store, console: Console) -> Record | None:
    try:
        return store.find(config)
    except RecordError as error:
        place = store.set_aside(store.folder(config))
        console.print(f"[yellow]{escape(str(error))}[/]; moved to {escape(str(place))},"
                      " the run is done again", soft_wrap=True)
        return None


def work_estimate(config: RunConfig) -> int:
    """FLOPs of all steps' forward passes, which grow as a run's time does. Only the order is by it."""
    steps = config.warmup_steps + config.timed_steps
    if isinstance(config, StepConfig):
        return steps * sum(forward_flops(config).values())
    return (
        steps * 4 * config.batch_size * config.context_length**2 * config.d_model
    )  # attention's two products


class _Shown(Progress):
    """The progress, and under it what a run's notebook printed last."""

    def __init__(self, said: Callable[[], str], console: Console):
        self.said = said
        super().__init__(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                         TimeElapsedColumn(), TextColumn("{task.fields[left]}"), console=console,
                         refresh_per_second=2)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if words := self.said():
            yield Text(f"  {words}", style="dim", overflow="ellipsis", no_wrap=True)


class _Sweep:
    """The runs of one sweep under way: what is to be done, what goes on where, what has come back."""

    def __init__(self, pool: Here | Dask, store: Store, how: How, console: Console, end: SweepEnd,
                 total: int):
        self.pool, self.store, self.how, self.console, self.end = pool, store, how, console, end
        self.total = total  # runs, with those that were done before
        self.todo: list[RunConfig] = []
        self.varied: dict[tuple[str, str], str] = {}
        self.done: set[tuple[str, str]] = set()
        self.over_s: list[tuple[RunConfig, float]] = []  # what is over, with its seconds
        self.going: list[RunConfig] = []
        self.back: list[RunConfig] = []  # what came back together: each may have been beside another of these
        # Runs that are over and may have been beside another: name, host, from, to.
        self.over: list[tuple[str, str, float, float]] = []

    def run(self, todo: list[RunConfig]) -> None:
        if isinstance(self.pool, Dask):
            self.pool.require(todo)
        # Side by side the longest go first, so that the last to end is a short one; exclusive ones go last.
        if self.pool.parallel:
            todo = sorted(todo, key=work_estimate, reverse=True)
        self.todo = sorted(todo, key=self._alone)
        self.varied = varied(todo)
        self.started = time.monotonic()
        self.console.print(said_before(todo), soft_wrap=True, markup=False, highlight=False)
        self.progress = _Shown(self._said, self.console)
        with self.progress:
            before = self.total - len(todo)
            self.task = self.progress.add_task("", total=self.total, completed=before, left="")
            try:
                self._go()
            except (SchedulerGone, StoreError) as error:
                self.end.stopped_by = str(error)
            except OSError as error:
                place = _place_elsewhere(error, self.store) or "the runs folder"
                self.end.stopped_by = f"{place}, which cannot be written to ({error.strerror or error})"
            self._show()
            self.end.left = [config for config in todo if (config.study, config.run_id) not in self.done]

    def _go(self) -> None:
        """Give out runs and take them back until there is none left, a reason to stop, or a signal."""
        while self.todo or self.pool.running():
            if asked:
                return
            self._give()
            self._show()
            if self.pool.running():
                self._take_all(self.pool.wait())
            elif self.end.stopped_by:
                return
            else:
                time.sleep(0.5)  # no worker is there at the moment
                self.pool.refresh()

    def _take_all(self, results: list[tuple[RunConfig, tuple[Path, Record] | Exception]]) -> None:
        if asked:  # a run that was ended for that is done again; one that came to its own end is kept
            results = [(config, result) for config, result in results
                       if isinstance(result, tuple) and result[1].done]
        self.back = [config for config, _ in results]
        for config, result in sorted(results, key=lambda item: isinstance(item[1], OSError)):
            self._take(config, result)

    def _alone(self, config: RunConfig) -> bool:
        return bool({"all", config.study} & set(self.how.exclusive))

    def _give(self) -> None:
        while self.todo and not self.end.stopped_by and self.pool.free(self.todo[0]):
            running = self.pool.running()
            if running and (self._alone(self.todo[0]) or self._alone(running[0])):
                return
            budget_s, elapsed = self.how.time_budget_s, time.monotonic() - self.started
            longest_s = max((seconds for _, seconds in self.over_s), default=0.0)
            if budget_s is not None and elapsed + longest_s > budget_s:
                self.end.stopped_by = "time budget"
                return
            config = self.todo.pop(0)
            self.pool.submit(config)

    def _take(self, config: RunConfig, result: tuple[Path, Record] | Exception) -> None:
        if isinstance(result, OSError):
            raise result
        if isinstance(result, NotBegun):
            self.todo.insert(0, config)
            return
        if isinstance(result, Exception):
            result = self._lost(config, str(result))
        folder, record = result
        self.store.commit(folder, record.model_copy(update={"beside": self._beside(config, record)}))
        self.done.add((config.study, config.run_id))
        self.store.unclaim(config)
        self.over_s.append((config, record.duration_s))
        self.end.counts[record.status] += 1
        if record.status == "failed":
            name = f"{record.study}/{record.run_id}"
            self.end.failed.append((name, record.cause or ""))
            self.console.print(f"[red]failed[/] {name}: {escape(record.cause or '')}", soft_wrap=True)
        else:
            found = reading(self.store, record) if record.status == "ok" else "does not fit: out of memory"
            which = f"[bold]{escape(self._named(config))}[/] ({record.duration_s:.0f} s)"
            self.console.print(f"{which}: {escape(found)}", soft_wrap=True, highlight=False)
        self.progress.update(self.task, advance=1)

    def _lost(self, config: RunConfig, cause: str) -> tuple[Path, Record]:
        """The end of a run whose worker can no longer tell it."""
        since = (self.store.claim(config) or {"since": time.time()})["since"]
        folder = self.store.folder_in_making(config)
        return folder, Record(run_id=config.run_id, study=config.study, status="failed", cause=cause,
                              config=config.model_dump(mode="json"), duration_s=round(time.time() - since, 3),
                              started_at=datetime.fromtimestamp(since, UTC))

    def _beside(self, config: RunConfig, record: Record) -> list[str]:
        """Runs that went on at some moment of this one's time on its machine."""
        claim = self.store.claim(config)
        if claim is None or not self.pool.parallel:
            return []
        # A millisecond later, to which durations are rounded: what began just before the end was beside.
        until = record.started_at.timestamp() + record.duration_s + 1e-3
        host, since = claim["host"], claim["since"]
        others = [other for other in (*self.pool.running(), *self.back) if other != config]
        going = [found for other in others if (found := self.store.claim(other))]
        beside = {run for run, where, start, end in self.over
                  if where == host and start < until and end > since}
        beside |= {other["run"] for other in going if other["host"] == host and other["since"] < until}
        oldest = min((other["since"] for other in going), default=until)
        self.over = [item for item in self.over if item[3] > oldest] + [(claim["run"], host, since, until)]
        return sorted(beside)

    def _show(self) -> None:
        running = [(claim["where"], config) if (claim := self.store.claim(config)) else ("given out", config)
                   for config in self.pool.running()]
        if not self.pool.parallel:
            words = "".join(f" | {self._named(config)}" for _, config in running)
        else:
            words = "".join(f"\n  {where}: {self._named(config)}"
                            for where, config in sorted(running, key=lambda item: item[0]))
        if self.todo and not running and self.pool.parallel and not self.end.stopped_by:
            words = "\n  waiting for a worker"
        self.going = [config for _, config in running]
        left = left_s([*self.todo, *self.going], self.over_s) or 0
        self.progress.update(self.task, description=_counts(self.end.counts) + words,
                             left=f"about {minutes(left / max(self.pool.size, 1))} left" if left else "")

    def _named(self, config: RunConfig) -> str:
        """Its label, and of runs with the same one what was varied."""
        return ", ".join(filter(None, (config.label, self.varied.get((config.study, config.run_id)))))

    def _said(self) -> str:
        """What the one run that goes on printed last."""
        return said_last(self.store, self.going[0]) if len(self.going) == 1 else ""


def _counts(counts: Counter) -> str:
    words = {"ok": "done", "oom": "out of memory", "failed": "failed"}
    return ", ".join(f"{counts[status]} {words[status]}" for status in words if counts[status]) or "0 done"

