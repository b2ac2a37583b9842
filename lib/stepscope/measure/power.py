"""Read the GPU's SM clock, energy and power, and the reasons for a lowered clock, through NVML.

Nothing runs in parallel with timed steps: we query the GPU between steps, outside the timed intervals. The energy
counter is updated about ten times a second. If the timed steps are too short for this counter, the same step is
repeated for a few seconds while a thread polls the GPU.
"""

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isnan, nan
from timeit import default_timer
from typing import Any, NamedTuple, Self

import numpy as np
import pynvml
import torch

from stepscope.measure.timing import noop, run_for
from stepscope.stats import POWER_CAP

POLL_S = 0.02
# If the steps take at least this long in total, readings between them are enough to compute power, because the
# counter's first and last updates are known to within a tenth of a second.
MIN_COUNTED_S = 2.0
SUSTAINED_S = 2.0  # if the timed steps are too short for the counter, more steps run for this long

# NVML's bits for the reasons that lower the clock. "Idle" is missing: the GPU is always idle when we read it,
# because a step has just ended.
CLOCK_REASONS = {
    POWER_CAP: pynvml.nvmlClocksEventReasonSwPowerCap,
    "power brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "hardware slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "application clocks": pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
    "display clocks": pynvml.nvmlClocksEventReasonDisplayClockSetting,
    "sync boost": pynvml.nvmlClocksEventReasonSyncBoost,
}


class Reading(NamedTuple):
    """The GPU's state at one point in time. Values that the driver doesn't report are NaN."""

    time_s: float  # according to timeit.default_timer
    sm_clock_mhz: float
    energy_j: float  # since the driver was loaded
    clock_reasons: float = nan  # bits of CLOCK_REASONS


@functools.cache
def nvml_device():
    """Return the NVML handle for this process's GPU.

    The GPU is the current device of the thread that calls this function first, so each rank reads its own GPU.
    We look it up by UUID, because CUDA_VISIBLE_DEVICES may renumber the devices.
    """
    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def _query(function: Callable[..., float], *args: int) -> float:
    """Call an NVML function for this process's GPU. The result is NaN if NVML fails or the process uses no GPU."""
    if torch.cuda.is_initialized():
        with suppress(pynvml.NVMLError):
            return float(function(nvml_device(), *args))
    return nan


def sm_clock_mhz() -> float:
    """Return the GPU's current SM clock in MHz, or NaN if NVML fails or this process uses no GPU."""
    return _query(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)


@functools.cache
def highest_clock_mhz() -> float:
    """Return the GPU's highest SM clock in MHz, or NaN if NVML fails or this process uses no GPU."""
    return _query(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)


