"""Do runs beside others time the same? An A/A experiment, and folders of one sweep compared that ran on more
or fewer workers.

Every condition runs the same configurations on the same cluster; only how many workers are busy differs. A
run's figure is the median of its timed steps. Two conditions agree when the 95% intervals of the median over
their runs overlap: runs of one condition differ from each other by more than the steps of one run do, so the
interval has to be over runs.
"""
import itertools
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from rich.console import Console
from rich.table import Table

from stepscope import StepscopeError
from stepscope.config import device_here
from stepscope.runs.record import Record, RecordError
from stepscope.runs.store import ENDED, Store
from stepscope.runs.sweep import How, run_sweep
from stepscope.runs.tables import load_table, read_table, runs_frame
from stepscope.runs.workers import local_cluster
from stepscope.say.words import environment, tidy
from stepscope.step.summary import median_interval
from stepscope.step.timing import WHOLE
from stepscope.studies.neighbours.facts import ALONE, differing
from stepscope.studies.neighbours.tables import KEPT

# Of each device, a step that waits for launches and one that does not.
CONFIGURATIONS = {
    "cuda": [{"size": "small", "context_length": 128, "mode": "forward"},
             {"size": "small", "context_length": 512, "mode": "step"}],
    "cpu": [{"size": "nano", "context_length": 32, "vocab_size": 1000, "mode": "forward"},
            {"size": "tiny", "context_length": 128, "vocab_size": 1000, "mode": "step"}]}
STEPS = {"warmup_steps": 10, "timed_steps": 40}
WORDS = Path(__file__).parent / "words"


class NeighboursError(StepscopeError, RuntimeError):
    """The experiment was stopped before its end, or there is no place for a comparison."""


def experiment(workers: str, repeat: int, runs: Path | None, console: Console) -> pd.DataFrame:
    """Run the experiment; print and return :func:`compare`'s table.

    Args:
        repeat: runs of each configuration on each busy worker.
        runs: folder for the runs, one folder a condition, and for the table, ``neighbours/experiment.csv``,
            which a report shows whose runs folder has it; None: a temporary one.

    Raises:
        NeighboursError: a signal stopped it.
    """
    with ExitStack() as stack:
        # Between two sweeps as well, the cluster is to end with this.
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, _stop))
        client, places = local_cluster(workers)
        stack.callback(client.cluster.close)
        stack.callback(client.close)
        folder = runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        conditions = {f"{count} busy": count for count in (1, 2, 4, 8) if count <= len(places)}
        # Conditions take turns, so that what drifts meets all alike.
        for turn, (name, count) in itertools.product(range(repeat), conditions.items()):
            end = run_sweep([_sweep(folder, name, turn, count)], Store(folder / _label(name)),
                            How(cluster=(client, places), limit=count), Console(quiet=True))
            told = f"turn {turn + 1} of {repeat}"
            if end.stopped_by:
                kept = f"the runs so far are in {runs}" if runs else "no runs are kept"
                raise NeighboursError(f"stopped by {end.stopped_by} in {told}; {kept}")
            undone = f", {len(end.left)} left, {len(end.failed)} failed" if end.left or end.failed else ""
            console.print(f"{name}, {told}: {end.counts['ok']} runs{undone}", highlight=False)
        frames = [run_medians(Store(folder / _label(name))).assign(condition=name) for name in conditions]
        table = compare(pd.concat(frames, ignore_index=True))
        (folder / KEPT).mkdir(exist_ok=True)
        table.to_csv(folder / KEPT / "experiment.csv", index=False, float_format="%.7g")
    show(table, console)
    return table


def _label(condition: str) -> str:
    """A condition as the name of a folder."""
    return condition.replace(" ", "-")


def _sweep(folder: Path, condition: str, turn: int, count: int) -> Path:
    """Write the sweep file of one turn of a condition: each of so many busy workers has seeds of its own.

    Each block has a list of its own: one list in two would be written as an alias, which no sweep file
    may have.
    """
    seeds = range(turn * count, (turn + 1) * count)
    sweep = folder / f"{_label(condition)}-{turn}.yaml"
    blocks = [{"study": "benchmark", "fixed": values | STEPS, "axes": {"seed": [*seeds]}}
              for values in CONFIGURATIONS[device_here("auto")]]
    sweep.write_text(yaml.safe_dump(blocks))
    return sweep


def _stop(number, frame):
    raise KeyboardInterrupt


def compare_folders(folders: dict[str, Path], kept: Path) -> None:
    """Write what the same runs took in several folders: ``sweeps.csv`` and ``timings.csv``.

    sweeps: a row a folder (see :func:`_sweep_row`), with the ``condition`` (its name here), ``counted``
    (operations of the profiles, by phase and kernel) and ``different`` (those of them whose number is not the
    first folder's). timings: :func:`phase_times`, with the condition.

    Args:
        folders: runs folders by what they are called; all else is compared with the first.
        kept: where the two tables go.

    Raises:
        RecordError: a folder without profiles, or one that lacks some of the first one's.
        NeighboursError: the tables cannot be written.
    """
    sweeps: list[dict] = []
    timings: list[pd.DataFrame] = []
    first: pd.Series | None = None
    for condition, folder in folders.items():
        store = Store(folder)
        everything, errors = store.records()
        records = [record for record in everything if record.study == "nsys" and record.status == "ok"]
        if not records:
            why = f" that can be used ({errors[0]})" if errors else ""
            raise RecordError(f"{folder}: holds no profiles (runs of the nsys study){why}")
        if first is not None:  # a folder may hold more than the sweep that is compared
            profiled = set(first.index.get_level_values("run_id"))
            records = [record for record in records if record.run_id in profiled]
            if lacking := profiled - {record.run_id for record in records}:
                raise RecordError(f"{folder}: lacks {min(lacking)}, which {next(iter(folders.values()))} has;"
                                  " expected the same sweep's runs")
        operations = load_table(store, records, "operations.parquet")
        counts = operations.groupby(["run_id", "mode", "phase", "name"])["count"].sum()
        first = counts if first is None else first
        both = pd.concat([first, counts], axis=1).fillna(0)
        sweeps.append({"condition": condition} | _sweep_row(store, records, len(everything)) | {
            "counted": len(counts), "different": int((both.iloc[:, 0] != both.iloc[:, 1]).sum())})
        timings.append(phase_times(store, records).assign(condition=condition))
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for name, rows in (("sweeps", pd.DataFrame(sweeps)), ("timings", pd.concat(timings))):
            rows.to_csv(kept / f"{name}.csv", index=False, float_format="%.7g")
    except OSError as error:
        raise NeighboursError(f"{kept}: cannot be written to ({error.strerror})") from None


