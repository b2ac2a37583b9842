"""The profiling study's tables over all of its records.

Every table of operations that has their names gets its families anew when it is loaded, so that the rules
that are printed are those that made the shares. The timeline has no names: its families are those of when it
was measured.
"""
import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.traces.families import families, is_cast
from stepscope.traces.waits import captured_phases

TABLES = {"operations": "operations.parquet", "clocks": "clocks", "regions": "regions",
          "timeline": "timeline.parquet", "walls": "walls", "statuses": "statuses"}
OF_RUN = ["run_id", "size", "context_length", "batch_size", "d_model", "d_ff", "num_layers", "num_heads",
          "vocab_size", "precision", "timed_steps", "attention", "compile", "optimizer", "device", "tool"]


def all_runs(store: Store, records: list[Record], table: str) -> pd.DataFrame:
    """One table of every profile that was captured, each row with its run's size, context, layers, steps and
    so on."""
    records = [record for record in records if record.study == "nsys" and record.status == "ok"]
    rows = load_table(store, records, table)
    if rows.empty:
        return rows
    if {"name", "family"} <= set(rows):
        rows["family"] = families(rows["name"]).astype(str)
    runs = runs_frame(records)[OF_RUN].rename(columns={"timed_steps": "steps"})
    return by_size(rows.merge(runs, on="run_id"))


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """The tables of the profiles in fp32; ``operations_low`` has the operations of those in other
    precisions. Of profiles in every precision, ``phases`` has what their captures say of each phase (see
    ``waits.captured_phases``) and ``casts`` the time of each phase's casts."""
    fp32 = [record for record in records if record.config["precision"] == "fp32"]
    low = [record for record in records if record.config["precision"] != "fp32"]
    tables = {name: all_runs(store, fp32, table) for name, table in TABLES.items()}
    lows = {name: all_runs(store, low, TABLES[name]) for name in ("operations", "clocks", "timeline")}
    clocks, timeline, operations = (pd.concat([tables[name], lows[name]], ignore_index=True)
                                    for name in ("clocks", "timeline", "operations"))
    return tables | {"operations_low": lows["operations"], "phases": phases(clocks, timeline),
                     "casts": casts(operations)}


def phases(clocks: pd.DataFrame, timeline: pd.DataFrame) -> pd.DataFrame:
    """A row a run, mode and phase: what was captured of it."""
    if clocks.empty:
        return clocks
    of_run = [column for column in (*OF_RUN, "study") if column in clocks]
    runs = clocks[of_run].drop_duplicates("run_id")
    return by_size(captured_phases(clocks, timeline).merge(runs, on="run_id"))


def casts(operations: pd.DataFrame) -> pd.DataFrame:
    """A row a run, mode and phase of a low precision: casts and their ms a step, the ms of all operations."""
    rows = operations[operations["precision"].isin(["bf16", "fp16"])] if len(operations) else operations
    if rows.empty:
        return pd.DataFrame()
    keys = ["study", "run_id", "size", "context_length", "precision", "mode", "phase"]
    cast = is_cast(rows["name"])
    rows = rows.assign(operations_ms=rows["total_ns"] / rows["steps"] / 1e6)
    rows = rows.assign(casts=(rows["count"] / rows["steps"]).where(cast, 0),
                       casts_ms=rows["operations_ms"].where(cast, 0))
    sums = rows.groupby(keys, observed=True)[["casts", "casts_ms", "operations_ms"]].sum().reset_index()
    return by_size(sums.assign(size=sums["size"].astype(str)))
