"""The benchmarking study's tables over all of its records."""
import pandas as pd

from stepscope.config import configure
from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table, runs_frame
from stepscope.step.timing import WHOLE
from stepscope.step.rates import run_times


def all_times(store: Store, records: list[Record]) -> pd.DataFrame:
    """The tidy table of a whole store: a row for each run and phase with the run's configuration and results.

    Runs that ended out of memory have one row, phase ``step``, without times.
    """
    records = [record for record in records if record.study == "benchmark" and record.done]
    if not records:
        return pd.DataFrame()
    samples, ceilings = load_table(store, records, "samples"), load_table(store, records, "ceilings")
    runs, frames = runs_frame(records), []
    for record in records:
        if record.status == "ok":
            config = configure(**record.config)
            own = ceilings[ceilings["run_id"] == record.run_id]
            frames.append(run_times(samples[samples["run_id"] == record.run_id], own, config).assign(run_id=record.run_id))
        else:
            frames.append(pd.DataFrame([{"run_id": record.run_id, "phase": WHOLE}]))
    return runs.merge(pd.concat(frames, ignore_index=True), on="run_id", validate="one_to_many")
