"""The mixed-precision study's tables over all of its records."""
from collections.abc import Iterable

import pandas as pd

from stepscope.config import configure
from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.step.flops import parameter_count
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.comparison import cells_captured, run_times, speedups
from stepscope.studies.mixed_precision.config import Config
from stepscope.traces.waits import TOLD

# Of a run, beside each row of its tables.
RUN = ["size", "context_length", "batch_size", "vocab_size", "attention", "compile", "optimizer",
       "timed_steps", "warmup_steps", "beside", "ram_gib"]
TABLES = ("cells", "health", "ceilings", "sums", "running", "steps", "norms", "reductions", "toy", "census")

OF_TIMES = ("cells", "ceilings")
PHASE = ["run_id", "precision", "mode", "phase"]


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """The study's tables over all runs, by name; ``times`` (with status and peak memory; a cell that was
    not measured has one row, phase ``step``) and ``speedups`` are computed from the samples. Of a
    configuration that several processes timed they have the quickest; ``other_times`` has the others'."""
    done = [record for record in records if record.study == "mixed_precision" and record.status == "ok"]
    # Of runs that differ in what was captured, or in a field that there is no longer, the latest; but times
    # of the quickest, since a busy host only ever adds to them.
    alike: dict[str, list[Record]] = {}
    for record in sorted(done, key=lambda record: record.started_at):
        same = configure(**record.config).model_copy(update={"captured_steps": 0})
        alike.setdefault(same.run_id, []).append(record)
    latest = [records[-1] for records in alike.values()]
    timed = [_quickest(store, records) for records in alike.values()]
    tables = {name: load_table(store, timed if name in OF_TIMES else latest, name) for name in TABLES}
    others = [record for records in alike.values() for record in records if record not in timed]
    tables |= {"times": pd.DataFrame(), "speedups": pd.DataFrame(), "other_times": pd.DataFrame()}
    if not done:
        return tables
    captured = _captured(store, alike.values())
    tables |= _compared(store, timed, tables["ceilings"], tables["cells"], captured)
    if others:
        ceilings, cells = (load_table(store, others, name) for name in OF_TIMES[::-1])
        tables["other_times"] = _compared(store, others, ceilings, cells, captured)["times"]
    runs = runs_frame(done)
    for name, table in tables.items():
        if len(table):
            # An experiment on numbers names its own device.
            known = RUN if "device" in table else [*RUN, "device"]
            tables[name] = by_size(table.merge(runs[["run_id", *known]], on="run_id"))
    return tables


def _quickest(store: Store, records: list[Record]) -> Record:
    """Of runs of one configuration the one whose median timed steps add up to least."""
    if len(records) == 1:
        return records[0]
    samples = load_table(store, records, "samples")
    steps = samples[samples["timed"]].groupby(["run_id", "precision", "mode", "phase"])["time_ms"].median()
    steps = steps.groupby("run_id").sum()
    return next(record for record in records if record.run_id == steps.idxmin())


def _captured(store: Store, alike: Iterable[list[Record]]) -> pd.DataFrame:
    """What captured steps tell of every run's cells: its own, else those of the latest run of the same work;
    run_id, precision, mode, phase, ``waits.TOLD`` and that run (``told_by``)."""
    parts = []
    for records in alike:
        captured = cells_captured(load_table(store, records, "clocks"))
        if len(captured):
            latest = captured[captured["run_id"] == captured["run_id"].iloc[-1]]
            for record in records:
                own = captured[captured["run_id"] == record.run_id]
                parts.append((told := own if len(own) else latest).assign(run_id=record.run_id,
                                                                          told_by=told["run_id"]))
    columns = [*PHASE, *TOLD, "told_by"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=PHASE)


def _compared(store: Store, done: list[Record], ceilings: pd.DataFrame, cells: pd.DataFrame,
              captured: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """``times``, with what captures tell, and ``speedups`` of every run."""
    samples, weights, times, ratios = load_table(store, done, "samples"), {}, [], []
    for record in done:
        rows, its_ceilings = (table[table["run_id"] == record.run_id] for table in (samples, ceilings))
        config = configure(**record.config)
        assert isinstance(config, Config)  # by its study
        weights[record.run_id] = parameter_count(config)
        times.append(run_times(rows, its_ceilings, config).assign(run_id=record.run_id))
        ratios.append(speedups(rows).assign(run_id=record.run_id, study="mixed_precision"))
    cells = cells.assign(parameters=cells["run_id"].map(weights))
    cells = cells.merge(pd.concat(times), on=["run_id", "precision", "mode"], how="left")
    cells = cells.merge(captured, on=PHASE, how="left")
    return {"times": cells.assign(phase=cells["phase"].fillna(WHOLE)),
            "speedups": pd.concat(ratios, ignore_index=True)}
