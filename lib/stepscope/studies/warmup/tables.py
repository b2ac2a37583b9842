"""The warm-up study's tables over all of its records."""
import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table, runs_frame


def all_runs(store: Store, records: list[Record], table: str) -> pd.DataFrame:
    """One table (``samples``, ``costs`` or ``calls``) of every warm-up run, each row with its run's
    configuration.
    """
    records = [record for record in records if record.study == "warmup" and record.status == "ok"]
    rows = load_table(store, records, table)
    return rows.merge(runs_frame(records).drop(columns="study"), on="run_id") if len(rows) else rows
