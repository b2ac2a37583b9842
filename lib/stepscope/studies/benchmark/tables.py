"""The benchmarking study's tables: what is in a run's files, and what is printed of all runs."""
import pandas as pd
import pandera.pandas as pa

from stepscope.report.schemas import OPERATIONS, TIMES, WITHIN, measured, tidy
from stepscope.report.tables import headed, table
from stepscope.step.clocks import WHOLE

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "compile", "optimizer",
          "repeat")
CELL = ("mode", "phase")
SCHEMAS = {
    "times": tidy(CELL, **TIMES),
    "samples": tidy((*CELL, "step"), **WITHIN, step=pa.Column(int, pa.Check.ge(0), coerce=True),
                    warmup=pa.Column(bool, coerce=True), wall_ms=measured(nullable=False),
                    enqueue_ms=measured(nullable=False)),
    "operations": tidy((*CELL, "name"), **OPERATIONS),
}
KEYS = {"times": (*CONFIG, *CELL), "samples": (*CONFIG, *CELL, "step"), "operations": (*CONFIG, *CELL, "name")}
WARMUPS = (0, 1, 2, 5)
HEADINGS = {"wall_ms": "wall, ms", "wall_std_ms": "std, ms", "gpu_ms": "GPU time, ms", "busy": "busy, %",
            "operations": "operations, n", "replayed_ms": "replayed, ms", "peak_gib": "peak, GiB", "mfu": "MFU, %",
            "mfu_measured": "of a large matmul, %", "tokens_per_s": "tokens/s, n", "sm_clock_mhz": "SM clock, MHz",
            "power_w": "power, W", "step_j": "energy, J", "status": "status", "reason": "reason"}


def one_run(times: pd.DataFrame) -> pd.DataFrame:
    """What a run's times are read by: a row a mode and phase, columns that say nothing left out."""
    shown = times[[*CELL, *HEADINGS]].replace("", None).dropna(axis="columns", how="all").rename(columns=HEADINGS)
    return table(shown)


def warm_up(samples: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation of ten full steps after so many warm-up steps of a cold process, and how many
    times the warm mean the mean is; by any columns of :data:`CONFIG` that are there."""
    by = [column for column in CONFIG if column in samples]
    steps = samples[(samples["mode"] == "step") & (samples["phase"] == WHOLE)].sort_values([*by, "step"])
    found = []
    for key, own in steps.groupby(by, sort=False) if by else [((), steps)]:
        wall_ms = own["wall_ms"].to_numpy()
        count = int((~own["warmup"]).sum())
        for warmups in WARMUPS:
            ten = wall_ms[warmups:warmups + count]
            if len(ten) == count > 1:
                found.append({**dict(zip(by, key)), "warmups": warmups, "mean_ms": ten.mean(),
                              "std_ms": ten.std(ddof=1), "first_ms": ten[0]})
    return pd.DataFrame(found, columns=[*by, "warmups", "mean_ms", "std_ms", "first_ms"])


def largest(operations: pd.DataFrame) -> pd.DataFrame:
    """Of a run's full step, the names that take the most GPU time."""
    of_step = operations[operations["mode"] == "step"].nlargest(10, "gpu_ms")
    return headed(of_step[["phase", "name", "family", "count", "gpu_ms"]])
