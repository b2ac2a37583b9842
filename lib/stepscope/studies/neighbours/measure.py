"""Do runs beside others time the same? An A/A experiment, and folders of one sweep compared that ran on more or fewer workers.

Every condition runs the same configurations on the same cluster; only how many workers are busy differs. A run's figure is the median of its timed steps. Two conditions agree when the 95% intervals of
the median over their runs overlap: runs of one condition differ from each other by more than the steps of one run do, so the
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
from stepscope.runs.tables import load_table, read_table, runs_frame
from stepscope.step.summary import median_interval
from stepscope.runs.sweep import How, run_sweep
from stepscope.step.timing import WHOLE
from stepscope.runs.workers import local_cluster

# Of each device, a step that waits for the host and one that does not.
CONFIGURATIONS = {"cuda": [{"size": "small", "context_length": 128, "mode": "forward"}, {"size": "small", "context_length": 512, "mode": "step"}],
                  "cpu": [{"size": "nano", "context_length": 32, "vocab_size": 1000, "mode": "forward"},
                          {"size": "tiny", "context_length": 128, "vocab_size": 1000, "mode": "step"}]}
STEPS = {"warmup_steps": 10, "timed_steps": 40}
ALONE = "1 busy"
KEPT = "neighbours"  # in a runs folder


class NeighboursError(StepscopeError, RuntimeError):
    """The experiment was stopped before its end, or there is no place for a comparison."""


def experiment(workers: str, repeat: int, runs: Path | None, console: Console) -> pd.DataFrame:
    """Run the experiment; print and return :func:`compare`'s table.

    Args:
        repeat: runs of each configuration on each busy worker.
        runs: folder for the runs, one folder a condition, and for the table, ``neighbours/experiment.csv``, which a report shows
            whose runs folder has it; None: a temporary one.

    Raises:
        NeighboursError: a signal stopped it.
    """
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):  # between two sweeps as well, the cluster is to end with this
            stack.callback(signal.signal, number, signal.signal(number, _stop))
        client, places = local_cluster(workers)
        stack.callback(client.cluster.close)
        stack.callback(client.close)
        folder = runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        busy = [count for count in (1, 2, 4, 8) if count <= len(places)]
        conditions = {f"{count} busy": count for count in busy}
        # Conditions take turns, so that what drifts meets all alike.
        for turn, (name, count) in itertools.product(range(repeat), conditions.items()):
            label = name.replace(" ", "-").replace(",", "")
            sweep = folder / f"{label}-{turn}.yaml"
            seeds = list(range(turn * count, (turn + 1) * count))
            sweep.write_text(yaml.safe_dump([{"study": "benchmark", "fixed": values | STEPS, "axes": {"seed": seeds}}
                                             for values in CONFIGURATIONS[device_here("auto")]]))
            end = run_sweep([sweep], Store(folder / label), How(cluster=(client, places), limit=count), Console(quiet=True))
            if end.stopped_by:
                raise NeighboursError(f"stopped by {end.stopped_by} in turn {turn + 1} of {repeat}; {'the runs so far are in ' + str(runs) if runs else 'no runs are kept'}")
            console.print(f"{name}, turn {turn + 1} of {repeat}: {end.counts['ok']} runs" + (f", {len(end.left)} left, {len(end.failed)} failed"
                          if end.left or end.failed else ""), highlight=False)
        frames = [run_medians(Store(folder / name.replace(" ", "-").replace(",", ""))).assign(condition=name) for name in conditions]
        table = compare(pd.concat(frames, ignore_index=True))
        (folder / KEPT).mkdir(exist_ok=True)
        table.to_csv(folder / KEPT / "experiment.csv", index=False, float_format="%.7g")
    show(table, console)
    return table


def _stop(number, frame):
    raise KeyboardInterrupt


def compare_folders(folders: dict[str, Path], kept: Path) -> None:
    """Write what the same runs took in several folders: ``sweeps.csv`` and ``timings.csv``.

    sweeps: a row a folder: condition (its name here), workers and wall_s (where one sweep made all that is in the folder), runs,
    at_once (the most that went on at one time), ram_gib (of the machine, to tell hosts apart), mean_run_s, counted (operations of the profiles, by phase and kernel), different
    (those of them whose number is not the first folder's). timings: :func:`phase_times`, with the condition.

    Args:
        folders: runs folders by what they are called; all else is compared with the first.
        kept: where the two tables go.

    Raises:
        RecordError: a folder without profiles, or one that lacks some of the first one's. NeighboursError: the tables cannot
        be written.
    """
    sweeps, timings, first = [], [], None
    for condition, folder in folders.items():
        store = Store(folder)
        everything, errors = store.records()
        records = [record for record in everything if record.study == "nsys" and record.status == "ok"]
        if not records:
            raise RecordError(f"{folder}: holds no profiles (runs of the nsys study)" + (f" that can be used ({errors[0]})" if errors else ""))
        if first is not None:  # a folder may hold more than the sweep that is compared
            profiled = set(first.index.get_level_values("run_id"))
            records = [record for record in records if record.run_id in profiled]
            if lacking := profiled - {record.run_id for record in records}:
                raise RecordError(f"{folder}: lacks {min(lacking)}, which {next(iter(folders.values()))} has; expected the same sweep's runs")
        operations = load_table(store, records, "operations.parquet")
        counts = operations.groupby(["run_id", "mode", "phase", "name"])["count"].sum()
        first = counts if first is None else first
        both = pd.concat([first, counts], axis=1).fillna(0)
        ended = read_table(store.root, ENDED) if (store.root / ENDED).exists() else pd.DataFrame(columns=["workers", "runs", "wall_s"])
        ended = ended[ended["runs"] > 0]
        whole = ended.iloc[0] if len(ended) == 1 and ended["runs"].iloc[0] == len(everything) else None  # one sweep made it all
        edges = sorted([(r.started_at.timestamp(), 1) for r in records] + [(r.started_at.timestamp() + r.duration_s, -1) for r in records])
        sweeps.append({"condition": condition, "workers": None if whole is None else whole["workers"], "wall_s": None if whole is None else whole["wall_s"], "runs": len(records),
                       "at_once": max(itertools.accumulate(step for _, step in edges)),
                       "ram_gib": records[0].machine.get("ram_gib"), "mean_run_s": sum(record.duration_s for record in records) / len(records),
                       "counted": len(counts), "different": int((both.iloc[:, 0] != both.iloc[:, 1]).sum())})
        timings.append(phase_times(store, records).assign(condition=condition))
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for name, table in (("sweeps", pd.DataFrame(sweeps)), ("timings", pd.concat(timings, ignore_index=True))):
            table.to_csv(kept / f"{name}.csv", index=False, float_format="%.7g")
    except OSError as error:
        raise NeighboursError(f"{kept}: cannot be written to ({error.strerror})") from None


def phase_times(store: Store, records: list[Record]) -> pd.DataFrame:
    """A row for each phase of each profile: run_id, size, context_length, mode, phase; medians over the captured steps:
    gpu_ms (from the phase's first operation to its last), operations_ms (the sum of its operations), busy_share of gpu_ms;
    beside (how many runs went on beside its run)."""
    clocks = load_table(store, records, "clocks")
    medians = clocks.groupby(["run_id", "mode", "phase"], sort=False)[["projected_ns", "operations_ns", "busy_share"]].median().reset_index()
    medians = medians.assign(gpu_ms=medians.pop("projected_ns") / 1e6, operations_ms=medians.pop("operations_ns") / 1e6)
    return runs_frame(records)[["run_id", "size", "context_length", "beside"]].merge(medians, on="run_id")


def load(root: Path) -> dict[str, pd.DataFrame]:
    """What a runs folder keeps of this: the two tables of :func:`compare_folders`, and ``experiment``; empty where none were made."""
    files = {name: f"{KEPT}/{name}.csv" for name in ("sweeps", "timings", "experiment")}
    return {name: read_table(root, file) if (root / file).exists() else pd.DataFrame() for name, file in files.items()}


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

    Returns columns: size, context_length, mode, condition, runs, median_ms, ci_low_ms, ci_high_ms (over the runs), ratio
    (to alone), agrees (whether the interval meets that of the runs alone).
    """
    rows = []
    for key, own in runs.groupby(["size", "context_length", "mode"], sort=False):
        intervals = {}
        for condition, group in own.groupby("condition", sort=False):
            if not condition.startswith(ALONE):
                group = group[group["beside"] > 0]
            medians = group["median_ms"].to_numpy()
            intervals[condition] = (len(medians), np.median(medians) if len(medians) else np.nan, *median_interval(medians))
        _, alone, alone_low, alone_high = intervals[ALONE]
        for condition, (count, median, low, high) in intervals.items():
            rows.append({**dict(zip(("size", "context_length", "mode"), key)), "condition": condition, "runs": count, "median_ms": median,
                         "ci_low_ms": low, "ci_high_ms": high, "ratio": median / alone, "agrees": bool(low <= alone_high and high >= alone_low)})
    return pd.DataFrame(rows)


def verdict(table: pd.DataFrame) -> str:
    """What the comparison says, in a sentence or two."""
    differ = table[~table["agrees"]]
    if differ.empty:
        return "Every median agrees with that of the runs alone: their 95% intervals over runs overlap."
    words = "; ".join(f"{row['size']} at context {row['context_length']}, {row['mode']}, {row['condition']}: {row['ratio'] - 1:+.1%}"
                      for row in differ.to_dict("records"))
    return f"Medians that do not agree with those of the runs alone: {words}. Run such measurements with --exclusive."


def show(table: pd.DataFrame, console: Console) -> None:
    printed = Table("configuration", "condition", "runs", "median, ms", "95% interval over runs", "ratio to alone", "agrees",
                    title="The same runs with more or fewer workers busy", title_justify="left")
    for row in table.to_dict("records"):
        printed.add_row(f"{row['size']}, context {row['context_length']}, {row['mode']}", row["condition"], str(row["runs"]),
                        f"{row['median_ms']:.4g}", f"{row['ci_low_ms']:.4g} to {row['ci_high_ms']:.4g}", f"{row['ratio']:.4f}",
                        "yes" if row["agrees"] else "no")
    console.print(printed)
    console.print(verdict(table), soft_wrap=True)
