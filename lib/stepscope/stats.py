"""Compute statistics of measurements, and define the thresholds below which a difference is noise."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

# A step is not launch-bound if its GPU is busy for at least this share of the wall time.
LAUNCH_BOUND = 0.95
# Smaller gains are noise: most optimized steps are power-limited, so the clock fluctuates.
MIN_GAIN = 0.03
# Smaller gains of a launch-bound step are noise. Its wall time isn't reproducible: even the fastest of a hundred
# steps varies between processes on an otherwise idle machine.
MIN_LAUNCH_BOUND_GAIN = 0.20
# Once a process has warmed up, the wall times of its steps differ by less than this share. A step that differs by
# more is still warming up, or is launch-bound.
MAX_WARM_SPREAD = 0.01
# GPU time and wall time come from different steps, whose SM clocks differ slightly, so ``busy`` can slightly
# exceed 1. A value above these limits means that something disturbed the measurement, so reports omit the case.
MAX_BUSY = 1.02
MAX_BUSY_POWER_LIMITED = 1.03
# A GPU whose SM clock is below this share of its maximum is power-limited.
POWER_LIMITED_CLOCK_RATIO = 0.97
# The entry in ``clock_reasons`` that says that the power limit lowered the clock.
POWER_CAP = "power cap"
# A precision loses values if more than this share of them is inf, NaN or wrongly 0.
MAX_LOST_SHARE = 1e-3


def location(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return ``median``, ``mean``, ``std`` (sample standard deviation), quartiles ``q1`` and ``q3``, and ``min``.

    All statistics are in the unit of the values. If there is only one value, ``std`` is NaN. If there are no
    values, all statistics are NaN.
    """
    samples = np.asarray(values, dtype=float)
    if not len(samples):
        return dict.fromkeys(("median", "mean", "std", "q1", "q3", "min"), np.nan)
    q1, median, q3 = np.percentile(samples, [25, 50, 75])
    std = samples.std(ddof=1) if len(samples) > 1 else np.nan
    return {
        "median": float(median),
        "mean": float(samples.mean()),
        "std": float(std),
        "q1": float(q1),
        "q3": float(q3),
        "min": float(samples.min()),
    }


def launch_bound(busy: float, enqueue_ms: float = np.nan, gpu_ms: float = np.nan) -> bool:
    """Return whether a phase or step is launch-bound. The result is False if ``busy`` is NaN.

    A step is launch-bound if (1) the GPU is idle for more than 5% of the wall time and (2) the CPU takes longer to
    enqueue the step than the GPU takes to run it. Neither condition is sufficient on its own. Small kernels leave
    gaps of 2 µs even if the CPU is far ahead. Once the launch queue (1,024 launches) is full, the CPU must wait
    for the GPU, so enqueuing takes almost as long as the step.

    Args:
        busy: GPU time divided by wall time; NaN if unknown.
        enqueue_ms: the time in ms that the CPU takes to enqueue the step. If it is NaN, only the first condition
            counts.
        gpu_ms: the time in ms that the GPU takes to run the step.
    """
    is_gpu_idle = busy < LAUNCH_BOUND
    is_cpu_ahead = enqueue_ms <= gpu_ms
    return bool(is_gpu_idle and not is_cpu_ahead)


def launch_bound_rows(rows: pd.DataFrame) -> pd.Series:
    """Return a mask of the launch-bound rows, given their columns ``busy``, ``enqueue_ms`` and ``gpu_ms``."""
    inputs = rows[["busy", "enqueue_ms", "gpu_ms"]].astype(float)
    results = [launch_bound(*row) for row in inputs.to_numpy()]
    return pd.Series(results, rows.index, dtype=bool)


def either_launch_bound(before: pd.DataFrame, after: pd.DataFrame) -> pd.Series:
    return before["launch_bound"].eq(True) | after["launch_bound"].eq(True)


def wall_ratio(before: pd.DataFrame, after: pd.DataFrame) -> pd.Series:
    """Return the ratio of wall times of the steps in the same row of ``before`` and ``after``.

    If either step is launch-bound, the minimum wall times are compared, because medians of launch-bound steps
    aren't reproducible. Otherwise, the medians are compared.

    Args:
        before, after: steps with the columns ``wall_ms``, ``wall_min_ms`` and ``launch_bound``.
    """
    fastest = before["wall_min_ms"] / after["wall_min_ms"]
    return (before["wall_ms"] / after["wall_ms"]).mask(either_launch_bound(before, after), fastest)


def wall_speedup(before: pd.DataFrame, after: pd.DataFrame) -> pd.Series:
    """Return :func:`wall_ratio`, in which noise is missing.

    A difference below :data:`MIN_LAUNCH_BOUND_GAIN` is noise if either step is launch-bound.
    """
    speedup = wall_ratio(before, after)
    is_close = speedup.between(1 / (1 + MIN_LAUNCH_BOUND_GAIN), 1 + MIN_LAUNCH_BOUND_GAIN)
    return speedup.mask(either_launch_bound(before, after) & is_close)


def spread_ms(rows: pd.DataFrame) -> pd.Series:
    """Return the interquartile range in ms of each row's wall times. A few slow steps hardly affect this range."""
    return rows["wall_q3_ms"] - rows["wall_q1_ms"]


def union(starts: np.ndarray, ends: np.ndarray) -> float:
    """Return the length of the union of intervals, in the intervals' unit. Overlaps count once."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts = np.asarray(starts)[order]
    ends = np.asarray(ends)[order]
    covered_until = np.maximum.accumulate(ends)
    uncovered_starts = np.maximum(starts[1:], covered_until[:-1])
    added = np.maximum(ends[1:] - uncovered_starts, 0)
    total = ends[0] - starts[0] + added.sum()
    return total.item()
