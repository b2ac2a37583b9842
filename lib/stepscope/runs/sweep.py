"""A sweep: a YAML file becomes configurations, and what has no valid record yet is run, here or on workers."""
import hashlib
import itertools
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import stepscope
from stepscope import StepscopeError
from stepscope.config import ConfigError, RunConfig, StepConfig, configure, require_device, studies
from stepscope.step.flops import forward_flops
from stepscope.runs.jupyter_kernel import asked, clear_dead
from stepscope.runs.machine import machine
from stepscope.files import write_text_durably
from stepscope.runs.record import Record, RecordError
from stepscope.runs.store import ENDED, Store, StoreError
from stepscope.runs.workers import Dask, Here, NotBegun, SchedulerGone, check_workers, join_cluster, local_cluster

SHIPPED = Path(stepscope.__file__).parent / "studies"
BLOCK_KEYS = ("study", "fixed", "axes")


class SweepError(StepscopeError, ValueError):
    """A sweep that cannot start; the text names the file, the place in it, and what was expected."""


def load_sweep(path: Path, device: str = "auto") -> list[RunConfig]:
    """All configurations of a sweep file, in its order, each once; ``device`` is what ``auto`` means where they will run.

    The file is one block or a list of blocks, a block being ``study`` (a name), ``fixed`` (field: value) and ``axes``
    (field: list of values); the block stands for the product of its axes, the last axis varying fastest.

    Raises:
        SweepError: no such file, not YAML, another shape than this, or a configuration that is not valid.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        shipped = ", ".join(sorted({sweep_name(file) for file in SHIPPED.glob("*/sweep.yaml")} | {"cpu"}))
        raise SweepError(f"{path}: cannot be read ({error.strerror}); sweeps that ship with stepscope: {shipped}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SweepError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    configs = {}
    for number, block in enumerate(content if isinstance(content, list) else [content], start=1):
        try:
            for config in _expand(block, device):
                if configs.setdefault((config.study, config.run_id), config) != config:
                    raise SweepError(f"two of its configurations have the run id {config.run_id}; put them into different runs folders")
        except (ConfigError, SweepError) as error:
            raise SweepError(f"{path}, block {number}: {error}") from None
    if not configs:
        raise SweepError(f"{path}: asks for no run")
    return list(configs.values())


def _expand(block: object, device: str) -> Iterator[RunConfig]:
    if not isinstance(block, dict) or not isinstance(block.get("study"), str):
        raise SweepError("expected a mapping with study (a name), fixed (field: value) and axes (field: list)")
    for key in block:
        if key not in BLOCK_KEYS:
            raise SweepError(f"{key}: unknown key; known are {', '.join(BLOCK_KEYS)}")
    fixed, axes = block.get("fixed") or {}, block.get("axes") or {}
    for key, mapping in (("fixed", fixed), ("axes", axes)):
        if not isinstance(mapping, dict):
            raise SweepError(f"{key}: got {mapping!r}, but expected a mapping from field names")
        for name in mapping:
            if not isinstance(name, str) or name == "study":
                raise SweepError(f"{key}: got {name!r}, but expected names of fields (study stands beside fixed and axes)")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise SweepError(f"axes.{name}: got {values!r}, but expected a list of one or more values")
        if name in fixed:
            raise SweepError(f"{name}: given both in fixed and in axes; leave one of them out")
    for values in itertools.product(*axes.values()):
        fields = fixed | dict(zip(axes, values))
        yield configure(block["study"], **fields | ({"device": device} if fields.get("device", "auto") == "auto" else {}))


def find_sweeps(name: str) -> list[Path]:
    """A sweep's files by its path, or by the name of one that ships with the project: a study's, or ``cpu``, all studies'
    over tiny models."""
    shipped = sorted(SHIPPED.glob("*/sweep_cpu.yaml")) if name == "cpu" else [SHIPPED / name / "sweep.yaml"]
    return shipped if shipped[0].exists() and not Path(name).exists() else [Path(name)]


def sweep_name(path: Path) -> str:
    """What a sweep's file is called where it is kept: by its study, where it is one of those in a study's folder."""
    if SHIPPED in path.parents:
        return path.parent.name + path.stem.removeprefix("sweep").replace("_", "-")
    return path.stem


@dataclass
class How:
    """How a sweep's runs are executed; the default is one after another, in this process.

    Args:
        workers: ``gpus`` or a number: a local Dask cluster of one worker for each GPU, or of so many workers.
        scheduler: address of a Dask scheduler that exists.
        cluster: a local cluster that exists (of :func:`stepscope.workers.local_cluster`), which stays.
        exclusive: studies whose runs have nothing beside them (``all``: every study's).
        timeout_s: a run's processes are ended after so long, and it has failed.
        time_budget_s: no run is started that would, if it took as long as the longest so far, end after this time.
        limit: give runs to so many workers at most.
        prestart: make the next run's kernel ready while this one no longer measures.
        notebook: stands in for the execution of a notebook, in a simulated sweep.
    """

    workers: str | None = None
    scheduler: str | None = None
    cluster: tuple | None = None
    exclusive: tuple[str, ...] = ()
    timeout_s: float | None = None
    time_budget_s: float | None = None
    limit: int | None = None
    prestart: bool = True
    notebook: Callable | None = None

    def check(self) -> None:
        if self.workers is not None and self.scheduler is not None:
            raise SweepError("--workers and --scheduler: one or the other; a scheduler has its own workers")
        if self.workers is not None:
            check_workers(self.workers)
        if self.scheduler is not None and not re.fullmatch(r"[a-z]+://[^/\s]+:\d+", self.scheduler):
            raise SweepError(f"--scheduler: got {self.scheduler!r}, but expected an address such as tcp://10.0.0.1:8786")
        if self.timeout_s == 0:
            raise SweepError("--timeout: got 0, but expected a time in which a run can end")
        for name in self.exclusive:
            if name not in (*studies(), "all"):
                raise SweepError(f"--exclusive: got {name!r}, but expected all or a study: {', '.join(studies())}")


@dataclass
class SweepEnd:
    """How a sweep ended: counts by status of all its runs, those left undone, and those that failed with their cause."""

    counts: Counter = field(default_factory=Counter)
    left: list[RunConfig] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    stopped_by: str | None = None


class Stopped(KeyboardInterrupt):
    """A signal asked the sweep to end. Of this type because asyncio lets no other out of what it calls back."""


def _stop(number: int, frame: object) -> None:
    """On a signal before runs go on: end at once."""
    asked.append(signal.Signals(number).name)
    raise Stopped(asked[0])


def _note(number: int, frame: object) -> None:
    """On a signal while runs go on: whoever waits looks at ``asked``, the run's watch too, and ends what it waits for.

    Raised in the middle of anything, an exception may be swallowed (by imports, by C) or leave a lock taken for which the
    watch then waits. Who asks twice does not want to wait, and gets it all the same.
    """
    asked.append(signal.Signals(number).name)
    if len(asked) > 1:
        raise Stopped(asked[0])


@contextmanager
def _on_signals(handler: Callable) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_sweep(paths: list[Path], store: Store, how: How | None = None, console: Console | None = None) -> SweepEnd:
    """Run what the sweep files ask for and the store does not hold yet.

    Raises:
        SweepError, ConfigError, WorkersError: before anything starts. StoreBusy: another sweep is writing into the folder.
    """
    console, how, began = console or Console(stderr=True), how or How(), time.time()
    how.check()
    if not how.scheduler:
        _load(paths, "auto")  # what is wrong with a file is said before a folder is made
    asked.clear()
    with store.writing(), _on_signals(_stop):
        clear_dead()
        with _pool(how, store, console) as (pool, there):
            configs = _load(paths, there.get("device", "auto"), check=not there)
            if isinstance(pool, Dask):
                pool.require(configs)
            _same_machine(store, configs, there)
            for path in paths:
                _keep(path, store)
            end, todo, workers = SweepEnd(), [], pool.size
            for config in configs:
                record = _valid_record(config, store, console)
                if record and record.done:
                    end.counts[record.status] += 1
                else:
                    todo.append(config)
            _Sweep(pool, store, how, console, end, len(configs)).run(todo)
        _note_end(store, began, paths, workers, len(todo) - len(end.left))
    return end


def _note_end(store: Store, began: float, paths: list[Path], workers: int, runs: int) -> None:
    """How long a sweep took, from its workers' start to their end."""
    names = " ".join(sweep_name(path).replace(",", "-") for path in paths)
    path = store.root / ENDED
    started = datetime.fromtimestamp(began, timezone.utc).isoformat(timespec="seconds")
    with suppress(OSError), path.open("a", encoding="utf-8") as file:  # no space: what was measured is in place without it
        if not file.tell():
            file.write("started_at,sweeps,workers,runs,wall_s\n")
        file.write(f"{started},{names},{workers},{runs},{time.time() - began:.3f}\n")


def _load(paths: list[Path], device: str, check: bool = True) -> list[RunConfig]:
    configs = list({(c.study, c.run_id): c for path in paths for c in load_sweep(path, device)}.values())
    for config in configs if check else ():
        require_device(config)
    return configs


@contextmanager
def _pool(how: How, store: Store, console: Console) -> Iterator[tuple[Here | Dask, dict]]:
    """Where runs go on; and of a joined cluster, what its workers are."""
    there: dict = {}
    client, places = how.cluster or (None, {})
    if how.workers is not None:
        client, places = local_cluster(how.workers)
    elif how.scheduler is not None:
        client, there = join_cluster(how.scheduler, store)
    if client is None:
        pool = Here(store, how.timeout_s, how.notebook, how.prestart)
    else:
        pool = Dask(client, store, how.timeout_s, how.notebook, places, how.limit, how.prestart)
        console.print(f"{pool.size} workers; their dashboard: {client.dashboard_link}", soft_wrap=True)
    try:
        yield pool, there
    finally:
        pool.close()
        if client and not how.cluster:
            with suppress(Exception):  # the scheduler may be gone, and what was done is on disk
                client.close(timeout=5)
            if client.cluster:
                client.cluster.close(timeout=10)
                clear_dead()  # of its workers, now that none is left


def _keep(path: Path, store: Store) -> None:
    """The sweep stays with its runs, so that a folder alone can say what is still missing and be resumed."""
    text = Path(path).read_text(encoding="utf-8")
    kept = store.root / "sweeps" / f"{sweep_name(path)}.yaml"
    kept.parent.mkdir(exist_ok=True)
    if kept.exists() and kept.read_text(encoding="utf-8") != text:  # another sweep of that name: both are to be resumed
        kept = kept.with_stem(f"{kept.stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    if kept.resolve() != Path(path).resolve():
        write_text_durably(kept, text)


def _valid_record(config: RunConfig, store: Store, console: Console):
    try:
        return store.find(config)
    except RecordError as error:
        place = store.set_aside(store.folder(config))
        console.print(f"[yellow]{escape(str(error))}[/]; moved to {escape(str(place))}, the run is done again",
                      soft_wrap=True)
        return None


def _same_machine(store: Store, configs: list[RunConfig], there: dict) -> None:
    """Figures of two kinds of machine in one folder would be compared as if they were one's."""
    records, _ = store.records()
    if not records:
        return
    for device in {config.device for config in configs}:
        here = there.get("device_name") or machine(device)["device_name"]
        others = {record.machine.get("device_name") for record in records if record.config["device"] == device} - {here, None}
        if others:
            raise SweepError(f"{store.root}: holds runs of {min(others)!r}, and this machine is {here!r};"
                             " choose another --runs folder")


def work_estimate(config: RunConfig) -> int:
    """FLOPs that grow as a run's time does: all its steps' forward passes. Only the order of runs depends on it."""
    return sum(forward_flops(config).values()) * (config.warmup_steps + config.timed_steps)


class _Sweep:
    """The runs of one sweep under way: what is to be done, what goes on where, what has come back."""

    def __init__(self, pool: Here | Dask, store: Store, how: How, console: Console, end: SweepEnd, total: int):
        self.pool, self.store, self.how, self.console, self.end, self.total = pool, store, how, console, end, total
        self.durations: list[float] = []
        self.back: list[RunConfig] = []  # what came back together: each may have been beside another of these
        self.done: set[tuple[str, str]] = set()
        self.over: list[tuple[str, str, float, float]] = []  # run, host, from, to: of those that may have been beside another

    def run(self, todo: list[RunConfig]) -> None:
        # Side by side, the longest first: the last to end is then a short one. Those that must be alone come at the end.
        if self.pool.parallel:
            todo = sorted(todo, key=work_estimate, reverse=True)
        self.todo = sorted(todo, key=self._alone)
        self.started = time.monotonic()
        self.progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                                 TextColumn("{task.fields[left]}"), console=self.console)
        with self.progress, _on_signals(_note):
            self.task = self.progress.add_task("", total=self.total, completed=self.total - len(todo), left="")
            try:
                while self.todo or self.pool.running():
                    if asked:
                        raise Stopped(asked[0])
                    self._give()
                    self._show()
                    if not self.pool.running():
                        if self.end.stopped_by or not self.todo:
                            break
                        time.sleep(0.5)  # no worker is there at the moment
                        self.pool.refresh()
                        continue
                    results = self.pool.wait()
                    if asked:  # a run that was ended for that is done again; one that came to its own end is kept
                        results = [(config, result) for config, result in results if isinstance(result, tuple) and result[1].done]
                    self.back = [config for config, _ in results]
                    for config, result in sorted(results, key=lambda item: isinstance(item[1], OSError)):
                        self._take(config, result)
            except KeyboardInterrupt as stop:
                self.end.stopped_by = str(stop) or "SIGINT"
            except (SchedulerGone, StoreError) as error:
                self.end.stopped_by = str(error)
            except OSError as error:
                self.end.stopped_by = f"the runs folder, which cannot be written to ({error.strerror or error})"
            self._show()
            self.end.left = [config for config in todo if (config.study, config.run_id) not in self.done]

    def _alone(self, config: RunConfig) -> bool:
        return bool({"all", config.study} & set(self.how.exclusive))

    def _give(self) -> None:
        while self.todo and not self.end.stopped_by and self.pool.free(self.todo[0]):
            running = self.pool.running()
            if running and (self._alone(self.todo[0]) or self._alone(running[0])):
                return
            budget_s, elapsed = self.how.time_budget_s, time.monotonic() - self.started
            if budget_s is not None and elapsed + max(self.durations, default=0) > budget_s:
                self.end.stopped_by = "time budget"
                return
            config = self.todo.pop(0)
            self.pool.submit(config, self._more())

    def _more(self) -> bool:
        """Whether the next run's kernel may be made ready. Not on a worker whose neighbour may then be an exclusive run."""
        return bool(self.todo) and not self.todo[0].times_imports and not (self.pool.parallel and self._alone(self.todo[-1]))

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
        self.durations.append(record.duration_s)
        self.end.counts[record.status] += 1
        if record.status == "failed":
            name = f"{record.study}/{record.run_id}"
            self.end.failed.append((name, record.cause))
            self.console.print(f"[red]failed[/] {name}: {escape(record.cause)}", soft_wrap=True)
        self.progress.update(self.task, advance=1)

    def _lost(self, config: RunConfig, cause: str) -> tuple[Path, Record]:
        """The end of a run whose worker can no longer tell it."""
        since = (self.store.claim(config) or {"since": time.time()})["since"]
        folder = self.store.folder_in_making(config)
        return folder, Record(run_id=config.run_id, study=config.study, status="failed", cause=cause, config=config.model_dump(mode="json"),
                              started_at=datetime.fromtimestamp(since, timezone.utc), duration_s=round(time.time() - since, 3))

    def _beside(self, config: RunConfig, record: Record) -> list[str]:
        """Runs that went on at some moment of this one's time on its machine."""
        own = self.store.claim(config)
        if own is None or not self.pool.parallel:
            return []
        until = record.started_at.timestamp() + record.duration_s
        going = [claim for other in (*self.pool.running(), *self.back) if (claim := self.store.claim(other)) and other != config]
        found = [name for name, host, start, end in self.over if host == own["host"] and start < until and end > own["since"]]
        found += [claim["run"] for claim in going if claim["host"] == own["host"] and claim["since"] < until]
        oldest = min((claim["since"] for claim in going), default=until)
        self.over = [item for item in self.over if item[3] > oldest] + [(own["run"], own["host"], own["since"], until)]
        return sorted(set(found))

    def _show(self) -> None:
        running = [(claim["where"], config) if (claim := self.store.claim(config)) else ("given out", config)
                   for config in self.pool.running()]
        if not self.pool.parallel:
            words = "".join(f" | {config.label}" for _, config in running)
        else:
            words = "".join(f"\n  {where}: {config.label}" for where, config in sorted(running, key=lambda item: item[0]))
        if self.todo and not running and self.pool.parallel and not self.end.stopped_by:
            words = "\n  waiting for a worker"
        mean_s = sum(self.durations) / len(self.durations) if self.durations else 0
        left = mean_s * (len(self.todo) + len(running)) / max(self.pool.size, 1)
        self.progress.update(self.task, description=_counts(self.end.counts) + words,
                             left=f"about {_minutes(left)} left" if self.durations and left else "")


def _counts(counts: Counter) -> str:
    return ", ".join(f"{counts[status]} {words}" for status, words in
                     (("ok", "done"), ("oom", "out of memory"), ("failed", "failed")) if counts[status]) or "0 done"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
