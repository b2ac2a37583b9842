"""Every precision beside fp32: one run's samples as times and as speed-ups."""
import numpy as np
import pandas as pd

from stepscope.say.formats import faster, number
from stepscope.say.formats import precision as written
from stepscope.step.rates import with_rates
from stepscope.step.summary import ratio_interval, summarize, unlike_clocks
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.config import Config
from stepscope.traces.waits import beside_captures, captured_phases, who_waits

BASE = "fp32"
LOW = ("fp16", "bf16")  # the precisions that autocast casts for
NONE = pd.DataFrame()
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


def cells_captured(clocks: pd.DataFrame) -> pd.DataFrame:
    """What the steps captured of each cell say: run_id, precision and ``waits.captured_phases``' columns.

    ``clocks`` are of :func:`stepscope.studies.mixed_precision.measure.capture_all`, with run_id."""
    parts = [captured_phases(rows, NONE).assign(precision=precision)
             for precision, rows in (clocks.groupby("precision", sort=False) if len(clocks) else ())]
    return pd.concat(parts, ignore_index=True) if parts else NONE


def run_waits(times: pd.DataFrame, clocks: pd.DataFrame, config: Config) -> pd.DataFrame:
    """One run's phases with who waits for whom (``waits.who_waits``; on a CPU it is not decided)."""
    captured = cells_captured(clocks.assign(run_id=config.run_id))
    if captured.empty:
        return captured
    plain_ms = times["median_ms"] if config.device == "cuda" else float("nan")
    return who_waits(times.assign(plain_ms=plain_ms).merge(captured, on=["precision", "mode", "phase"]))


def with_waits(times: pd.DataFrame, captured: pd.DataFrame) -> pd.DataFrame:
    """``times`` (of :func:`run_times`, all runs) with who waits for whom, by steps captured in the same
    process, else of the same configuration (``nsys.phases``; see ``waits.beside_captures``).

    A whole pass or step has ``waited_ms`` as well, the sum of its phases' (NaN where one was not decided);
    ``waited_share`` is that of the phase's GPU time, or of the sum of the phases'.
    """
    rows = beside_captures(times.assign(plain_ms=times["median_ms"].where(times["phase"] != WHOLE)), captured)
    phases = rows[rows["phase"] != WHOLE]
    by_pass = phases.groupby(["run_id", "precision", "mode"])[["waited_ms", "plain_ms"]]
    sums = by_pass.agg(lambda values: values.sum(skipna=False))
    of_pass = sums.reindex(pd.MultiIndex.from_frame(rows[["run_id", "precision", "mode"]]))
    for column in sums:
        rows[column] = rows[column].where(rows["phase"] != WHOLE, of_pass[column].to_numpy())
    return rows.assign(waited_share=rows["waited_ms"] / rows["plain_ms"])


def reading(table: pd.DataFrame) -> str:
    """What one run's speed-ups say, in a sentence of markdown."""
    parts = []
    for row in table[(table["phase"] == WHOLE) & (table["mode"] == "step")].itertuples():
        times = "not surely different" if row.change == "none" else faster(row.speedup)
        clocks = f", at {row.sm_clock_mhz:g} MHz beside {row.fp32_mhz:g}" if row.unlike_clocks else ""
        interval = f"95%: {number(row.speedup_low)} to {number(row.speedup_high)}"
        parts.append(f"{written(row.precision)} is {times} ({interval}{clocks})")
    if not parts:
        return "Nothing was measured beside fp32."
    return f"The full step against fp32: {'; '.join(parts)}."
