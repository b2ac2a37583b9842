"""Define the command-line interface, a thin layer over functions that notebooks can also call."""

import errno
import itertools
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from stepscope import PROJECT, StepscopeError, __version__
from stepscope.files import one_line
from stepscope.runs.machine import gpus_here, machine, software

# Other modules are imported lazily, after main has changed how SIGINT is handled. Otherwise, pressing Ctrl-C
# during an import would print a traceback.
if TYPE_CHECKING:
    from stepscope.runs.record import Record
    from stepscope.runs.sweep import SweepOptions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""
Measure how a Transformer's training step spends time and uses memory, and write a report.

[bold]report[/] measures this machine and writes its report. [bold]sweep[/] measures the configurations of a
sweep file, each by executing a notebook, and saves the results in a runs folder. [bold]render[/] writes the
report of a runs folder. To resume an interrupted command, run it again.
""",
)
console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_LEFT = 1, 2, 75  # 75 is EX_TEMPFAIL in sysexits.h: try again later


def _folder(text: str) -> Path:
    """Convert the path of a folder to a Path, and reject an empty string.

    An unset shell variable expands to an empty string, which Path would interpret as the current folder.
    """
    if not text:
        raise typer.BadParameter(
            "got an empty string, but expected the path of a folder ('.' is the current folder)"
        )
    return Path(text)


RunsOption = Annotated[
    Path | None,
    typer.Option(
        "--runs",
        parser=_folder,
        metavar="PATH",
        help="Folder that contains the runs.",
        show_default="runs/local-<this machine's device>",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", parser=_folder, metavar="PATH", help="Folder for the report.", show_default="the runs folder"
    ),
]
ReplaceOption = Annotated[
    bool,
    typer.Option("--replace", help="Rerun and replace runs that another version of the notebook measured."),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--time-budget",
        min=0,
        metavar="MINUTES",
        help="Start no more runs after this time, and report how many runs are left.",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help="Number of GPUs to use, or of parallel runs on a machine without a GPU.",
        show_default="all GPUs; 1 without a GPU",
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="tcp://HOST:PORT",
        help="Run on the workers of this Dask scheduler instead of on this machine.",
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0.1,
        metavar="MINUTES",
        help="Time limit for each run. A run that exceeds it is killed and counts as failed.",
    ),
]
EditionOption = Annotated[
    int | None,
    typer.Option(
        "--edition",
        metavar="2025|2026",
        help="Edition of the assignment that defines the size names. The size xl differs between editions.",
        show_default="2025",
    ),
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="D_MODEL/D_FF/LAYERS/HEADS",
        help="Dimensions of the model, as an alternative to a named size.",
    ),
]
BatchOption = Annotated[int, typer.Option("--batch", help="Batch size.")]
VocabOption = Annotated[int, typer.Option("--vocab", help="Vocabulary size.")]


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"stepscope {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def _seconds(minutes: float | None) -> float | None:
    return None if minutes is None else minutes * 60


def _local_runs(runs: Path | None, reading: bool = False) -> Path:
    """Return ``runs``, or this machine's runs folder if ``runs`` is None.

    This machine's folder is named after the machine's device. It is in the checkout, where git ignores it, or in
    the current directory if there is no checkout. If ``reading`` is True and there is only one local runs
    folder, return this folder, regardless of its device.
    """
    if runs:
        return runs
    folder = (PROJECT or Path.cwd()) / "runs"
    if reading and len(local := sorted(folder.glob("local-*/"))) == 1:
        return local[0]
    gpus = gpus_here()
    return folder / f"local-{re.sub(r'[^a-z0-9]+', '-', gpus[0]['name'].lower()) if gpus else 'cpu'}"


def _sweep(sources: list[Any], runs: Path, options: "SweepOptions") -> int:
    """Run sweeps, print a summary, and return the exit status."""
    from stepscope.runs.store import Store
    from stepscope.runs.sweep import run_sweep

    end = run_sweep(sources, Store(runs), options, console)
    counts = end.counts
    console.print(
        f"{counts['ok']} done, {counts['oom']} out of memory, {counts['failed']} failed;"
        f" the records are in {runs}"
    )
    if end.left:
        console.print(
            f"stopped by {end.stopped_by}; runs left: {len(end.left)}, beginning with"
            f" {end.left[0].label}. To resume, run the same command again"
        )
        return EXIT_LEFT
    return EXIT_FAILED if counts["failed"] else 0


def _sweep_and_render(sources: list[Any], runs: Path, options: "SweepOptions") -> NoReturn:
    """Run sweeps, render their results even if some runs failed, and exit with the status of the sweeps."""
    status = _sweep(sources, runs, options)
    if any(runs.glob("*/*/record.json")):
        _render(runs, runs)
        console.print(f"open {runs / 'report.html'} in a browser; it contains the complete report")
        if not any(isinstance(source, dict) and source["study"] == "your_model" for source in sources):
            command = f"{_program()} ladder FILE.py:FUNCTION --runs runs/mine"
            console.print(f"to measure your own model (see docs/your-model.md): {command}")
    raise typer.Exit(status)


def _program() -> str:
    """Return the command that runs this program from the current directory."""
    if shutil.which("stepscope"):
        return "stepscope"
    called = Path(sys.argv[0])
    return os.path.relpath(called) if called.name == "stepscope" else "python -m stepscope.cli"


@app.command()
def sweep(
    sweeps: Annotated[
        list[str],
        typer.Argument(
            help="Sweep files (YAML), or names of built-in sweeps. The sweeps reference, tour and 2026 need a GPU,"
            " but cpu doesn't. The name of a study selects its sweep, which uses tiny models if there is no GPU."
        ),
    ],
    runs: RunsOption = None,
    time_budget: BudgetOption = None,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    timeout: TimeoutOption = None,
    replace: ReplaceOption = False,
    notebooks: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder that contains the notebooks to execute, such as your copies in lab.",
            show_default="the package's notebooks",
        ),
    ] = None,
    images: Annotated[
        bool, typer.Option("--images/--no-images", help="Keep the images in executed notebooks.")
    ] = True,
) -> None:
    """Measure each configuration of the given sweeps that has no valid record yet.

    Exit status: 0 if all runs are done (running out of memory is a result), 1 if a run failed, 2 if the input is
    invalid, 75 if the sweep stopped before all runs were done.
    """
    from stepscope.config import studies
    from stepscope.runs.sweep import SweepOptions
    from stepscope.runs.sweep_file import find_sweeps, sweep_description

    device = "cuda" if scheduler or gpus_here() else "cpu"
    paths = []
    for name in sweeps:
        files = find_sweeps(name, device)
        if device == "cpu" and name in studies():
            console.print(f"{name}: this machine has no CUDA GPU, so the study runs tiny models on the CPU")
        else:
            for path in files:
                console.print(f"{path.name}: {sweep_description(path) or 'no time estimate available'}")
        paths += files
    options = SweepOptions(
        workers, scheduler, _seconds(timeout), _seconds(time_budget), notebooks, images, replace
    )
    raise typer.Exit(_sweep(paths, _local_runs(runs), options))


@app.command()
def report(
    runs: RunsOption = None,
    time_budget: BudgetOption = None,
    workers: WorkersOption = None,
    timeout: TimeoutOption = None,
    replace: ReplaceOption = False,
) -> None:
    """Measure this machine and write a report: a tour of all studies on a GPU, or tiny models on a CPU.

    The command prints each run's finding as soon as the run is done. It is equivalent to sweep tour (or sweep cpu)
    followed by render. With two or more GPUs, it also runs sweep two_gpus.
    """
    from stepscope.runs.sweep import SweepOptions
    from stepscope.runs.sweep_file import find_sweeps, sweep_description

    console.print("Checking this machine.")
    if gpus := gpus_here():
        paths = find_sweeps("tour")
        if len(gpus) > 1 and workers != 1:
            paths += find_sweeps("two_gpus")
        for path in paths:
            console.print(sweep_description(path))
    else:
        paths = find_sweeps("cpu", "cpu")
        console.print("This machine has no CUDA GPU, so every study runs tiny models on the CPU.")
    options = SweepOptions(workers, None, _seconds(timeout), _seconds(time_budget), replace=replace)
    _sweep_and_render(paths, _local_runs(runs), options)


@app.command()
def ladder(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="SIZE|FILE.py:FUNCTION",
            help="A named size of the built-in Transformer (not needed with --shape), or a function that builds"
            " your own model, as FILE.py:FUNCTION or package.module:FUNCTION. The command runs your code.",
        ),
    ] = None,
    edition: EditionOption = None,
    shape: ShapeOption = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            "-p",
            metavar="NAME=VALUE",
            help="Keyword argument for your function. Repeat the option to give several arguments, or several"
            " values of an argument.",
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Context length in tokens. Repeat the option to measure several.",
            show_default="512; 64 on a CPU",
        ),
    ] = None,
    batch: BatchOption = 4,
    vocab: VocabOption = 10_000,
    runs: RunsOption = None,
    time_budget: BudgetOption = None,
) -> None:
    """Optimize a training step one change at a time, measure each change, and write a report."""
    from stepscope.runs.sweep import SweepOptions

    if model and ":" in model:
        if edition or shape or context:
            raise StepscopeError(
                "--edition, --shape and --context don't apply to your own model; use -p NAME=VALUE instead"
            )
        block = _block_of_model(model, parameter or [])
    elif model and model.endswith(".py"):
        raise StepscopeError(
            f"got {model!r:.80}, but expected FILE.py:FUNCTION, for example {model:.80}:build"
        )
    else:
        if parameter:
            raise StepscopeError(f"-p: got {parameter[0]!r:.80}, but -p only applies to your own model")
        contexts = context or [512 if gpus_here() else 64]
        fixed = _requested_shape(model, edition, shape) | {"batch_size": batch, "vocab_size": vocab}
        block = {"study": "ladder", "fixed": fixed, "axes": {"context_length": contexts}}
    options = SweepOptions(time_budget_s=_seconds(time_budget), progress=True)
    _sweep_and_render([block], _local_runs(runs), options)


def _block_of_model(model: str, parameters: list[str]) -> dict[str, Any]:
    """Return a sweep block that measures a user's model with every combination of the given arguments.

    The model's location is passed to the runs in environment variables, because configurations become part of
    records, and records must not contain paths.
    """
    from stepscope.studies.your_model.config import ARGUMENT
    from stepscope.studies.your_model.source import MODEL, find

    source = find(model, Path())
    values: dict[str, list[str]] = {}
    for argument in parameters:
        if not re.fullmatch(ARGUMENT, argument):
            raise StepscopeError(
                f"-p: got {argument!r:.80}, but expected NAME=VALUE, where the value is a number or a plain word"
            )
        values.setdefault(argument.partition("=")[0], []).append(argument)
    arguments = [" ".join(combination) for combination in itertools.product(*values.values())]
    os.environ[MODEL] = source.place
    # A module that is part of a package is imported from the folder that contains the package.
    if not source.place.startswith(str(source.path)):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(source.root), os.environ.get("PYTHONPATH", "")])
    return {"study": "your_model", "fixed": source.fields, "axes": {"arguments": arguments}}


def _requested_shape(size: str | None, edition: int | None, shape: str | None) -> dict[str, Any]:
    """Return the configuration fields for a size or a shape.

    Raises:
        StepscopeError: If neither or both are given, or the size or shape is invalid.
    """
    from stepscope.config import Dimensions, resolve_size

    if (size is None) == (shape is None):
        given = "neither a size nor --shape" if shape is None else "both a size and --shape"
        raise StepscopeError(
            f"size: got {given}, but expected exactly one of them, for example the size small"
        )
    if shape is None:
        return {"size": resolve_size(str(size), edition)}
    if edition is not None:
        raise StepscopeError(
            f"--edition: got {edition}, but --edition only applies to a named size, not to --shape"
        )
    if not re.fullmatch(r"[0-9]{1,7}(/[0-9]{1,7}){3}", shape):
        raise StepscopeError(f"--shape: got {shape!r:.80}, but expected four numbers such as 768/3072/12/12")
    return dict(zip(Dimensions._fields, map(int, shape.split("/")), strict=True))


@app.command("list")
def list_runs(
    runs: RunsOption = None,
) -> None:
    """List a folder's runs with their status, and report invalid records.

    If the output is not a terminal, the columns are separated by tabs, and the first line contains their names.

    Exit status: 0 on success, 1 if a record is invalid.
    """
    from stepscope.runs.record import inconsistency_warnings, mixed_notebook_warnings
    from stepscope.runs.store import Store

    folder = _local_runs(runs, reading=True)
    if not folder.is_dir():
        raise StepscopeError(f"{folder}: no such runs folder")
    records, errors = Store(folder).records(check_files=True)
    columns = ("study", "run", "what", "status", "seconds", "notebook", "cause")
    rows = [_row(record, folder) for record in records]
    if sys.stdout.isatty():
        table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        Console(markup=False, highlight=False).print(table)
    else:
        for row in (columns, *rows):
            print(*row, sep="\t")
    for error in errors:
        console.print(f"{folder}/{error}")
    for warning in mixed_notebook_warnings(records) + inconsistency_warnings(records):
        console.print(f"{folder}: {warning}")
    raise typer.Exit(EXIT_FAILED if errors else 0)


def _row(record: "Record", folder: Path) -> tuple[str, ...]:
    from stepscope.config import configure
    from stepscope.runs.record import LOG

    cause = one_line(record.cause or "", 300)
    if (folder / record.study / record.run_id / LOG).is_file():
        cause += f" (see {record.study}/{record.run_id}/{LOG})"
    what = configure(**record.config).label.removeprefix(f"{record.study} ")
    return (
        record.study,
        record.run_id,
        what,
        record.status,
        f"{record.duration_s:.0f}",
        record.notebook_source or "",
        cause,
    )


@app.command()
def render(
    runs: RunsOption = None,
    out: OutOption = None,
    writeup: Annotated[
        bool,
        typer.Option(
            "--writeup",
            help="Render the project's writeup from a complete campaign instead. This needs a checkout.",
        ),
    ] = False,
) -> None:
    """Write a report that compares a runs folder with the reference: report.md, report.html and figures.

    With --writeup, use the templates in writeup/ to write writeup.md, writeup.html, evidence and figures. If the
    folder isn't a complete campaign, the command lists the missing parts.
    """
    folder = _local_runs(runs, reading=True)
    _render(folder, out or folder, writeup)


def _render(folder: Path, out: Path, is_writeup: bool = False) -> None:
    """Render the report of a runs folder; print which runs were omitted and which files were written."""
    console.print("Reading the runs and drawing the figures.")
    from stepscope.report import machine, output, writeup
    from stepscope.report.load import read, steady
    from stepscope.runs.store import Store
    from stepscope.views import Views

    found = read(Store(folder))
    if is_writeup:
        report = writeup.compose(found, folder, out, Views(steady(found.tables)))
    else:
        report = machine.compose(found, folder, out)
    paths = output.write(report, out)
    for error in report.errors:
        console.print(f"omitted: {error}")
    for note in report.notes:
        console.print(note)
    for path in paths:
        if path.parent == out:
            print(path)


@app.command()
def check(
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            parser=_folder,
            metavar="PATH",
            help="Folder that contains the runs.",
            show_default="runs/h200",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=_folder,
            metavar="PATH",
            help="Folder that contains the writeup.",
            show_default="the checkout",
        ),
    ] = None,
) -> None:
    """Check that the committed writeup matches its records.

    The text must be identical, and the figures must show the same data.
    """
    from stepscope.report.check import check

    project = PROJECT or Path.cwd()
    folder, place = runs or project / "runs" / "h200", out or project
    differences = check(folder, place)
    for line in differences:
        console.print(line)
    if differences:
        raise typer.Exit(EXIT_FAILED)
    console.print(f"{place}: the writeup matches the records in {folder}")


@app.command()
def fit(
    size: Annotated[
        str | None,
        typer.Argument(
            help="A named size (not needed with --shape). Without a size or --shape, show the assignment's grid."
        ),
    ] = None,
    edition: EditionOption = None,
    shape: ShapeOption = None,
    context: Annotated[
        int | None,
        typer.Option(help="Context length in tokens.", show_default="512; 128 to 1,024 for the grid"),
    ] = None,
    batch: BatchOption = 4,
    vocab: VocabOption = 10_000,
    memory: Annotated[
        float | None,
        typer.Option(
            help="GPU memory in GiB: the MiB that nvidia-smi shows, divided by 1,024 (not a data sheet's GB).",
            show_default="memory of this machine's smallest GPU; 80 without a GPU",
        ),
    ] = None,
) -> None:
    """Predict a training step's peak memory, and the largest context length, batch and model that fit."""
    if memory is not None and not 0 < memory < math.inf:
        raise StepscopeError(f"--memory: got {memory:g}, but expected a GPU's memory in GiB, such as 80")
    from stepscope.config import configure
    from stepscope.model.fit import RESERVED
    from stepscope.report.fit_table import INFERENCE, fit_table, grid_tables

    is_grid = size is None and shape is None
    fields = _requested_shape("small" if is_grid else size, edition, shape)
    config = configure(
        "benchmark",
        **fields,
        context_length=512 if context is None else context,
        batch_size=batch,
        vocab_size=vocab,
        device="cpu",
    ).step(device="cuda", mode="step")
    if memory is None:
        memory = min((gpu["gib"] for gpu in gpus_here()), default=80.0)
    if is_grid:
        parts = [*grid_tables(config, context, memory, edition or 2025), INFERENCE, RESERVED]
    else:
        parts = [fit_table(config, memory, edition or 2025), RESERVED]
    Console(markup=False, highlight=False).print(*parts, sep="\n")


