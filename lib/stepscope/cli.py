"""The command line: a thin layer over the functions a notebook would call."""
import atexit
import gc
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table

from stepscope import PROJECT, StepscopeError, __version__

if TYPE_CHECKING:
    import pandas as pd

    from stepscope.config import RunConfig, StepConfig
    from stepscope.runs.record import Record

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
                  pretty_exceptions_enable=False, help="""
Measure where a Transformer's training step spends its time and memory, and render what was measured.

[bold]sweep[/] runs what a sweep file asks for, one notebook execution per run, into a runs folder;
[bold]render[/] makes writeup and figures of a runs folder; [bold]report[/] does both for this machine. A
sweep that was interrupted is continued by giving the same command again, or by [bold]resume[/].
""")
console = Console(stderr=True)
LIST_COLUMNS = ("study", "run", "shape", "varied", "status", "seconds", "runs beside", "cause")
WHOLE_COLUMNS = ("study", "run", "shape", "status")  # what no terminal is too narrow for
CAUSE_WIDTH = 24  # characters that a cause gets at least
MOST_GIB = 100_000  # a GPU's memory that fit believes
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_LEFT = 1, 2, 75  # 75 is EX_TEMPFAIL of sysexits.h: try again later

RunsOption = Annotated[Path | None, typer.Option("--runs", help="Runs folder.",
                                                 show_default="runs/local-<this machine's device>")]
BudgetOption = Annotated[str | None, typer.Option("--time-budget", metavar="90s|20m|1h",
                         help="Start no run that would end after this time, and say what is left.")]
WorkersOption = Annotated[str | None, typer.Option("--workers", metavar="gpus|N",
                          help="Runs side by side on a local Dask cluster: a worker for each GPU, or N.")]
SchedulerOption = Annotated[str | None, typer.Option("--scheduler", metavar="tcp://HOST:PORT",
                            help="Runs side by side on the workers of this Dask scheduler.")]
ExclusiveOption = Annotated[list[str] | None, typer.Option("--exclusive", metavar="STUDY|all",
                            help="Nothing runs beside runs of this study; may be given more than once.")]
TimeoutOption = Annotated[str | None, typer.Option("--timeout", metavar="90s|20m|1h",
                          help="End a run's processes after this time; it has then failed.")]

EditionOption = Annotated[int | None, typer.Option("--edition", metavar="2025|2026", show_default="none",
                          help="Whose names of sizes: xl is another model in each.")]


def _say_version(asked: bool) -> None:
    if asked:
        print(f"stepscope {__version__}")
        raise typer.Exit


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True,
                                                  help="Print the version and exit.")] = False) -> None:
    pass


def _seconds(text: str | None, option: str) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text)
    if not found:
        raise StepscopeError(f"{option}: got {text!r}, but expected a number with s, m or h, such as 20m")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _runs_here() -> Path:
    """Where runs folders are: in the checkout, and without one where one stands."""
    return (PROJECT or Path.cwd()) / "runs"


def _local_runs(runs: Path | None) -> Path:
    """Runs of this machine go into a folder named after its device, which git ignores; without a checkout,
    where one stands."""
    if runs:
        return runs
    from stepscope.config import device_here
    from stepscope.runs.machine import machine
    device = device_here("auto")
    name = "cpu" if device == "cpu" else re.sub(r"[^a-z0-9]+", "-", machine(device)["device_name"].lower())
    return _runs_here() / f"local-{name}"


def _end_at_once(number: int, frame: object) -> None:
    """On a signal before a sweep listens for it, or after: nothing goes on that would have to be ended."""
    os.write(
        2,
        f"stopped by {signal.Signals(number).name}; what was done is kept; go on with it again\n".encode(),
    )
    os._exit(EXIT_LEFT)


def _end_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end_at_once)


