"""The ladder's tables over all processes in which a shape was measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.step.rates import data_sheet
from stepscope.step.summary import CONFIDENCE, flags
from stepscope.studies.ladder.config import BESIDE, RUNGS, Config
from stepscope.studies.ladder.floor import KEPT_UP, floor_at_clock_ms, floor_ms, utilisations
from stepscope.studies.ladder.names import snippet
from stepscope.studies.ladder.rungs import BRANCHES, before, products_of

PER_RUN = ("rungs", "bursts", "ceilings")  # and samples
SHAPE = ["size", "context_length", "vocab_size"]
DRAWS = 2000
WORST = ("peak_mib", "loss_off", "gradient_off", "gradient_worst")


class Process(NamedTuple):
    """One run: its configuration, what it ran on, its folder, its tables by name."""

    config: Config
    device_name: str
    run: str
    tables: Mapping[str, pd.DataFrame]


def kind_of(rung: str) -> str:
    return "beside" if rung in BESIDE else "left_out" if rung.startswith("without_") else "rung"


def redrawn_medians(times: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Medians of :data:`DRAWS` bootstrap samples of these times.

    The median of n uniform draws has the distribution Beta((n + 1) / 2, (n + 1) / 2), and that of a bootstrap
    sample is the time at this share of the sorted times (Efron 1982, chapter 10).
    """
    ordered, n = np.sort(times), len(times)
    share = rng.beta((n + 1) / 2, (n + 1) / 2, DRAWS)
    return ordered[np.minimum((share * n).astype(int), n - 1)]