@app.command()
def profile(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A capture from nsys (.sqlite, .nsys-rep, or a .csv from nsys stats) or torch.profiler (.json),"
            " or a PyTorch memory snapshot (.pickle). Files may be gzipped. Several captures are compared as ranks"
            " of the same step."
        ),
    ],
    step: Annotated[
        str | None, typer.Option(help="Name of the ranges that mark the steps, without the step number.")
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(
            help="A phase and the name of its ranges (forward=NAME), or a pattern that matches their names"
            " (forward=*(F)). Repeat the option for several phases."
        ),
    ] = None,
    device: Annotated[int | None, typer.Option(help="Index of the GPU.", show_default="the busiest")] = None,
    from_ms: Annotated[
        float | None,
        typer.Option(
            "--from",
            help="Skip operations that begin less than this many ms after the capture's first operation.",
        ),
    ] = None,
    to_ms: Annotated[
        float | None,
        typer.Option(
            "--to",
            help="Skip operations that begin more than this many ms after the capture's first operation.",
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="CSV file to which all operations or allocations are written, one per line."),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="text|json|markdown", help="Output format.")
    ] = "text",
) -> None:
    """Summarize a profiler capture: where a step's GPU time goes, why the GPU is idle, and what to optimize first.

    For captures of several ranks, show how long each rank computes, transfers data and waits, and which rank the
    others wait for. For a memory snapshot, show the peak memory, the tensors that make it up, and the lines of
    code that allocated them.

    Exit status: 0 on success, 2 if the file isn't a valid capture.
    """
    file = files[0]
    for path in files:
        if console.is_terminal and path.is_file():  # printed before the slow imports
            console.print(f"Reading {path.name} ({path.stat().st_size / 2**20:,.1f} MiB).")
    from stepscope.captures.lines import FORMATS, rendered
    from stepscope.captures.ranks import profile_ranks
    from stepscope.captures.snapshot import is_pickle, snapshot_lines
    from stepscope.captures.summary import phases_of
    from stepscope.captures.summary import profile as profiled

    if form not in FORMATS:
        raise StepscopeError(f"--format: got {form!r:.80}, but expected one of {', '.join(FORMATS)}")
    try:
        if len(files) > 1:
            if csv or from_ms is not None or to_ms is not None:
                raise StepscopeError(
                    "--csv, --from, --to: got several captures, but these options only work with a single capture"
                )
            lines = profile_ranks(files, step, phases_of(phase or []), device)
        elif is_pickle(file):
            if step or phase or from_ms is not None or to_ms is not None:
                raise StepscopeError(
                    f"{file}: --step, --phase, --from and --to don't apply to a memory snapshot"
                )
            lines = snapshot_lines(file, device=device, csv=csv)
        else:
            lines = profiled(file, step, phases_of(phase or []), device, csv, from_ms, to_ms)
    except OSError as error:  # writing the output failed; errors in the input are TraceErrors
        raise StepscopeError(f"{error.filename or csv or file}: {error.strerror or error}") from None
    print(rendered(lines, form))


