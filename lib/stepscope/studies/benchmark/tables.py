"""The benchmarking study's tables over all of its records."""
import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table, runs_frame
from stepscope.step.rates import with_rates
from stepscope.step.summary import summarize
from stepscope.step.timing import WHOLE
from stepscope.studies.benchmark.config import Config

# What a run's summary has (see with_rates), so that the table has it also where no run was done.
SUMMARY = ["n", "mean_ms", "std_ms", "median_ms", "ci_low_ms", "ci_high_ms", "enqueue_ms", "trailing_ms",
           "sm_clock_mhz", "sm_clock_least_mhz", "flags", "flops", "tflops", "utilisation", "tokens_per_s"]


def all_times(store: Store, records: list[Record]) -> pd.DataFrame:
    """The tidy table of a whole store: a row for each run and phase with the run's configuration and results.

    Runs that ended out of memory have one row, phase ``step``, without times; where all did, the columns are
    the same.
    """
    records = [record for record in records if record.study == "benchmark" and record.done]
    if not records:
        return pd.DataFrame()
    samples, ceilings = load_table(store, records, "samples"), load_table(store, records, "ceilings")
    runs, frames = runs_frame(records), []
    for record in records:
        if record.status == "ok":
            config = Config(**record.config)
            rows, ceiling = (table[table["run_id"] == record.run_id] for table in (samples, ceilings))
            times = with_rates(summarize(rows, ["phase"]), config, ceiling)
            frames.append(times.assign(run_id=record.run_id))
        else:
            frames.append(pd.DataFrame([{"run_id": record.run_id, "phase": WHOLE}]))
    times = pd.concat(frames, ignore_index=True)
    times = times.reindex(columns=dict.fromkeys([*times, *SUMMARY]))
    host_gib = {record.run_id: record.machine.get("ram_gib") for record in records}  # tells hosts apart
    runs["host_gib"] = runs["run_id"].map(host_gib).astype(float)
    return runs.merge(times, on="run_id", validate="one_to_many")