def _sweep(paths: list[Path], runs: Path, time_budget: str | None, workers: str | None, scheduler: str | None,
           exclusive: list[str] | None, timeout: str | None) -> None:
    from stepscope.runs.store import Store
    from stepscope.runs.sweep import How, run_sweep
    from stepscope.runs.workers import Stopped

    how = How(
        workers,
        scheduler,
        None,
        tuple(exclusive or ()),
        _seconds(timeout, "--timeout"),
        _seconds(time_budget, "--time-budget"),
    )
    _say_editions([path for path in paths if runs / "sweeps" not in path.parents])
    try:
        end = run_sweep(paths, Store(runs), how, console)
    except Stopped as stop:
        console.print(str(stop), soft_wrap=True, markup=False)
        raise typer.Exit(EXIT_LEFT) from None
    done = f"{end.counts['ok']} done, {end.counts['oom']} out of memory, {end.counts['failed']} failed"
    console.print(f"{done}; records are in {runs}", markup=False, soft_wrap=True)
    for name, _ in end.failed:
        console.print(f"  failed: {name} (stepscope logs {name} --runs {runs})", markup=False, soft_wrap=True)
    if end.left:
        console.print(
            f"stopped by {end.stopped_by}; {len(end.left)} left, beginning with {end.left[0].run_id}."
            f" Go on with: stepscope resume --runs {runs}",
            soft_wrap=True,
            markup=False,
        )
        raise typer.Exit(EXIT_LEFT)
    if end.failed:
        raise typer.Exit(EXIT_FAILED)


def _say_editions(paths: list[Path]) -> None:
    """Which model a size of two editions is, where a sweep file of one's own does not say its edition."""
    from stepscope.config import EDITIONS, SIZES, size_of
    from stepscope.runs.sweep_file import SHIPPED, sizes_of_two_editions
    own = [path for path in paths if SHIPPED not in path.parents]
    for size in dict.fromkeys(size for path in own for size in sizes_of_two_editions(path)):
        shapes = ["/".join(map(str, SIZES[size_of(size, year)])) for year in EDITIONS]
        first, last = EDITIONS
        console.print(f"size: {size} is {first}'s, {shapes[0]}; with edition: {last} beside it, {shapes[-1]}",
                      soft_wrap=True, markup=False, highlight=False)