@app.command()
def doctor() -> None:
    """Show this machine's hardware and software, and whether any tool needed for measuring is missing."""
    from stepscope.config import resolve_device
    from stepscope.measure.rates import kernel_launch_us

    device = resolve_device("auto")
    facts = {**machine(device), **software(), "nsys": _nsys_status()}
    if launch_us := kernel_launch_us(device):
        facts["launch"] = f"{launch_us[0]:.1f} to {launch_us[1]:.1f} us of CPU time per kernel"
    table = Table("", "", show_header=False, box=box.SIMPLE)
    for name, value in facts.items():
        table.add_row(name, str(value))
    Console(markup=False, highlight=False).print(table)
    if device == "cpu":
        console.print("PyTorch finds no CUDA GPU, so this machine's report uses tiny models on the CPU.")


def _nsys_status() -> str:
    """Describe the installed nsys. If it is missing or incomplete, say which profiler is used instead."""
    from stepscope.traces.nsys_tool import find_nsys, missing_libraries, nsys_version

    nsys = find_nsys()
    if nsys is None:
        return (
            "not found on the PATH, in the usual install folders or inside Nsight Compute, so torch.profiler is"
            " used instead. To use nsys, install NVIDIA's CUDA toolkit or the package nsight-systems-cli."
        )
    if missing := missing_libraries(nsys):
        return (
            f"version {nsys_version(nsys)}, but incomplete: its importer can't find {', '.join(missing)}."
            " It can profile but not write reports, so torch.profiler is used instead."
        )
    return f"version {nsys_version(nsys)}"


def main() -> None:
    """Run the command-line interface.

    If the input or a file causes an error, print one line instead of a traceback, and exit with status 2.
    """
    # Until a sweep handles Ctrl-C, SIGINT ends the process directly, because imports can swallow a
    # KeyboardInterrupt.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.stdout is None:  # stdout was closed before this program started; writing to this replacement fails
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except StepscopeError as error:
        _exit_with_error(str(error), error.has_lines)
    except OSError as error:
        if error.strerror is None:  # raised by a library, not by the OS
            raise
        if error.filename is None:  # writing to stdout failed; flushing stdout again at exit would fail, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader has closed the pipe
            sys.exit(EXIT_FAILED)
        _exit_with_error(f"{error.filename or 'output'!s:.200}: {error.strerror}")


def _exit_with_error(message: str, has_lines: bool = False) -> NoReturn:
    lines = message.splitlines() if has_lines else [message]
    printable = ["".join(c if c.isprintable() else " " for c in line) for line in lines]
    console.print("error: " + "\n".join(printable))
    sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
