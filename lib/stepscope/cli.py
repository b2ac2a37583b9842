"""The command line: a thin layer over the functions a notebook would call."""
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, help="""
Measure where a Transformer's training step spends its time and memory, and render what was measured.

[bold]sweep[/] runs what a sweep file asks for, one notebook execution per run, into a runs folder; [bold]render[/] makes
writeup and figures of a runs folder; [bold]report[/] does both for this machine. A sweep that was interrupted is
continued by giving the same command again, or by [bold]resume[/].
""")
console = Console(stderr=True)
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_LEFT = 1, 2, 75  # 75 is EX_TEMPFAIL of sysexits.h: try again later

RunsOption = Annotated[Path, typer.Option("--runs", help="Runs folder.", show_default="runs/local-<this machine's device>")]
BudgetOption = Annotated[str | None, typer.Option("--time-budget", metavar="90s|20m|1h",
                         help="Start no run that would end after this time, and say what is left.")]


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text)
    if not found:
        raise typer.BadParameter(f"--time-budget: got {text!r}, but expected a number with s, m or h, such as 20m")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _local_runs(runs: Path | None) -> Path:
    """Runs of this machine go into a folder named after its device, which git ignores."""
    if runs:
        return runs
    from stepscope.config import device_here
    from stepscope.execute import PROJECT
    from stepscope.machine import machine
    device = device_here("auto")
    name = "cpu" if device == "cpu" else re.sub(r"[^a-z0-9]+", "-", machine(device)["device_name"].lower())
    return PROJECT / "runs" / f"local-{name}"


def _sweep(paths: list[Path], runs: Path, time_budget: str | None) -> None:
    from stepscope.store import Store
    from stepscope.sweep import run_sweep
    end = run_sweep(paths, Store(runs), _seconds(time_budget), console)
    done = f"{end.counts['ok']} done, {end.counts['oom']} out of memory, {end.counts['failed']} failed"
    console.print(f"{done}; records are in {runs}")
    for name, _ in end.failed:
        console.print(f"  failed: {name} (its notebook: {runs / name / 'notebook.ipynb'})", soft_wrap=True)
    if end.left:
        console.print(f"stopped by {end.stopped_by}; {len(end.left)} left, beginning with {end.left[0].run_id}."
                      f" Go on with: stepscope resume --runs {runs}", soft_wrap=True)
        raise typer.Exit(EXIT_LEFT)
    if end.failed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def sweep(sweeps: Annotated[list[str], typer.Argument(help="Sweep files (YAML), or names of those that ship: benchmark, warmup, cpu.")],
          runs: RunsOption = None, time_budget: BudgetOption = None) -> None:
    """Run sweeps: everything asked for that has no valid record yet.

    Exit status: 0 all done (out of memory is a result), 1 some run failed, 2 bad input, 75 stopped with runs left.
    """
    from stepscope.sweep import find_sweep
    _sweep([find_sweep(name) for name in sweeps], _local_runs(runs), time_budget)


@app.command()
def resume(runs: RunsOption = None, time_budget: BudgetOption = None) -> None:
    """Go on with the sweeps that a runs folder was begun with (it keeps their files)."""
    from stepscope.sweep import SweepError
    folder = _local_runs(runs)
    paths = sorted((folder / "sweeps").glob("*.yaml"))
    if not paths:
        raise SweepError(f"{folder}: no sweep was begun here (there is no sweeps/*.yaml in it)")
    _sweep(paths, folder, time_budget)


@app.command("list")
def list_runs(runs: RunsOption = None) -> None:
    """List the runs of a folder with how they ended, and name the records that cannot be used."""
    from stepscope.store import Store
    folder = _local_runs(runs)
    records, errors = Store(folder).records()
    table = Table("study", "run", "status", "seconds", "cause", title=str(folder))
    for record in records:
        table.add_row(record.study, record.run_id, record.status, f"{record.duration_s:.1f}", (record.cause or "")[:100])
    Console().print(table)
    for error in errors:
        console.print(f"[yellow]{error}[/]", soft_wrap=True)


def main() -> None:
    """Entry point: errors that are the input's are one line and status 2, without a traceback."""
    from stepscope.config import ConfigError
    from stepscope.store import RecordError, StoreBusy
    from stepscope.sweep import SweepError
    try:
        app()
    except (ConfigError, SweepError, RecordError, StoreBusy) as error:
        console.print(f"[red]error:[/] {error}", soft_wrap=True, highlight=False)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
