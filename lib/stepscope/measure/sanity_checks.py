"""What cannot be, and what does not repeat: cases to measure again, and after three tries to mark.

GPU time is of captured steps and wall time of plain ones, so that the one can exceed the other a little. By
more it cannot: then something disturbed the one or the other. Nothing is cut off to look right; the case is
measured again, and what stays so says ``inconsistent`` with its numbers, and is left out of documents.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from stepscope.config import TOTAL
from stepscope.measure.power import highest_clock_mhz, power_limit_w
from stepscope.stats import MAX_BUSY, MAX_BUSY_POWER_LIMITED, POWER_LIMITED_CLOCK_RATIO

TRIES = 3  # of a case, in all
REPLAYED, A_LAUNCH_MS = 1.05, 2e-3  # a graph's wall time over its kernels': gaps of up to 2 µs each
REPEATS, A_MOMENT_MS = 1.03, 0.05  # captured steps, longest over shortest; what a clock's ticks can make
INSIDE = 1.10  # a phase by itself, over the same within the step
OVER_LIMIT = 1.02  # power over the cap


def is_power_limited(row: Mapping[str, float]) -> bool:
    """Whether the power cap held the clock down.

    Args:
        row: ``sm_clock_mhz``, and ``highest_clock_mhz`` if not of this process's GPU.
    """
    highest = row.get("highest_clock_mhz", highest_clock_mhz())
    return bool(row.get("sm_clock_mhz", np.nan) < POWER_LIMITED_CLOCK_RATIO * highest)


def find_inconsistencies(row: Mapping[str, float], captured_ms: Sequence[float] = ()) -> str:
    """What cannot be, or does not repeat, of a step (or a part of it) of a GPU, in words; empty where all
    agrees.

    Args:
        row: what is known of ``wall_ms``, ``gpu_ms``, ``operations``, ``replayed_ms``, ``sm_clock_mhz`` and
            ``power_w``; nan where something is not.
        captured_ms: the GPU time of each captured step; of a stretch at the power cap, where the clock
            swings, its two halves' medians are compared.
    """
    wall, gpu, replayed, power = (
        row.get(name, np.nan) for name in ("wall_ms", "gpu_ms", "replayed_ms", "power_w")
    )
    capped, found = is_power_limited(row), []
    if gpu > wall * (MAX_BUSY_POWER_LIMITED if capped else MAX_BUSY) and gpu - wall > A_MOMENT_MS:
        found.append(f"{gpu:.4g} ms of GPU time in {wall:.4g} ms of wall time")
    if replayed > REPLAYED * gpu and replayed - gpu > A_LAUNCH_MS * row.get("operations", np.nan):
        found.append(f"replayed in {replayed:.4g} ms, of which its operations take {gpu:.4g}")
    times = half_medians(captured_ms) if capped else np.asarray(captured_ms, dtype=float)
    if len(times) and times.max() > REPEATS * times.min() and np.ptp(times) > A_MOMENT_MS:
        found.append(f"captured steps of {times.min():.4g} to {times.max():.4g} ms")
    if power > OVER_LIMIT * power_limit_w():
        found.append(f"{power:.0f} W, and the cap is {power_limit_w():.0f}")
    return "; ".join(found)


def half_medians(values: Sequence[float]) -> np.ndarray:
    """The medians of the first and the second half of some values in order; all of fewer than four."""
    given = np.asarray(values, dtype=float)
    return given if len(given) < 4 else np.array([np.median(part) for part in np.array_split(given, 2)])


def phases_that_disagree(times: pd.DataFrame) -> dict[int, str]:
    """Rows of modes as a whole, by index, whose phases' GPU times are not those of the same phases within the
    step, and what is wrong, in words: of the step's row, too, since either may have been disturbed. Forward
    alone keeps nothing for backward, so it may take less.

    Args:
        times: of one precision: ``mode``, ``phase``, ``gpu_ms``.
    """
    found: dict[int, list[str]] = {}
    gpu_ms = times.set_index(["mode", "phase"])["gpu_ms"]
    wholes = {row.mode: row.Index for row in times[times["phase"] == TOTAL].itertuples()}
    for (mode, phase), alone in gpu_ms.items():
        inside = gpu_ms.get(("step", phase), np.nan)
        if mode == "step" or phase == TOTAL or abs(alone - inside) < A_MOMENT_MS:
            continue
        if alone > INSIDE * inside or (mode != "forward" and inside > INSIDE * alone):
            words = f"{phase} {alone:.4g} ms in {mode}, {inside:.4g} in step"
            for one in (mode, "step"):
                found.setdefault(wholes[one], []).append(words)
    return {index: "; ".join(words) for index, words in found.items()}
