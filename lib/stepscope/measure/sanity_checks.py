"""Run sanity checks that find impossible or irreproducible readings.

GPU time comes from profiled steps and wall time from unprofiled steps, so GPU time can slightly exceed wall time.
A larger excess is impossible: one of the two measurements was disturbed, so the case is measured again. We never
drop a sample to make a case look right. If the readings of the last try are also impossible, the column
``inconsistent`` describes them, and reports omit the case.
"""

from collections.abc import Mapping, Sequence
from math import nan

import numpy as np
import pandas as pd

from stepscope.config import TOTAL
from stepscope.measure.power import highest_clock_mhz, power_limit_w
from stepscope.stats import MAX_BUSY, MAX_BUSY_POWER_LIMITED, POWER_LIMITED_CLOCK_RATIO

TRIES = 3  # maximum number of tries per case, including the first
MIN_DIFFERENCE_MS = 0.05  # smaller differences can come from the clocks' resolution
MAX_REPLAY_RATIO = 1.05  # maximum ratio of a replayed CUDA graph's wall time to its operations' GPU time
MAX_GAP_MS = 2e-3  # maximum time between two operations of a replayed CUDA graph
MAX_SPREAD = 1.03  # maximum ratio of the slowest to the fastest profiled step
MAX_PHASE_RATIO = 1.10  # maximum ratio of a phase's GPU time in another mode to its time in the full step
MAX_POWER_RATIO = 1.02  # maximum ratio of power draw to the power limit
MIN_STEPS_TO_HALVE = 4


def is_power_limited(row: Mapping[str, float]) -> bool:
    """Return whether the power limit lowered the SM clock. The result is False if the clock is unknown.

    Args:
        row: a mapping with ``sm_clock_mhz``. It must also have ``highest_clock_mhz`` unless it was
            measured on this process's GPU.
    """
    highest_mhz = row.get("highest_clock_mhz", highest_clock_mhz())
    clock_mhz = row.get("sm_clock_mhz", nan)
    return bool(clock_mhz < POWER_LIMITED_CLOCK_RATIO * highest_mhz)


def find_inconsistencies(row: Mapping[str, float], profiled_ms: Sequence[float] = ()) -> str:
    """Describe a GPU step's impossible or irreproducible readings; return "" if there are none.

    Args:
        row: a mapping with ``wall_ms``, ``gpu_ms``, ``operations``, ``replayed_ms``, ``sm_clock_mhz`` and
            ``power_w``. Unknown values are NaN or missing.
        profiled_ms: the GPU time of each profiled step, in order. Because the clock of a power-limited step
            fluctuates, only the medians of the first and the second half are compared for such a step.
    """
    wall_ms = row.get("wall_ms", nan)
    gpu_ms = row.get("gpu_ms", nan)
    replayed_ms = row.get("replayed_ms", nan)
    watts = row.get("power_w", nan)
    messages = []

    is_limited = is_power_limited(row)
    max_busy = MAX_BUSY_POWER_LIMITED if is_limited else MAX_BUSY
    if _exceeds(gpu_ms, wall_ms, max_busy):
        messages.append(f"{gpu_ms:.4g} ms of GPU time in {wall_ms:.4g} ms of wall time")

    gaps_ms = replayed_ms - gpu_ms
    max_gaps_ms = MAX_GAP_MS * row.get("operations", nan)
    is_replay_slow = replayed_ms > MAX_REPLAY_RATIO * gpu_ms
    if is_replay_slow and gaps_ms > max_gaps_ms:
        messages.append(f"replayed in {replayed_ms:.4g} ms, but its operations take {gpu_ms:.4g} ms")

    times_ms = np.asarray(profiled_ms, dtype=float)
    if is_limited:
        times_ms = half_medians(times_ms)
    if len(times_ms):
        fastest_ms = times_ms.min()
        slowest_ms = times_ms.max()
        if _exceeds(slowest_ms, fastest_ms, MAX_SPREAD):
            messages.append(f"profiled steps range from {fastest_ms:.4g} to {slowest_ms:.4g} ms")

    limit_w = power_limit_w()
    if watts > MAX_POWER_RATIO * limit_w:
        messages.append(f"{watts:.0f} W, but the power limit is {limit_w:.0f} W")
    return "; ".join(messages)


def _exceeds(longer_ms: float, shorter_ms: float, max_ratio: float) -> bool:
    """Return whether ``longer_ms`` exceeds ``shorter_ms`` by a factor of more than ``max_ratio``.

    The difference must also exceed :data:`MIN_DIFFERENCE_MS`. The result is False if a time is NaN.
    """
    difference_ms = longer_ms - shorter_ms
    return longer_ms > max_ratio * shorter_ms and difference_ms > MIN_DIFFERENCE_MS


def half_medians(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the median of the first half of the values and the median of the second half.

    Fewer than :data:`MIN_STEPS_TO_HALVE` values are returned unchanged.
    """
    samples = np.asarray(values, dtype=float)
    if len(samples) < MIN_STEPS_TO_HALVE:
        return samples
    halves = np.array_split(samples, 2)
    return np.array([np.median(half) for half in halves])


def phases_that_disagree(times: pd.DataFrame) -> dict[int, str]:
    """Compare each phase's GPU time in the other modes with its GPU time in the full step.

    In the mode "forward", the forward phase may take less time, because nothing is saved for the backward pass.

    Args:
        times: rows of one precision, with ``mode``, ``phase`` and ``gpu_ms``.

    Returns:
        Descriptions of the disagreements, keyed by the index of a total row. Each disagreement is listed for both
        the mode and the full step, because either of the two may have been disturbed.
    """
    messages: dict[int, str] = {}
    gpu_ms = times.set_index(["mode", "phase"])["gpu_ms"]
    totals = times[times["phase"] == TOTAL]
    total_rows = dict(zip(totals["mode"], totals.index))
    for (mode, phase), alone_ms in gpu_ms.items():
        if mode == "step" or phase == TOTAL:
            continue
        in_step_ms = gpu_ms.get(("step", phase), nan)
        difference_ms = abs(alone_ms - in_step_ms)
        if difference_ms < MIN_DIFFERENCE_MS:
            continue
        is_slower = alone_ms > MAX_PHASE_RATIO * in_step_ms
        is_faster = in_step_ms > MAX_PHASE_RATIO * alone_ms
        if is_slower or (is_faster and mode != "forward"):
            message = f"{phase} takes {alone_ms:.4g} ms in mode {mode}, but {in_step_ms:.4g} ms in mode step"
            for compared in (mode, "step"):
                index = total_rows[compared]
                earlier = messages.get(index)
                messages[index] = f"{earlier}; {message}" if earlier else message
    return messages
