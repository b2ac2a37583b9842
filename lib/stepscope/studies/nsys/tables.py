"""The profiling study's tables over all of its records.

Every table of operations that has their names gets its families anew when it is loaded, so that the rules
that are printed are those that made the shares. The timeline has no names: its families are those of when it
was measured.
"""
import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.step.timing import WHOLE
from stepscope.traces.families import families, is_cast
from stepscope.traces.waits import captured_phases

TABLES = {"operations": "operations.parquet", "clocks": "clocks", "regions": "regions",
          "timeline": "timeline.parquet", "walls": "walls", "statuses": "statuses"}
OF_RUN = ["run_id", "size", "context_length", "batch_size", "d_model", "d_ff", "num_layers", "num_heads",
          "vocab_size", "precision", "attention", "compile", "optimizer", "device", "tool",
          "beside"]


def all_runs(store: Store, records: list[Record], table: str) -> pd.DataFrame:
    """One table of every profile that was captured, each row with its run's size, context, layers and so on,
    and with ``steps``: how many captured steps of its run and mode are in it."""
    records = [record for record in records if record.study == "nsys" and record.status == "ok"]
    rows = load_table(store, records, table)
    if rows.empty:
        return rows
    if {"name", "family"} <= set(rows):
        rows["family"] = families(rows["name"]).astype(str)
    if table == TABLES["walls"]:
        rows = _walls(rows)
    runs = runs_frame(records)
    known = {"attention_implementation", "took_turns"} & set(runs)  # not of records of before
    rows = rows.merge(runs[[*OF_RUN, *known]], on="run_id")
    clocks = load_table(store, records, TABLES["clocks"])
    if not clocks.empty:
        steps = clocks[clocks["step"] >= 0].groupby(["run_id", "mode"])["step"].nunique().rename("steps")
        rows = rows.merge(steps, on=["run_id", "mode"], how="left", suffixes=("_own", ""))
        if "steps_own" in rows:  # of the named steps only
            rows["steps"] = rows.pop("steps_own").fillna(rows["steps"])
    return by_size(rows)


def _walls(rows: pd.DataFrame) -> pd.DataFrame:
    """Walls of before had annotated steps only, ``before`` and ``within`` the capture, and no phases: the
    first is taken for warm-up."""
    if "wall_ms" not in rows:
        return rows
    old = rows["wall_ms"].notna()
    kinds = {"within": "captured", "before": "annotated"}
    kind = rows["capture"].map(kinds).where((rows["capture"] != "before") | (rows["step"] > 0), "warm-up")
    number = rows.groupby(["run_id", "mode"]).cumcount()
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, "place", "phase", "time_ms"])))
    return rows.assign(capture=kind.where(old, rows["capture"]), phase=rows["phase"].where(~old, WHOLE),
                       place=rows["place"].where(~old, number),
                       step=rows["step"].where(~old | (kind != "annotated"), rows["step"] - 1),
                       time_ms=rows["time_ms"].where(~old, rows["wall_ms"])).drop(columns="wall_ms")


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """The tables of the profiles of the eager model in fp32.

    ``operations_low`` has the operations of those in other precisions; ``operations_fused``, in any
    precision, of those with torch's fused attention (see its ``attention_implementation``) or compiled. Of
    all profiles, ``phases`` has what their captures say of each phase (see ``waits.captured_phases``), and of
    the eager ones in a low precision ``casts`` has the time of each phase's casts.
    """
    def is_eager(record: Record) -> bool:
        return record.config["attention"] == "eager" and not record.config["compile"]

    profiles = [record for record in records if record.study == "nsys"]
    eager = [record for record in profiles if is_eager(record)]
    fused = [record for record in profiles if not is_eager(record)]
    fp32 = [record for record in eager if record.config["precision"] == "fp32"]
    low = [record for record in eager if record.config["precision"] != "fp32"]
    tables = {name: all_runs(store, fp32, table) for name, table in TABLES.items()}
    lows, fuseds = ({name: all_runs(store, of, TABLES[name]) for name in ("operations", "clocks", "timeline")}
                    for of in (low, fused))
    clocks, timelines = (pd.concat([of[name] for of in (tables, lows, fuseds)], ignore_index=True)
                         for name in ("clocks", "timeline"))
    return tables | {
        "operations_low": lows["operations"], "operations_fused": fuseds["operations"],
        "phases": phases(clocks, timelines), "casts": casts(lows["operations"])}


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
