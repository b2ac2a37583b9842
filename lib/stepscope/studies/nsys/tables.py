"""The profiling study's tables over all of its records.

Every table of operations that has their names gets its families anew when it is loaded, so that the rules
that are printed are those that made the shares. The timeline has no names: its families are those of when it
was measured.
"""
import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.traces.families import families

TABLES = {"operations": "operations.parquet", "clocks": "clocks", "regions": "regions",
          "timeline": "timeline.parquet", "walls": "walls", "statuses": "statuses"}
OF_RUN = ["run_id", "size", "context_length", "batch_size", "d_model", "d_ff", "num_layers", "num_heads",
          "vocab_size", "precision", "timed_steps", "device", "tool"]


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
    precisions."""
    fp32 = [record for record in records if record.config["precision"] == "fp32"]
    low = [record for record in records if record.config["precision"] != "fp32"]
    return {name: all_runs(store, fp32, table) for name, table in TABLES.items()} | {
        "operations_low": all_runs(store, low, TABLES["operations"])}