def located(values: Sequence[float], draws: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """The median over processes and its 95% interval, hierarchical as the samples are: processes are drawn,
    then steps within each that was drawn (see :func:`summary.ratio_between_processes`).

    Args:
        values: of each process.
        draws: of each process, what its value is in bootstrap samples of its steps.
    """
    if not len(values):
        return math.nan, math.nan, math.nan
    rng = np.random.default_rng(0)
    processes = len(values)
    chosen = rng.integers(processes, size=(processes, DRAWS))
    found = np.median(np.stack(draws)[chosen, rng.integers(DRAWS, size=chosen.shape)], axis=0)
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(np.median(values)), float(low), float(high)


def together(reasons: pd.Series) -> str:
    """Each reason that any of these texts has."""
    return "; ".join(sorted({one for text in reasons.dropna() for one in text.split("; ")} - {""}))


class Samples:
    """Timed steps of one shape, by rung and process."""

    def __init__(self, processes: Sequence[Process]):
        self.times = {
            (rung, process.run): own["time_ms"].to_numpy()
            for process in processes
            for rung, own in process.tables["samples"].groupby("rung")
        }
        rng = np.random.default_rng(0)
        self.draws = {key: redrawn_medians(times, rng) for key, times in self.times.items()}

    def runs(self, *rungs: str) -> list[str]:
        """The processes that have times of all these rungs."""
        return sorted(set.intersection(*({run for of, run in self.times if of == rung} for rung in rungs)))

    def median(self, rung: str, runs: Iterable[str]) -> tuple[float, float, float]:
        keys = [(rung, run) for run in runs]
        return located([np.median(self.times[key]) for key in keys], [self.draws[key] for key in keys])

    def ends(self, rung: str, runs: Iterable[str]) -> tuple[float, float]:
        """The fastest and the slowest of these processes' medians."""
        medians = [np.median(self.times[rung, run]) for run in runs]
        return float(min(medians)), float(max(medians))

    def ratio(self, above: str | None, below: str | None) -> tuple[float, float, float]:
        """One rung's time over another's, each taken within one process."""
        if above is None or below is None:
            return math.nan, math.nan, math.nan
        runs = self.runs(above, below)
        return located(
            [np.median(self.times[above, run]) / np.median(self.times[below, run]) for run in runs],
            [self.draws[above, run] / self.draws[below, run] for run in runs],
        )


def kept_up(ceilings: pd.DataFrame, sheet: Mapping) -> dict[str, float]:
    """What bf16 products keep up in this process, and as a share of the data sheet; nothing where that was
    not measured."""
    rows = ceilings[ceilings["ceiling"] == KEPT_UP]
    if rows.empty:
        return {}
    row = rows.iloc[0]
    return {
        "kept_up_tflops": row["value"],
        "kept_up_mhz": row["sm_clock_mhz"],
        "kept_up_w": row["power_w"],
        "kept_up_of_sheet": row["value"] / sheet.get("bf16", math.nan),
    }


def process_rows(process: Process) -> pd.DataFrame:
    """A row a rung of one process: what does not come from samples of several."""
    tables, rows = process.tables, []
    sheet, ceilings = data_sheet(process.device_name), tables["ceilings"]
    times = tables["samples"].groupby("rung")["time_ms"]
    medians, samples = times.median(), {rung: own.to_numpy() for rung, own in times}
    bursts = dict([*tables["bursts"].groupby("rung")]) if len(tables["bursts"]) else {}
    kept = kept_up(ceilings, sheet)
    for row in tables["rungs"].to_dict("records"):
        name = row["rung"]
        row |= {"run": process.run, "first": process.config.process == 0}
        if row["status"] == "ok" and name in medians:
            step = process.config.step(batch_size=int(row["batch"]))
            tokens = step.batch_size * step.context_length
            turns = (
                bursts[name]
                .reindex(columns=["wall_ms", "sm_clock_mhz", "power_w", "throttled_share", "step_energy_j"])
                .median()
            )
            row |= turns.to_dict() | {
                "tokens_per_s": tokens / medians[name] * 1e3,
                "joules_per_token": turns["step_energy_j"] / tokens,
                "flags": "; ".join(flags(samples[name])),
                "throttle": together(bursts[name]["throttle"]) if "throttle" in bursts[name] else "",
            }
            row |= utilisations(step, medians[name], products_of(name), ceilings, sheet)
            row |= floor_ms(step, ceilings)
            row["floor_share"] = row["floor_ms"] / medians[name]
            row["clock_floor_ms"] = floor_at_clock_ms(step, ceilings, turns["sm_clock_mhz"])
            row["clock_floor_share"] = row["clock_floor_ms"] / medians[name]
            row |= kept
        rows.append(row)
    return pd.DataFrame(rows)


def over_processes(processes: Sequence[Process]) -> pd.DataFrame:
    """A row for each shape and rung over all processes that measured it; times of a rung climbed, where there
    are such, over those that climbed from the first.

    Columns: size, context_length, vocab_size, rung, kind (``rung``, ``beside``, ``left_out``), status
    (``ok`` where it is so in any process), reason, lines of its snippet, batch, processes, runs, in how many
    it ran ``out_of_memory``, whether some of its times are of processes that did not climb (``apart``);
    attention_kernel where a process recorded it; median_ms,
    and as ratios of times within a process ``gain`` (the rung that it is a change on over this one; nan where
    more than one change is between them; ``before`` names the former), ``times_as_fast`` (fp32's over this
    one), ``over_hugging_face`` (its over this one), ``over_finished`` (this one over the finished step),
    each with its interval (``_low``, ``_high``); ``sm_clock_mhz_before``, the clock of the rung before (of
    the finished step, where a change is left out or the batch fills the memory) in the processes that
    measured both; compile_s of first processes, and blocks_s of blocks in these; clock_range_share;
    peak_mib and disagreement with fp32, the largest; ``fastest_ms`` and ``slowest_ms``, of the
    processes' medians; wall_ms, tokens_per_s, clock, power, joules_per_token, utilisations, the floor's
    columns and ``floor_share`` (floor over time), medians.
    """
    shapes: dict[tuple, list[Process]] = {}
    for process in processes:
        config = process.config
        shapes.setdefault((config.shape, config.context_length, config.vocab_size), []).append(process)
    frames = [_of_shape(own).assign(**dict(zip(SHAPE, shape))) for shape, own in shapes.items()]
    return by_size(pd.concat(frames, ignore_index=True)) if frames else pd.DataFrame()


def _of_shape(processes: Sequence[Process]) -> pd.DataFrame:
    samples, rows = Samples(processes), []
    each = pd.concat([process_rows(process) for process in processes], ignore_index=True)
    # The batch that fills is predicted anew in each process; that of most of them stands for the shape, of
    # equally frequent ones the largest.
    filled = each[(each["rung"] == "fill") & (each["status"] == "ok")]
    for place, run in filled.loc[filled["batch"] != filled["batch"].mode().max(), "run"].items():
        samples.times.pop(("fill", run), None)
        each = each.drop(index=place)
    lacking = set(each.loc[each["status"] == "unsupported", "rung"])
    climbed = {rung for rung, _ in samples.times if rung in RUNGS and rung != "fill"}
    finished = max(climbed - {"fp8", *BRANCHES}, key=RUNGS.index, default=None)
    first = min(climbed - BRANCHES, key=RUNGS.index, default=None)
    # Whoever measured single rungs did so on another day, perhaps on another host: of the rungs climbed the
    # times are those of processes that began at the first, so that a column is one climb.
    whole = set(samples.runs(first)) if first else set()
    order = {name: place for place, name in enumerate([*RUNGS, *BESIDE])}
    for name in sorted(dict.fromkeys(each["rung"]), key=lambda name: order.get(name, len(order))):
        own = each[each["rung"] == name]
        done = own[own["status"] == "ok"]
        if name in climbed - BRANCHES and done["run"].isin(whole).any():
            done = done[done["run"].isin(whole)]
        shown, runs = (done if len(done) else own).iloc[0], {*done["run"]}
        row = {column: shown.get(column) for column in ("rung", "status", "reason", "flags")}
        row |= {"kind": kind_of(name), "lines": len(snippet(name)), "processes": len(done), "before": None}
        row |= {"out_of_memory": int((own["status"] == "oom").sum()), "apart": not runs <= whole}
        kernels = done["attention_kernel"].dropna() if "attention_kernel" in done else []
        row["attention_kernel"] = next(iter(kernels), None)
        row["runs"] = "; ".join(own["run"])
        row |= done.drop(columns=["first"]).median(numeric_only=True).to_dict()
        row |= {column: done[column].max() for column in WORST if column in done}
        row |= _compiling(each, done) | {"clock_range_share": _range_share(done)}
        row["kept_up_processes"] = int(done.get("kept_up_tflops", pd.Series(dtype=float)).notna().sum())
        if len(done):
            row["throttle"] = together(done["throttle"])
            previous = before(name, climbed) if name in climbed else None
            if previous and not _one_change(previous, name, lacking):
                previous = None
            row["before"] = previous
            for column, (above, below) in {
                "gain": (previous, name),
                "times_as_fast": ("fp32" if "fp32" in climbed else None, name),
                "over_hugging_face": ("hugging_face" if samples.runs("hugging_face") else None, name),
                "over_finished": (name, finished),
            }.items():
                row |= dict(zip((column, f"{column}_low", f"{column}_high"), samples.ratio(above, below)))
            other = finished if row["kind"] == "left_out" or name == "fill" else previous
            both = runs.intersection(samples.runs(name, other)) if other else set()
            clocks = each.loc[(each["rung"] == other) & each["run"].isin(both), "sm_clock_mhz"]
            row["sm_clock_mhz_before"] = clocks.median()
            row |= dict(zip(("median_ms", "ci_low_ms", "ci_high_ms"), samples.median(name, done["run"])))
            row |= dict(zip(("fastest_ms", "slowest_ms"), samples.ends(name, done["run"])))
        rows.append(row)
    return pd.DataFrame(rows)


def _compiling(each: pd.DataFrame, done: pd.DataFrame) -> dict[str, float]:
    """Seconds of the first compilation of a rung, and of blocks in the same process (``blocks_s``)."""
    first = done[done["first"]] if len(done) else done
    blocks = each[(each["rung"] == "blocks") & each["run"].isin(first["run"])]
    return {"compile_s": first["compile_s"].max(), "blocks_s": blocks["compile_s"].max()}


def _range_share(done: pd.DataFrame) -> float:
    """By how much the least of several processes' SM clocks is below the highest; NaN of one."""
    mhz = done["sm_clock_mhz"].dropna() if "sm_clock_mhz" in done else done
    return 1 - mhz.min() / mhz.max() if len(mhz) > 1 else math.nan


def _one_change(previous: str, own: str, lacking: set[str]) -> bool:
    """Whether between two rungs are only rungs that the device lacks, and branches."""
    between = RUNGS[RUNGS.index(previous) + 1 : RUNGS.index(own)]
    return set(between) <= lacking | BRANCHES


def load_processes(store: Store, records: list[Record], samples: pd.DataFrame) -> list[Process]:
    stacked = {name: load_table(store, records, name) for name in PER_RUN} | {"samples": samples}
    return [
        Process(
            Config(**record.config),
            record.machine.get("device_name", ""),
            f"{record.study}/{record.run_id}",
            {
                name: table[table["run_id"] == record.run_id].drop(columns=["study", "run_id"])
                for name, table in stacked.items()
            },
        )
        for record in records
    ]


def climbs(samples: pd.DataFrame, records: list[Record]) -> pd.DataFrame:
    """A row a process: its run, shape, ``beside`` (how many others were on its machine), ``ram_gib``, which
    tells hosts apart, whether it ``climbed`` from the first rung, and in how many ``turns`` its rungs were
    timed, each in at least so many ``steps`` after so many of ``warmup``."""
    if samples.empty:
        return samples
    runs = runs_frame(records)[["run_id", "beside", "ram_gib", *SHAPE]]
    first = set(samples.loc[samples["rung"] == RUNGS[0], "run_id"])
    turns = samples.groupby("run_id")["turn"].nunique()
    steps = samples.groupby(["run_id", "rung"]).size().groupby("run_id").min()
    warmup = {record.run_id: Config(**record.config).warmup_steps for record in records}
    return runs.assign(climbed=runs["run_id"].isin(first), turns=runs["run_id"].map(turns),
                       steps=runs["run_id"].map(steps), warmup=runs["run_id"].map(warmup))


def step_medians(samples: pd.DataFrame, records: list[Record]) -> pd.DataFrame:
    """A row a process and rung: ``step_ms``, the median of its timed steps; with the shape of its run."""
    if samples.empty:
        return samples
    medians = samples.groupby(["run_id", "rung"], sort=False)["time_ms"].median().rename("step_ms")
    return with_runs(medians.reset_index(), records)


def with_runs(table: pd.DataFrame, records: list[Record]) -> pd.DataFrame:
    """A stacked table with the shape of each row's run."""
    if table.empty:
        return table
    table = table.infer_objects()  # stacked on tables without rows, numbers are objects
    return table.merge(runs_frame(records)[["run_id", *SHAPE]], on="run_id")
