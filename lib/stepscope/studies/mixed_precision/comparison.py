"""Every precision beside fp32: one run's samples as times and as speed-ups."""
import numpy as np
import pandas as pd

from stepscope.step.rates import with_rates
from stepscope.step.summary import ratio_interval, summarize, unlike_clocks
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.config import Config
from stepscope.traces.waits import GPU, HOST, NEITHER, who_waits

BASE = "fp32"
LOW = ("fp16", "bf16")  # the precisions that autocast casts for
SAME = 0.02             # a change in time no larger is called none, whatever its interval


def run_times(samples: pd.DataFrame, ceilings: pd.DataFrame, config: Config) -> pd.DataFrame:
    """One run's table: a row for each precision, mode and phase, with rates and clocks."""
    frames = []
    for (precision, mode), rows in samples.groupby(["precision", "mode"], sort=False):
        times = with_rates(summarize(rows, ["phase"]), config.step(precision=precision, mode=mode), ceilings)
        frames.append(times.assign(precision=precision, mode=mode))
    return pd.concat(frames, ignore_index=True)


def speedups(samples: pd.DataFrame) -> pd.DataFrame:
    """How many times as fast as fp32: the ratio of median times, by mode, phase and precision.

    Returns columns mode, phase, precision, fp32_ms, median_ms, speedup, speedup_low, speedup_high (95%
    bootstrap interval), change: ``faster``, ``slower``, or ``none`` where the interval holds 1 or the medians
    are within :data:`SAME` of each other; fp32_mhz and sm_clock_mhz (median SM clocks of the steps on either
    side, NaN on a CPU) and unlike_clocks (see ``summary.unlike_clocks``).
    """
    timed, rows = samples[samples["timed"]], []
    by = timed.groupby(["mode", "phase", "precision"], sort=False)
    groups = {key: group["time_ms"].to_numpy() for key, group in by}
    clocks_mhz = by["sm_clock_mhz"].median()
    for (mode, phase, precision), times in groups.items():
        base = groups.get((mode, phase, BASE))
        if precision != BASE and base is not None:
            ratio, (low, high) = np.median(base) / np.median(times), ratio_interval(base, times)
            same = low <= 1 <= high or abs(ratio - 1) <= SAME
            change = "none" if same else "faster" if ratio > 1 else "slower"
            both_mhz = [clocks_mhz[mode, phase, name] for name in (BASE, precision)]
            rows.append((mode, phase, precision, np.median(base), np.median(times), ratio, low, high, change,
                         *both_mhz, bool(unlike_clocks(*both_mhz))))
    return pd.DataFrame(rows, columns=["mode", "phase", "precision", "fp32_ms", "median_ms", "speedup",
                                       "speedup_low", "speedup_high", "change", "fp32_mhz", "sm_clock_mhz",
                                       "unlike_clocks"])


def with_waits(times: pd.DataFrame, captured: pd.DataFrame) -> pd.DataFrame:
    """``times`` (of :func:`run_times`, all runs) with who waits for whom, by captures of the same size,
    context, precision and mode.

    Args:
        captured: a row a captured run, mode and phase (``nsys.phases``).

    Adds what ``waits.who_waits`` does, of each phase; and ``waiting_share`` of whole passes and steps: the
    share of their phases' time in which the GPU waits for launches (NaN where no phase was decided).
    """
    keys = ["size", "context_length", "precision", "mode", "phase"]
    tells = ["operations_ms", "operations", "gap_us", "deepest"]
    rows = times.assign(plain_ms=times["median_ms"].where(times["phase"] != WHOLE))
    if len(captured):
        known = captured.drop_duplicates(keys)[[*keys, *tells]].astype({"size": str})
        rows = rows.astype({"size": str}).merge(known, on=keys, how="left").assign(size=times["size"].array)
    rows = who_waits(rows.reindex(columns=[*rows, *(name for name in tells if name not in rows)]))
    of_pass = ["run_id", "precision", "mode"]
    decided = rows["median_ms"].where(rows["waits"].isin([GPU, HOST, NEITHER]))
    sums = pd.DataFrame({"all": decided, "waiting": decided.where(rows["waits"] == GPU, decided * 0)})
    sums = sums.groupby([rows[key] for key in of_pass]).transform("sum", min_count=1)
    return rows.assign(waiting_share=(sums["waiting"] / sums["all"]).where(rows["phase"] == WHOLE))


def reading(table: pd.DataFrame) -> str:
    """What one run's speed-ups say, in a sentence of markdown."""
    parts = []
    for row in table[(table["phase"] == WHOLE) & (table["mode"] == "step")].itertuples():
        times = "not measurably different" if row.change == "none" else f"{row.speedup:.3g} times as fast"
        clocks = f" at {row.sm_clock_mhz:g} MHz beside {row.fp32_mhz:g}" if row.unlike_clocks else ""
        parts.append(f"{row.precision} {times} [{row.speedup_low:.3g}, {row.speedup_high:.3g}]{clocks}")
    if not parts:
        return "Nothing was measured beside fp32."
    return f"The full step against fp32: {'; '.join(parts)}."
