"""The tables of the study of the compiled model, of one run and over all of its records."""
import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table, runs_frame
from stepscope.say.formats import MODE_WORDS, apart
from stepscope.step.rates import run_times
from stepscope.step.timing import WHOLE
from stepscope.studies.compile.config import Config
from stepscope.traces.families import families

PART = ["attention", "variant", "mode"]  # what is timed on its own within a run
# Of a run in which nothing fits.
EMPTY_TIMES = [*PART, "phase", "median_ms", "ci_low_ms", "ci_high_ms", "first_ms"]


def variant_times(samples: pd.DataFrame, ceilings: pd.DataFrame, config: Config) -> pd.DataFrame:
    """A row for each attention, variant, mode and phase: columns of ``benchmark.run_times``, and
    ``first_ms``, the first step's time, in which torch.compile compiles."""
    frames = []
    for (attention, variant, mode), rows in samples.groupby(PART, sort=False):
        times = run_times(rows, ceilings, config.step(mode=mode, attention=attention))
        first_ms = times["phase"].map(rows[rows["step"] == 0].set_index("phase")["time_ms"])
        frames.append(times.assign(attention=attention, variant=variant, mode=mode, first_ms=first_ms))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=EMPTY_TIMES)


def at_a_glance(times: pd.DataFrame) -> pd.DataFrame:
    """One run's whole steps from :func:`variant_times`, a row for each mode, attention and variant, with
    its ``speedup``: eager's time over its own."""
    whole = times[times["phase"] == WHOLE].sort_values(["mode", "attention"], kind="stable")
    eager = whole[whole["variant"] == "eager"].set_index(["mode", "attention"])["median_ms"]
    of_eager = [eager.get(key, float("nan")) for key in zip(whole["mode"], whole["attention"])]
    table = whole[["mode", "attention", "variant", "median_ms", "ci_low_ms", "ci_high_ms"]]
    table = table.assign(speedup=of_eager / whole["median_ms"], first_ms=whole["first_ms"])
    if "sm_clock_mhz" in whole and whole["sm_clock_mhz"].notna().any():
        table["sm_clock_mhz"] = whole["sm_clock_mhz"]
    return table.round(3).reset_index(drop=True)


def fastest(times: pd.DataFrame) -> pd.DataFrame:
    """Of a run's whole steps, a row a mode and attention: its fastest ``variant``, ``median_ms``,
    ``eager_ms`` and ``speedup`` over it, and whether that is ``sure``: their intervals do not overlap."""
    whole, found = times[times["phase"] == WHOLE], []
    for mode in MODE_WORDS:
        for _, own in whole[whole["mode"] == mode].groupby("attention", sort=False):
            best, eager = own.loc[own["median_ms"].idxmin()], own[own["variant"] == "eager"]
            row = best[["mode", "attention", "variant", "median_ms"]].to_dict()
            if len(eager):
                row |= {"eager_ms": eager["median_ms"].iloc[0], "sure": apart(eager.iloc[0], best)}
            found.append(row)
    table = pd.DataFrame(found, columns=["mode", "attention", "variant", "median_ms", "eager_ms", "sure"])
    return table.assign(speedup=table["eager_ms"] / table["median_ms"], sure=table["sure"].eq(True))


def all_times(store: Store, records: list[Record]) -> pd.DataFrame:
    """The tidy table of a whole store: a row for each run, attention, variant, mode and phase, with what is
    known of them (columns of the table ``variants``), those of a run in the order in which they were run.
    What ran out of memory has one row without times, phase ``step``."""
    records = [record for record in records if record.study == "compile" and record.status == "ok"]
    if not records:
        return pd.DataFrame()
    samples, ceilings, variants = (load_table(store, records, name)
                                   for name in ("samples", "ceilings", "variants"))
    frames = []
    for record in records:
        config = Config(**record.config)
        rows, limits = (table[table["run_id"] == record.run_id] for table in (samples, ceilings))
        frames.append(variant_times(rows, limits, config).assign(run_id=record.run_id))
    times = pd.concat(frames, ignore_index=True)
    times = variants.drop(columns="study").merge(times, on=["run_id", *PART], how="left")
    times["phase"] = times["phase"].fillna(WHOLE)
    runs = runs_frame(records).drop(columns=["attention", "mode", "status", "study"])
    return times.merge(runs, on="run_id").assign(study="compile")


def all_kernels(store: Store, records: list[Record]) -> pd.DataFrame:
    """Kernels of captured forward + backward steps: a row for each run, attention, variant and kernel, with
    the run's configuration. Records of before have none."""
    records = [record for record in records if record.study == "compile" and record.status == "ok"]
    kernels = load_table(store, records, "kernels")
    if kernels.empty:
        return pd.DataFrame()
    runs = runs_frame(records).drop(columns=["attention", "mode", "status", "study"])
    return kernels.assign(family=families(kernels["name"]).astype(str)).merge(runs, on="run_id")