@app.command()
def sweep(
    sweeps: Annotated[
        list[str],
        typer.Argument(
            help="Sweep files (YAML), or what ships: a study's name (on a CPU of tiny models), reference,"
                 " 2026, cpu."
        ),
    ],
    runs: RunsOption = None,
    time_budget: BudgetOption = None,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    exclusive: ExclusiveOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Run sweeps: all that is asked for and has no valid record yet, one run after another or on Dask
    workers.

    Exit status: 0 all done (out of memory is a result), 1 some run failed, 2 bad input, 75 stopped with runs
    left.
    """
    _end_on_signals()
    _sweep(
        _named(sweeps, scheduler),
        _local_runs(runs),
        time_budget,
        workers,
        scheduler,
        exclusive,
        timeout,
    )


@app.command()
def resume(
    runs: RunsOption = None,
    time_budget: BudgetOption = None,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    exclusive: ExclusiveOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Go on with the sweeps that a runs folder was begun with (it keeps their files)."""
    _end_on_signals()
    from stepscope.runs.sweep_file import SweepError
    folder = _local_runs(runs)
    paths = sorted((folder / "sweeps").glob("*.yaml"))
    if not paths:
        raise SweepError(f"{folder}: no sweep was begun here (there is no sweeps/*.yaml in it)")
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise SweepError(f"{path}: is no regular file")
    _sweep(paths, folder, time_budget, workers, scheduler, exclusive, timeout)


def _runs_to_read(runs: Path | None) -> Path:
    """The one local folder that there is; between several the device decides, which torch has to say."""
    local = sorted(_runs_here().glob("local-*/"))
    return runs or (local[0] if len(local) == 1 else _local_runs(None))


@app.command("list")
def list_runs(runs: RunsOption = None,
              where: Annotated[str | None, typer.Option(
                  help="Only these, e.g. \"size == 'small' and status == 'failed'\" (pandas' query)."
              )] = None) -> None:
    """List the runs of a folder with how they ended, and name the records that cannot be used.

    A model without a name is told by its shape (d_model, f: d_ff, layers, heads), and runs that are otherwise
    alike by the fields that were varied. Beside what ran out of
    memory stands the peak that the accounting predicts for it. Where the output is not a terminal, it is a
    line of names and then a line for each run, with tabs between the columns.
    """
    from stepscope.runs.store import Store
    folder = _runs_to_read(runs)
    if not folder.is_dir():
        raise StepscopeError(f"{folder}: no such runs folder")
    records, errors = Store(folder).records()
    if where is not None and records:
        records = _asked_for(records, where)
    from stepscope.config import configure, varied
    configs = [configure(**record.config) for record in records]
    by_run = varied(configs)
    rows = [_list_row(record, config, by_run) for record, config in zip(records, configs, strict=True)]
    if sys.stdout.isatty():
        _print_runs(rows, str(folder))
    else:
        for row in [dict(zip(LIST_COLUMNS, LIST_COLUMNS)), *rows]:
            print(*row.values(), sep="\t")
    for error in errors:
        console.print(f"[yellow]{escape(f'{folder}/{error}')}[/]", soft_wrap=True)


def _asked_for(records: list["Record"], where: str) -> list["Record"]:
    from stepscope.runs.tables import runs_frame  # pandas: takes longer to import than the list itself
    frame = runs_frame(records)
    try:
        asked = frame.eval(where)
        if str(getattr(asked, "dtype", None)) != "bool":
            raise TypeError("it is not true or false of each")
    except Exception as error:  # noqa: BLE001 - whatever Python says to an expression that is somebody's
        reason = " ".join(str(error).split())
        raise StepscopeError(f"--where: {where!r} cannot be asked of runs ({reason});"
                             f" columns are {', '.join(frame.columns)}") from None
    return [record for record, is_asked in zip(records, asked) if is_asked]


def _list_row(record: "Record", config: "RunConfig",
              by_run: dict[tuple[str, str], str]) -> dict[str, str]:
    from stepscope.step.accounting import predicted_peak_mib
    cause = "".join(c for c in " ".join((record.cause or "").split()) if c.isprintable())
    if record.status == "oom" and (predicted := predicted_peak_mib(record.config)):
        cause = f"predicted peak {predicted / 1024:.1f} GiB; {cause}"
    shape = config.shape if record.config.get("size") == "custom" else ""
    beside = str(len(record.beside) or "")
    values = (record.study, record.run_id, shape, by_run[config.study, config.run_id], record.status,
              f"{record.duration_s:.1f}", beside, cause)
    return dict(zip(LIST_COLUMNS, values))


def _print_runs(rows: list[dict[str, str]], title: str) -> None:
    """A table for a terminal. Run ids are whole, to be copied: for want of room other columns go."""
    out = Console()
    needed = ("study", "run", "status")
    columns = [name for name in LIST_COLUMNS if name in needed or any(row[name] for row in rows)]
    gone = []
    while True:
        table = _runs_table(rows, columns, title)
        width = Measurement.get(out, out.options.update(width=1000), table).minimum
        spare = [name for name in ("runs beside", "seconds") if name in columns]
        if width <= out.width or not spare:
            break
        columns.remove(spare[0])
        gone.append(spare[0])
    Console(width=max(width, out.width)).print(table)
    if gone:
        console.print(f"Not shown for want of room: {' and '.join(gone)};"
                      " a wider terminal or a pipe gets all columns.", soft_wrap=True)


def _runs_table(rows: list[dict[str, str]], columns: list[str], title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
                  collapse_padding=True)
    for name in columns:
        widest = max((len(row[name]) for row in rows), default=0)
        table.add_column(name, no_wrap=name in WHOLE_COLUMNS, overflow="fold",
                         justify="right" if name in ("seconds", "runs beside") else "left",
                         min_width=min(CAUSE_WIDTH, widest) if name == "cause" else None)
    for row in rows:
        table.add_row(*(escape(row[name][:100] if name == "cause" else row[name]) for name in columns))
    return table


@app.command()
def logs(run: Annotated[str, typer.Argument(help="A run's id, or its beginning, or study/id.")],
         runs: RunsOption = None) -> None:
    """Print what a run said: its end and cause, its notebook's output and traceback, its process's words."""
    from stepscope.runs.logs import run_log
    from stepscope.runs.store import Store
    print(run_log(Store(_runs_to_read(runs)), run), end="")


@app.command()
def render(runs: RunsOption = None,
           out: Annotated[Path | None, typer.Option(help="Where the report goes.",
                                                    show_default="the runs folder")] = None) -> None:
    """Render a runs folder: writeup.md, writeup.html (self-contained) and figures/."""
    folder = _local_runs(runs)
    for path in _render(folder, out):
        print(path)


def _render(folder: Path, out: Path | None = None) -> list[Path]:
    """The report of a runs folder; its text and its page."""
    from stepscope.report.render import render
    from stepscope.runs.store import Store
    return render(Store(folder), out or folder)[:2]


@app.command()
def check(runs: RunsOption = None,
          out: Annotated[Path | None, typer.Option(help="Where the report is.",
                                                   show_default="the runs folder")] = None) -> None:
    """Fail if a report differs from what its records say: the text by a byte, a figure in what it shows."""
    from stepscope.report.check import check
    from stepscope.runs.store import Store
    folder = _local_runs(runs)
    check(Store(folder), out or folder)
    console.print(f"{out or folder}: the report is what the records in {folder} say", markup=False)


@app.command()
def report(
    sweeps: Annotated[
        list[str] | None,
        typer.Argument(help="What to measure, as of sweep.", show_default="a tour on a GPU, cpu without one"),
    ] = None,
    runs: RunsOption = None,
    time_budget: BudgetOption = None,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    exclusive: ExclusiveOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Measure this machine and render its report: on a GPU a tour of all studies, on a CPU tiny models.

    What a run found is printed when it is done, and how long all takes before it starts. `stepscope report
    reference` measures the whole matrix instead, in hours. Everything goes into the runs folder; the
    committed reference results stay as they are.
    """
    _end_on_signals()
    if console.is_terminal:  # torch takes seconds to import, the first time many
        console.print("Looking at this machine.")
    folder, end = _local_runs(runs), None
    with tempfile.TemporaryDirectory() as temporary:
        paths = _named(sweeps, scheduler) if sweeps else _first_sweep(Path(temporary))
        try:
            _sweep(paths, folder, time_budget, workers, scheduler, exclusive, timeout)
        except typer.Exit as status:  # what was measured is shown, also when something failed or time ran out
            end = status
    if folder.exists():
        _render_and_say(folder)
    if end:
        raise end


def _named(names: list[str], scheduler: str | None = None) -> list[Path]:
    """The files of sweeps by their names. Where only a CPU would run them, a study's is that over its tiny
    models, and what is of several studies on a GPU is refused."""
    from stepscope.config import device_here, studies
    from stepscope.runs.sweep_file import find_sweeps
    on_gpu = (*studies(), "reference", "2026")
    shipped = [name for name in names if name in on_gpu and not Path(name).is_file()]
    if not shipped or scheduler is not None or device_here("auto") == "cuda":
        return [path for name in names for path in find_sweeps(name)]
    for name in shipped:
        if name not in studies():
            raise StepscopeError(f"{name}: its models need a CUDA GPU, and torch sees none here;"
                                 " the same studies over tiny models are called cpu")
    console.print(f"{', '.join(shipped)}: torch sees no CUDA GPU here, so over tiny models on the CPU")
    return [path.with_name("sweep_cpu.yaml") if name in shipped else path
            for name in names for path in find_sweeps(name)]


def _first_sweep(folder: Path) -> list[Path]:
    """What `stepscope report` measures here: on a GPU the tour, whose file is written to a folder."""
    from stepscope.config import device_here
    from stepscope.runs.machine import machine
    from stepscope.runs.sweep_file import find_sweeps, tour
    if device_here("auto") == "cpu":
        return find_sweeps("cpu")
    path = folder / "tour.yaml"
    path.write_text(tour(machine("cuda")["gpu_memory_mib"]), encoding="utf-8")
    return [path]


def _render_and_say(folder: Path) -> None:
    """The report of a runs folder, and how it opens."""
    if console.is_terminal:
        with console.status("Making the report: reading the runs, drawing its pictures; up to two minutes"):
            paths = _render(folder)
    else:
        console.print("Making the report: reading the runs, drawing its pictures; up to two minutes")
        paths = _render(folder)
    opens = re.search(r"<a id=.*\n\n(?:#.*\n\n)*(.+)", paths[0].read_text(encoding="utf-8"))
    if opens:
        console.print(opens[1].replace("**", ""), soft_wrap=True, markup=False, highlight=False)
    for path in paths:
        print(path)


@app.command()
def ladder(
    size: Annotated[
        str | None, typer.Option(help="A named size.", show_default="small, or nano on a CPU")
    ] = None,
    edition: EditionOption = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="D_MODEL,D_FF,LAYERS,HEADS", help="A shape of your own, in place of a size."),
    ] = None,
    context: Annotated[int, typer.Option(help="Context length.", show_default="512, or 64 on a CPU")] = 0,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 4,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 10_000,
    processes: Annotated[int, typer.Option(help="So many processes.", min=1, max=100)] = 3,
    rungs: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Only these, and not Hugging Face's beside them.",
                     show_default="all"),
    ] = None,
    runs: RunsOption = None,
    time_budget: BudgetOption = None,
) -> None:
    """Climb the ladder with a model of your own: how fast its step can be made here, and by what.

    A sweep of the study ladder, then the report. Exit status as of sweep.
    """
    _end_on_signals()
    import yaml

    from stepscope.config import device_here, size_of
    device = device_here("auto")
    context = context or (512 if device == "cuda" else 64)
    fixed: dict = {"context_length": context, "batch_size": batch,
                   "vocab_size": vocabulary, "device": device, "warmup_steps": 1, "timed_steps": 4}
    if shape:
        numbers = shape.split(",")
        if len(numbers) != 4 or not all(number.strip().isdigit() for number in numbers):
            raise StepscopeError(f"--shape: got {shape!r}, but expected four numbers such as 768,3072,12,12")
        fixed |= dict(zip(("d_model", "d_ff", "num_layers", "num_heads"), map(int, numbers)))
    else:
        fixed["size"] = size_of(size or ("small" if device == "cuda" else "nano"), edition)
    if rungs:
        fixed |= {"rungs": [name.strip() for name in rungs.split(",")], "beside": []}
    block = {"study": "ladder", "fixed": fixed, "axes": {"process": list(range(processes))}}
    folder = _local_runs(runs)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "ladder.yaml"
        path.write_text(yaml.safe_dump(block), encoding="utf-8")
        _sweep([path], folder, time_budget, None, None, None, None)
    _render_and_say(folder)


@app.command()
def fit(
    size: Annotated[
        str | None,
        typer.Argument(help="A size: small, medium, large, xl, 2.7B, 10B; or give the four dimensions."),
    ] = None,
    edition: EditionOption = None,
    d_model: Annotated[int | None, typer.Option(help="Of a shape of your own.")] = None,
    d_ff: Annotated[int | None, typer.Option(help="Of a shape of your own.")] = None,
    layers: Annotated[int | None, typer.Option(help="Of a shape of your own.")] = None,
    heads: Annotated[int | None, typer.Option(help="Of a shape of your own.")] = None,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 10_000,
    context: Annotated[int, typer.Option(help="Context length.")] = 512,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 4,
    attention: Annotated[
        str, typer.Option(metavar="eager|sdpa", help="Written out, or torch's fused attention.")
    ] = "eager",
    optimizer: Annotated[
        str, typer.Option(metavar="foreach|fused", help="AdamW's implementation.")
    ] = "foreach",
    checkpoint: Annotated[
        int, typer.Option(help="Activation checkpoints, each around so many blocks; 0: none.", min=0)
    ] = 0,
    memory: Annotated[
        float | None,
        typer.Option(
            help="GPU memory in GiB: the MiB of nvidia-smi over 1,024, not the GB of a data sheet.",
            show_default="this machine's GPU's, else 80",
        ),
    ] = None,
    allowance: Annotated[
        float | None,
        typer.Option(
            help="Percent of the memory to leave free for what the allocator reserves beyond tensors.",
            show_default="the most that the reference measured",
        ),
    ] = None,
) -> None:
    """Say before running what fits into a GPU's memory: peaks by formula, largest context and batch.

    A step is tight that fits and leaves less than the allowance free: it may run or not.
    """
    if memory is not None and not 0 < memory <= MOST_GIB:
        raise StepscopeError(f"--memory: got {memory:g}, but expected a GPU's memory in GiB, such as 80")
    if allowance is not None and not 0 <= allowance < 100:
        raise StepscopeError(
            f"--allowance: got {allowance:g}, but expected a percentage below 100, such as 25"
        )
    from stepscope.config import device_here
    from stepscope.runs.machine import machine
    from stepscope.say.formats import MODE_WORDS
    from stepscope.step.accounting import ALLOWANCE, on_gpu, what_fits
    config = on_gpu(
        **_shape_asked(size, edition, (d_model, d_ff, layers, heads)),
        vocab_size=vocab, context_length=context, batch_size=batch, attention=attention, optimizer=optimizer,
    )
    if checkpoint > config.num_layers:
        raise StepscopeError(f"--checkpoint: got {checkpoint}, but there are {config.num_layers} blocks")
    if memory is None:
        memory = machine("cuda")["gpu_memory_mib"] / 1024 if device_here("auto") == "cuda" else 80
    free = ALLOWANCE if allowance is None else allowance / 100
    found = what_fits(config, memory * 1024, free, checkpoint)
    table = Table(Column("mode", no_wrap=True), "precision", Column("peak\nGiB", justify="right"), "peak in",
                  "fits", Column("largest\ncontext", justify="right", no_wrap=True),
                  Column("largest\nbatch", justify="right", no_wrap=True),
                  box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title_justify="left",
                  title=_fit_title(config, checkpoint, memory))
    for row in found.itertuples():
        table.add_row(MODE_WORDS[row.mode], row.precision, f"{row.peak_mib / 1024:.2f}", row.phase,
                      "tight" if row.tight else "yes" if row.fits else "no",
                      f"{row.largest_context:,}", f"{row.largest_batch:,}")
    out = Console()
    out.print(table)
    for words in _fit_words(found, free, measured=allowance is None):
        out.print(words, highlight=False, markup=False)


def _fit_words(found: "pd.DataFrame", free: float, measured: bool) -> list[str]:
    """What the table's words mean, and why bf16 may need more."""
    words = []
    if free:
        whose = ", the most of what the allocator reserved that was in no tensor at a peak of the reference"
        words.append(f"Tight: it leaves less than {free:.0%} of the memory free{whose if measured else ''}."
                     " The largest context and batch leave it (with --allowance 0 nothing).")
    alone = found[found["mode"] == "forward"].set_index("precision")["peak_mib"] / 1024
    if alone["bf16"] > alone["fp32"]:
        words.append(f"Forward alone in bf16 takes {alone['bf16'] - alone['fp32']:.2f} GiB more than in fp32,"
                     " because autocast keeps a bf16 copy of each weight until forward ends.")
    return words


def _shape_asked(size: str | None, edition: int | None, dimensions: tuple[int | None, ...]) -> dict:
    """A size's or a shape's fields; the name of a size is an edition's."""
    from stepscope.config import Dimensions, size_of
    own = dict(zip(Dimensions._fields, dimensions, strict=True))
    if size is None and None in own.values():
        missing = ", ".join(name for name, value in own.items() if value is None)
        raise StepscopeError(
            f"size: not given; name one, such as small, or give the shape ({missing} missing)"
        )
    if size is None and edition is not None:
        raise StepscopeError(f"--edition: got {edition}, but no size whose name it would tell")
    return own if size is None else own | {"size": size_of(size, edition)}


def _fit_title(config: "StepConfig", checkpoint: int, memory: float) -> str:
    from stepscope.config import Dimensions, size_label
    shape = "/".join(str(getattr(config, name)) for name in Dimensions._fields)
    name = shape if config.size == "custom" else f"{size_label(config.size)}, {shape}"
    options = [
        f"context {config.context_length}", f"batch {config.batch_size}",
        *(["vocabulary " + str(config.vocab_size)] if config.vocab_size != 10_000 else []),
        "scaled_dot_product_attention" if config.attention == "sdpa" else "attention written out",
        f"{config.optimizer} AdamW",
        *([f"a checkpoint every {checkpoint} block{'s' * (checkpoint > 1)}"] if checkpoint else []),
        f"{memory:g} GiB",
    ]
    return f"{name}\n{', '.join(options)}"


@app.command()
def doctor() -> None:
    """Say what this machine offers for measuring, and what is missing."""
    from stepscope.config import device_here
    from stepscope.runs.machine import gpu_state, machine, software
    device = device_here("auto")
    table = Table("", "", title="What this machine offers", show_header=False)
    for part in (machine(device), software(), gpu_state(device)):
        for name, value in part.items():
            table.add_row(name, escape(str(value)))
        table.add_section()
    Console().print(table)
    console.print(_nsys_words(), soft_wrap=True, markup=False)
    if device == "cpu":
        console.print("No CUDA GPU is seen by torch: reports here are the CPU preset (tiny models).")


def _nsys_words() -> str:
    """Which nsys there is and whether it is whole; what to do where it is not."""
    from stepscope.traces.nsys_program import find_nsys, missing_libraries, nsys_version
    nsys = find_nsys()
    if nsys is None:
        return ("nsys: none on the PATH, in the usual install folders or inside Nsight Compute; profiles are"
                " torch.profiler's. It comes with NVIDIA's CUDA toolkit, or as the package"
                " nsight-systems-cli.")
    words = f"nsys: {nsys}, version {nsys_version(nsys)}"
    if missing := missing_libraries(nsys):
        return (f"{words}, incomplete: its importer lacks {', '.join(missing)}, so it captures but makes"
                " no reports; profiles are torch.profiler's. Install the libraries"
                " (on Debian and Ubuntu: apt-get install libdw1 libelf1).")
    return f"{words}, complete"


@app.command()
def neighbours(workers: WorkersOption = None,
               repeat: Annotated[int, typer.Option(
                   min=2, help="Runs of each configuration on each busy worker.")] = 3,
               runs: Annotated[Path | None, typer.Option(
                   help="Keep the runs here.", show_default="a temporary folder")] = None,
               of: Annotated[list[str] | None, typer.Option(
                   metavar="NAME=FOLDER",
                   help="Measure nothing; compare folders of one nsys sweep that ran on more or fewer"
                        " workers, the first with the others, for the report of --runs.")] = None) -> None:
    """Does a run beside others time the same? The same runs with 1, 2, 4, ... workers busy, compared."""
    from stepscope.studies.neighbours.measure import KEPT, compare_folders, experiment
    if of is None:
        experiment(workers or "gpus", repeat, runs, Console())
        return
    named = [item.partition("=") for item in of]
    folders = {name: Path(folder) for name, _, folder in named if name and folder}
    if len(folders) != len(of) or len(of) < 2:
        raise StepscopeError(f"--of: got {', '.join(of)}, but expected it twice or more,"
                             " each as NAME=FOLDER with a name of its own")
    if workers is not None:
        raise StepscopeError("--of and --workers: one or the other; --of compares what has been measured")
    kept = _local_runs(runs) / KEPT
    compare_folders(folders, kept)
    console.print(f"{kept}: written", markup=False)


def main() -> None:
    """Entry point: errors that are the input's are one line and status 2, without a traceback."""
    # Until a sweep listens for it, Ctrl-C simply ends the process: raised in the middle of an import, it may
    # be swallowed there.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Python, ending, gives signals back to the system before it leaves: another Ctrl-C would then be the end,
    # and its status the signal's. Registered first, this is done last.
    atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT})
    try:
        app()
    except StepscopeError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(EXIT_BAD_INPUT)
    finally:
        if "triton" not in sys.modules:  # Triton 3.9 reports all that is left as leaked, in forty lines
            gc.freeze()  # or Python, ending, goes through some 400,000 objects of libraries: seconds, or many


if __name__ == "__main__":
    main()