def _sweep_row(store: Store, records: list[Record], in_folder: int) -> dict:
    """``workers`` and ``wall_s`` (where one sweep made all that is in the folder, else None), ``runs``,
    ``at_once`` (the most that went on at one time), ``ram_gib`` (of the machine, to tell hosts apart),
    ``mean_run_s``."""
    known = (store.root / ENDED).exists()
    ended = read_table(store.root, ENDED) if known else pd.DataFrame(columns=["workers", "runs", "wall_s"])
    ended = ended[ended["runs"] > 0]
    one_made_all = len(ended) == 1 and ended["runs"].iloc[0] == in_folder
    begun = [record.started_at.timestamp() for record in records]
    edges = sorted([(start, 1) for start in begun]
                   + [(start + record.duration_s, -1) for start, record in zip(begun, records)])
    return {"workers": ended["workers"].iloc[0] if one_made_all else None,
            "wall_s": ended["wall_s"].iloc[0] if one_made_all else None, "runs": len(records),
            "at_once": max(itertools.accumulate(step for _, step in edges)),
            "ram_gib": records[0].machine.get("ram_gib"),
            "mean_run_s": sum(record.duration_s for record in records) / len(records)}


def phase_times(store: Store, records: list[Record]) -> pd.DataFrame:
    """A row for each phase of each profile: run_id, size, context_length, mode, phase; medians over the
    captured steps: gpu_ms (from the phase's first operation to its last), operations_ms (the sum of its
    operations), busy_share of gpu_ms; beside (how many runs went on beside its run)."""
    clocks = load_table(store, records, "clocks")
    columns = ["projected_ns", "operations_ns", "busy_share"]
    medians = clocks.groupby(["run_id", "mode", "phase"], sort=False)[columns].median().reset_index()
    medians = medians.assign(gpu_ms=medians.pop("projected_ns") / 1e6,
                             operations_ms=medians.pop("operations_ns") / 1e6)
    return runs_frame(records)[["run_id", "size", "context_length", "beside"]].merge(medians, on="run_id")


def run_medians(store: Store) -> pd.DataFrame:
    """One row a run: what it is, median_ms of its timed steps, beside (how many runs it had beside it)."""
    records, _ = store.records()
    samples = load_table(store, records, "samples")
    steps = samples[samples["timed"] & (samples["phase"] == WHOLE)]
    medians = steps.groupby("run_id")["time_ms"].median().rename("median_ms").reset_index()
    runs = runs_frame(records)[["run_id", "size", "context_length", "mode", "beside"]]
    return runs.merge(medians, on="run_id")


def compare(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each configuration and condition, against the configuration's runs alone.

    Args:
        runs: :func:`run_medians` of every condition, with a column ``condition``.

    Returns columns: size, context_length, mode, condition, runs, median_ms, ci_low_ms, ci_high_ms (over the
    runs), ratio (to alone), agrees (whether the interval meets that of the runs alone).
    """
    rows = []
    for key, part in runs.groupby(["size", "context_length", "mode"], sort=False):
        intervals = {}
        for condition, group in part.groupby("condition", sort=False):
            if not condition.startswith(ALONE):
                group = group[group["beside"] > 0]
            medians = group["median_ms"].to_numpy()
            median = np.median(medians) if len(medians) else np.nan
            intervals[condition] = (len(medians), median, *median_interval(medians))
        _, alone, alone_low, alone_high = intervals[ALONE]
        for condition, (count, median, low, high) in intervals.items():
            agrees = bool(low <= alone_high and high >= alone_low)
            rows.append({**dict(zip(("size", "context_length", "mode"), key)), "condition": condition,
                         "runs": count, "median_ms": median, "ci_low_ms": low, "ci_high_ms": high,
                         "ratio": median / alone, "agrees": agrees})
    return pd.DataFrame(rows)


def verdict(table: pd.DataFrame) -> str:
    """What the comparison says, in a sentence or two, as the report has it."""
    template = environment(WORDS).get_template("parts/verdict.md")
    return tidy(template.render(differ=differing(table)))


def show(table: pd.DataFrame, console: Console) -> None:
    printed = Table("configuration", "condition", "runs", "median, ms", "95% interval over runs",
                    "ratio to alone", "agrees", title="The same runs with more or fewer workers busy",
                    title_justify="left")
    for row in table.to_dict("records"):
        printed.add_row(f"{row['size']}, context {row['context_length']}, {row['mode']}", row["condition"],
                        str(row["runs"]), f"{row['median_ms']:.4g}",
                        f"{row['ci_low_ms']:.4g} to {row['ci_high_ms']:.4g}", f"{row['ratio']:.4f}",
                        "yes" if row["agrees"] else "no")
    console.print(printed)
    console.print(verdict(table), soft_wrap=True)
