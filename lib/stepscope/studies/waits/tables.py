"""The tables of the study of waiting, of one run and over all of its records."""
import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.traces.waits import captured_phases, who_waits

ARM = ["run_id", "arm", "phase"]


def arm_phases(arms: pd.DataFrame, samples: pd.DataFrame, clocks: pd.DataFrame) -> pd.DataFrame:
    """A row for each run, arm and phase: what was done, plain_ms and enqueue_ms (medians without a profiler,
    of the GPU's time and of the host's until all is enqueued), what the capture says, and who waits."""
    timed = samples[samples["timed"]].groupby(ARM, sort=False)[["time_ms", "enqueue_ms"]]
    plain = timed.median().rename(columns={"time_ms": "plain_ms"})
    captured = captured_phases(clocks.assign(mode=clocks["arm"]), pd.DataFrame()).rename(
        columns={"mode": "arm"})
    return who_waits(arms.merge(plain, on=ARM).merge(captured, on=ARM, how="left"))


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """``phases``: a row for each run, arm and phase."""
    records = [record for record in records if record.study == "waits" and record.status == "ok"]
    if not records:
        return {"phases": pd.DataFrame()}
    parts = (load_table(store, records, name) for name in ("arms", "samples", "clocks"))
    runs = runs_frame(records)[["run_id", "size", "context_length", "device"]]
    return {"phases": by_size(arm_phases(*parts).merge(runs, on="run_id"))}