@functools.cache
def power_limit_w() -> float:
    """Return the enforced power limit in W, or NaN if NVML fails or this process uses no GPU."""
    limit_mw = _query(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    return limit_mw / 1e3


def read_gpu() -> Reading:
    """Read the GPU's current state. If this process uses no GPU, all values except the time are NaN."""
    energy_mj = _query(pynvml.nvmlDeviceGetTotalEnergyConsumption)
    reasons = _query(pynvml.nvmlDeviceGetCurrentClocksEventReasons)
    return Reading(default_timer(), sm_clock_mhz(), energy_mj / 1e3, reasons)


def mean_power_w(readings: Sequence[Reading]) -> float:
    """Return the mean power in W between the first and the last change of the energy counter.

    A reading of the counter is up to date only if it differs from the previous reading. The result is NaN if the
    counter changed at most once.
    """
    time_s = np.array([reading.time_s for reading in readings])
    energy_j = np.array([reading.energy_j for reading in readings])
    changes = np.flatnonzero(np.diff(energy_j) > 0) + 1
    if len(changes) < 2:
        return nan
    first, last = changes[0], changes[-1]
    joules = energy_j[last] - energy_j[first]
    seconds = time_s[last] - time_s[first]
    return float(joules / seconds)


class PowerMonitor:
    """A context manager in which a thread polls the GPU every :data:`POLL_S` seconds.

    Don't use it around timed work. On exit, it sets the attributes ``readings``, ``power_w`` (the mean),
    ``sm_clock_mhz`` (the median) and ``clock_reasons``. On a CPU, the numbers are NaN, and the reasons are None.

    Args:
        read: a function that returns a reading of the GPU, or None to use NVML.
    """

    def __init__(self, read: Callable[[], Reading] | None = None):
        self.read = read or read_gpu
        self.readings: list[Reading] = []

    def __enter__(self) -> Self:
        self.done = threading.Event()
        self.readings.append(self.read())
        self.thread = threading.Thread(target=self._poll, daemon=True)
        self.thread.start()
        return self

    def _poll(self) -> None:
        while not self.done.wait(POLL_S):
            self.readings.append(self.read())

    def __exit__(self, *exception) -> None:
        self.done.set()
        self.thread.join()
        self.power_w = mean_power_w(self.readings)
        self.sm_clock_mhz = median_clock(self.readings)
        self.clock_reasons = clock_reasons(self.readings)

    @property
    def seconds(self) -> float:
        return duration_s(self.readings)


class Power:
    """Reads the GPU's clock, power and energy between timed steps. Call :meth:`read` after each step."""

    def __init__(self, device: str):
        self.is_gpu = device == "cuda"
        self.readings: list[Reading] = []

    def read(self) -> None:
        if self.is_gpu:
            self.readings.append(read_gpu())

    def per_step(self, steps: int) -> dict[str, Any]:
        """Return ``sm_clock_mhz``, ``clock_reasons``, ``power_w`` and ``energy_per_step_j`` of the timed steps.

        If these steps were too short for the energy counter, power and energy are NaN; use :func:`sustained_power`
        instead. The result is empty on a CPU.

        Args:
            steps: the number of timed steps. Readings after earlier steps, such as warm-up steps, are ignored.
        """
        if not self.is_gpu:
            return {}
        after_steps = self.readings[-steps:]
        readings = self.readings[-steps - 1 :]  # includes the reading just before these steps
        seconds = duration_s(readings)
        watts = mean_power_w(readings) if seconds >= MIN_COUNTED_S else nan
        intervals = len(readings) - 1
        return {
            "sm_clock_mhz": median_clock(after_steps),
            "clock_reasons": clock_reasons(after_steps),
            "power_w": watts,
            "energy_per_step_j": watts * seconds / intervals if intervals else nan,
        }


def sustained_power(
    step: Callable[[], object], device: str, before: Callable[[], object] = noop
) -> dict[str, float]:
    """Run a step repeatedly for :data:`SUSTAINED_S` seconds; return ``power_w`` and ``energy_per_step_j``.

    The result is empty on a CPU.

    Args:
        before: a function to call before each step.
    """
    if device != "cuda":
        return {}
    with PowerMonitor() as monitor:
        steps = run_for(step, device, SUSTAINED_S, before)
    joules = monitor.power_w * monitor.seconds
    return {"power_w": monitor.power_w, "energy_per_step_j": joules / steps}


def duration_s(readings: Sequence[Reading]) -> float:
    return readings[-1].time_s - readings[0].time_s


def median_clock(readings: Sequence[Reading]) -> float:
    """Return the median SM clock in MHz of the readings that contain a clock, or NaN if no reading does."""
    clocks = [reading.sm_clock_mhz for reading in readings]
    known = [clock for clock in clocks if not isnan(clock)]
    return float(np.median(known)) if known else nan


def clock_reasons(readings: Sequence[Reading]) -> str | None:
    """Return the clock throttling reasons that any of the readings reports, such as "power cap; thermal".

    The result is "" if no reading shows throttling, and None if no reading reports reasons.
    """
    known = [int(reading.clock_reasons) for reading in readings if not isnan(reading.clock_reasons)]
    if not known:
        return None
    seen = functools.reduce(operator.or_, known)
    return "; ".join(name for name, bits in CLOCK_REASONS.items() if bits & seen)
