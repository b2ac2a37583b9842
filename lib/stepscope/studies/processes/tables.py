"""The tables of the study of processes, over all of its records."""
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.step.summary import spread_of_processes, summarize
from stepscope.step.timing import WHOLE

CELL = ["size", "context_length", "mode"]
WORK = ["batch_size", "vocab_size", "precision"]


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """``samples`` of every process; ``spread``, a row a cell and phase: :func:`summary.spread_of_processes`,
    ``host_ahead_share`` (how much of the step the GPU went on for after the last launch), the range of the
    processes' median SM clocks, and what was run: batch_size, vocab_size, precision."""
    done = [record for record in records if record.study == "processes" and record.status == "ok"]
    samples = load_table(store, done, "samples")
    if samples.empty:
        return {"samples": samples, "spread": pd.DataFrame()}
    runs = runs_frame(done)
    of_run = ["run_id", "process", "device", "batch_size", "vocab_size", "precision", "beside"]
    samples = by_size(samples.merge(runs[of_run], on="run_id"))
    return {"samples": samples, "spread": spread(samples)}


def spread(samples: pd.DataFrame) -> pd.DataFrame:
    """See :func:`load`; of all processes in which a cell was timed."""
    rows = []
    for _, of_cell in samples.groupby(CELL, sort=False, observed=True):
        summary = summarize(of_cell, ["run_id", "phase"])
        timed = of_cell[of_cell["timed"]]
        for phase in (*PHASE_NAMES, WHOLE):
            of_phase, medians = timed[timed["phase"] == phase], summary[summary["phase"] == phase]
            if of_phase.empty:
                continue
            times = [rows["time_ms"].to_numpy() for _, rows in of_phase.groupby("run_id", sort=True)]
            ahead = (medians["trailing_ms"] / medians["median_ms"]).median()
            rows.append({**of_cell[[*CELL, *WORK]].iloc[0].to_dict(), "phase": phase,
                         **spread_of_processes(times),
                         "host_ahead_share": ahead, "least_clock_mhz": medians["sm_clock_mhz"].min(),
                         "most_clock_mhz": medians["sm_clock_mhz"].max()})
    return by_size(pd.DataFrame(rows))
