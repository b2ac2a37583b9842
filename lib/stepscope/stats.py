"""What is said of samples, and the thresholds by which reports tell a difference from none."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

# Busy (GPU time over wall time) from here on: nothing is left to wait for. What is less busy may be
# launch-bound (:func:`launch_bound`).
LAUNCH_BOUND = 0.95
# The least gain of an optimization: most of their steps run at the power cap.
LEAST_GAIN = 0.03
# Where the host sets the pace wall times do not repeat, not even the fastest of a hundred steps of one
# process on a machine alone: a smaller difference is none.
LEAST_HOST_GAIN = 0.20
# Wall times of warm steps of one process spread by less: what differs by more is still warming up, or waits.
STEADY = 0.01
# GPU time is of other steps than wall time, and of another clock, so busy can be a little over 1. More than
# this cannot be: that case was disturbed, and is left out.
MOST_BUSY = 1.02
MOST_BUSY_AT_CAP = 1.03
# Below this share of its highest SM clock a GPU is held down by its power cap.
AT_CAP = 0.97
# The share of values that are inf, NaN or wrongly 0 from which on a precision loses them.
LOST = 1e-3


def location(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return ``median``, ``mean``, quartiles (``q1``, ``q3``), the least (``min``), and the sample standard
    deviation (``std``; nan of a single value)."""
    samples = np.asarray(values, dtype=float)
    if not len(samples):
        return dict.fromkeys(("median", "mean", "std", "q1", "q3", "min"), np.nan)
    q1, median, q3 = np.percentile(samples, [25, 50, 75])
    return {
        "median": float(median),
        "mean": float(samples.mean()),
        "std": float(samples.std(ddof=1)) if len(samples) > 1 else np.nan,
        "q1": float(q1),
        "q3": float(q3),
        "min": float(samples.min()),
    }


def launch_bound(busy: float, enqueue_ms: float = np.nan, gpu_ms: float = np.nan) -> bool:
    """Whether a phase or step waits for launches: who waits for whom. Not where it is not known.

    The host takes longer to enqueue it than the GPU to do it, so that the GPU waits for more of the time than
    the host does, and it waits for more than a twentieth of it. Either alone can be otherwise: small kernels
    leave gaps of 2 µs between them while the host is far ahead; and where the host is so far ahead that the
    queue (1,024 launches) is full, it enqueues to the end. Without an enqueue time the second alone decides.
    """
    return bool(busy < LAUNCH_BOUND and not enqueue_ms <= gpu_ms)


def launch_bound_rows(rows: pd.DataFrame) -> pd.Series:
    """:func:`launch_bound` of each row, by its ``busy``, ``enqueue_ms`` and ``gpu_ms``."""
    known = rows[["busy", "enqueue_ms", "gpu_ms"]].astype(float)
    return pd.Series([launch_bound(*row) for row in known.to_numpy()], rows.index, dtype=bool)


def wall_gain(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """How many times faster one step is than another in wall time; nan where they differ by less than such
    times do.

    A launch-bound step's median does not repeat, so that where one of two is launch-bound their fastest steps
    are compared, and nothing under :data:`LEAST_HOST_GAIN` counts. Else it is the medians, whatever their
    ratio.

    Args:
        before, after: ``wall_ms``, ``wall_min_ms``, ``enqueue_ms``, ``gpu_ms`` and ``busy``.
    """
    waits = any(launch_bound(row["busy"], row["enqueue_ms"], row["gpu_ms"]) for row in (before, after))
    told = "wall_min_ms" if waits else "wall_ms"
    found = before[told] / after[told]
    return np.nan if waits and 1 / (1 + LEAST_HOST_GAIN) < found < 1 + LEAST_HOST_GAIN else float(found)


def spread_ms(rows: pd.DataFrame) -> pd.Series:
    """How far the middle of a row's wall times reaches: from quartile to quartile, which a few late steps do
    not move."""
    return rows["wall_q3_ms"] - rows["wall_q1_ms"]


def union(starts: np.ndarray, ends: np.ndarray) -> float:
    """The length of what intervals cover together, each moment counted once; in their unit."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, ends = np.asarray(starts)[order], np.asarray(ends)[order]
    reached = np.maximum.accumulate(ends)  # by each interval and all that began before it
    fresh = np.maximum(starts[1:], reached[:-1])
    return (ends[0] - starts[0] + np.maximum(ends[1:] - fresh, 0).sum()).item()
