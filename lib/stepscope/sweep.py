"""A sweep: a YAML file becomes configurations, and what has no valid record yet is run, one after another."""
import itertools
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stepscope import StepscopeError
from stepscope.config import ConfigError, RunConfig, configure, require_device
from stepscope.execute import execute
from stepscope.machine import machine
from stepscope.store import RecordError, Store, write_text_durably

SHIPPED = Path(__file__).parent / "sweeps"
BLOCK_KEYS = ("study", "fixed", "axes")


class SweepError(StepscopeError, ValueError):
    """A sweep that cannot start; the text names the file, the place in it, and what was expected."""


def load_sweep(path: Path) -> list[RunConfig]:
    """All configurations of a sweep file, in its order, each once.

    The file is one block or a list of blocks, a block being ``study`` (a name), ``fixed`` (field: value) and ``axes``
    (field: list of values); the block stands for the product of its axes, the last axis varying fastest.

    Raises:
        SweepError: no such file, not YAML, another shape than this, or a configuration that is not valid.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.yaml")))
        raise SweepError(f"{path}: cannot be read ({error.strerror}); sweeps that ship with stepscope: {shipped}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SweepError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    configs = {}
    for number, block in enumerate(content if isinstance(content, list) else [content], start=1):
        try:
            for config in _expand(block):
                configs.setdefault((config.study, config.run_id), config)
        except (ConfigError, SweepError) as error:
            raise SweepError(f"{path}, block {number}: {error}") from None
    if not configs:
        raise SweepError(f"{path}: asks for no run")
    return list(configs.values())


def _expand(block: object) -> Iterator[RunConfig]:
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
        yield configure(block["study"], **fixed, **dict(zip(axes, values)))


def find_sweep(name: str) -> Path:
    """A sweep by path, or by the name of one that ships with the project."""
    shipped = SHIPPED / f"{name}.yaml"
    return shipped if shipped.exists() and not Path(name).exists() else Path(name)


@dataclass
class SweepEnd:
    """How a sweep ended: counts by status of all its runs, those left undone, and those that failed with their cause."""

    counts: Counter = field(default_factory=Counter)
    left: list[RunConfig] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    stopped_by: str | None = None


class Stopped(KeyboardInterrupt):
    """A signal asked the sweep to end. Of this type because asyncio lets no other out of what it calls back."""


@contextmanager
def _signals_stop() -> Iterator[None]:
    def stop(number, frame):
        raise Stopped(signal.Signals(number).name)
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_sweep(paths: list[Path], store: Store, time_budget_s: float | None = None,
              console: Console | None = None) -> SweepEnd:
    """Run what the sweep files ask for and the store does not hold yet.

    Args:
        time_budget_s: no run is started that would, if it took as long as the longest so far, end after this time.

    Raises:
        SweepError, ConfigError: before anything starts. StoreBusy: another sweep is writing into the folder.
    """
    console = console or Console(stderr=True)
    configs = list({(c.study, c.run_id): c for path in paths for c in load_sweep(path)}.values())
    for config in configs:
        require_device(config)
    with store.writing():
        _same_machine(store, configs)
        # The sweep stays with its runs, so that a folder alone can say what is still missing and be resumed.
        for path in paths:
            kept = store.root / "sweeps" / f"{path.stem}.yaml"
            kept.parent.mkdir(exist_ok=True)
            if kept.resolve() != Path(path).resolve():
                write_text_durably(kept, Path(path).read_text(encoding="utf-8"))
        end, todo = SweepEnd(), []
        for config in configs:
            record = _valid_record(config, store, console)
            if record and record.done:
                end.counts[record.status] += 1
            else:
                todo.append(config)
        _run_all(todo, store, time_budget_s, console, end, total=len(configs))
    return end


def _valid_record(config: RunConfig, store: Store, console: Console):
    try:
        return store.find(config)
    except RecordError as error:
        place = store.set_aside(store.folder(config))
        console.print(f"[yellow]{escape(str(error))}[/]; moved to {escape(str(place))}, the run is done again",
                      soft_wrap=True)
        return None


def _same_machine(store: Store, configs: list[RunConfig]) -> None:
    """Figures of two kinds of machine in one folder would be compared as if they were one's."""
    records, _ = store.records()
    here = {config.device: machine(config.device)["device_name"] for config in configs}
    for record in records:
        device = record.config.get("device")
        there = record.machine.get("device_name")
        if device in here and there and there != here[device]:
            raise SweepError(f"{store.root}: holds runs of {there!r}, and this machine is {here[device]!r};"
                             " choose another --runs folder")


def _run_all(todo: list[RunConfig], store: Store, budget_s: float | None, console: Console, end: SweepEnd,
             total: int) -> None:
    started, durations = time.monotonic(), []
    progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                        TextColumn("{task.fields[left]}"), console=console)
    with progress, _signals_stop():
        task = progress.add_task("", total=total, completed=total - len(todo), left="")
        try:
            for index, config in enumerate(todo):
                elapsed = time.monotonic() - started
                if budget_s is not None and elapsed + max(durations, default=0) > budget_s:
                    end.left, end.stopped_by = todo[index:], "time budget"
                    break
                mean = sum(durations) / len(durations) if durations else 0
                progress.update(task, description=f"{_counts(end.counts)} | {config.study} {config.run_id}",
                                left=f"about {_minutes(mean * (len(todo) - index))} left" if durations else "")
                record = execute(config, store)
                durations.append(record.duration_s)
                end.counts[record.status] += 1
                if record.status == "failed":
                    end.failed.append((f"{record.study}/{record.run_id}", record.cause))
                    console.print(f"[red]failed[/] {record.study}/{record.run_id}: {escape(record.cause)}", soft_wrap=True)
                progress.update(task, advance=1, description=_counts(end.counts))
        except KeyboardInterrupt as stop:
            end.left, end.stopped_by = todo[len(durations):], str(stop) or "SIGINT"


def _counts(counts: Counter) -> str:
    return ", ".join(f"{counts[status]} {words}" for status, words in
                     (("ok", "done"), ("oom", "out of memory"), ("failed", "failed")) if counts[status]) or "0 done"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
