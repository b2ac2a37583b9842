"""The GPU's clock, what lowers it, energy and power, by NVML.

Nothing runs next to timed steps: we read between them, outside the timed intervals. The energy counter is
updated about ten times a second. If the steps are too short for it, we run the same step for a while longer,
and a thread reads meanwhile.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from timeit import default_timer
from typing import Any, NamedTuple, Self

import numpy as np
import pynvml
import torch

from stepscope.measure.timing import nothing, run_for

POLL_S = 0.02
# Of steps that last so long together, what is read between them tells the energy: the counter's first and
# last changes are known to a tenth of a second.
COUNTED_S = KEPT_UP_S = 2.0


# Why the clock is lower than it could be, by NVML's bits. Idle is left out: steps are over when they are read.
CLOCK_REASONS = {
    "power cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "power brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "hardware slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "application clocks": pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
    "display clocks": pynvml.nvmlClocksEventReasonDisplayClockSetting,
    "sync boost": pynvml.nvmlClocksEventReasonSyncBoost,
}


class Reading(NamedTuple):
    """The device at one moment; nan where the driver says nothing."""

    at_s: float
    sm_clock_mhz: float
    energy_j: float  # since the driver was loaded
    clock_reasons: float = float("nan")  # bits of CLOCK_REASONS


@functools.cache
def nvml_device():
    """NVML's handle of torch's first device, found by its UUID since CUDA_VISIBLE_DEVICES may renumber."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")


def _asked(ask: Callable[[], float]) -> float:
    """What NVML says; nan where it says nothing, and in a process that uses no GPU even beside one."""
    if torch.cuda.is_initialized():
        with suppress(pynvml.NVMLError):
            return float(ask())
    return float("nan")


def sm_clock_mhz() -> float:
    """The GPU's SM clock now; nan where NVML does not say, or this process uses no GPU."""
    return _asked(lambda: pynvml.nvmlDeviceGetClockInfo(nvml_device(), pynvml.NVML_CLOCK_SM))


@functools.cache
def highest_clock_mhz() -> float:
    """The highest SM clock the GPU has; nan likewise."""
    return _asked(lambda: pynvml.nvmlDeviceGetMaxClockInfo(nvml_device(), pynvml.NVML_CLOCK_SM))


@functools.cache
def power_limit_w() -> float:
    """What the driver lets the GPU draw, in W; nan likewise."""
    return _asked(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(nvml_device()) / 1e3)


def reading() -> Reading:
    """The device now; all but the time nan in a process that uses no GPU."""
    energy_j = _asked(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(nvml_device()) / 1e3)
    reasons = _asked(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(nvml_device()))
    return Reading(default_timer(), sm_clock_mhz(), energy_j, reasons)


def power_w(readings: Sequence[Reading]) -> float:
    """Mean power from the first to the last change of the energy counter, at which it is not stale; nan where
    it did not change twice."""
    at_s, _, energy_j, _ = np.array(readings, dtype=float).reshape(-1, len(Reading._fields)).T
    changes = np.flatnonzero(np.diff(energy_j) > 0) + 1
    if len(changes) < 2:
        return float("nan")
    first, last = changes[0], changes[-1]
    return float((energy_j[last] - energy_j[first]) / (at_s[last] - at_s[first]))


class PowerMonitor:
    """A context manager around work on the GPU that is not timed: ``readings`` from a thread that sleeps in
    between, ``power_w``, ``sm_clock_mhz`` (their median) and ``clock_reasons`` afterwards. On a CPU nothing is
    known: the numbers are nan, and the reasons None.

    Args:
        read: what reads, if not NVML.
    """

    def __init__(self, read: Callable[[], Reading] | None = None):
        self.read, self.readings = read or reading, list[Reading]()

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
        self.power_w = power_w(self.readings)
        self.sm_clock_mhz = median_clock(self.readings)
        self.clock_reasons = clock_reasons(self.readings)

    @property
    def seconds(self) -> float:
        return self.readings[-1].at_s - self.readings[0].at_s


class Power:
    """Clock and energy of steps that are timed, from readings between them: :meth:`read` after each."""

    def __init__(self, device: str):
        self.on_gpu, self.readings = device == "cuda", list[Reading]()

    def read(self) -> None:
        if self.on_gpu:
            self.readings.append(reading())

    def per_step(self, steps: int) -> dict[str, Any]:
        """Return ``sm_clock_mhz``, ``clock_reasons``, ``power_w`` and ``energy_per_step_j`` of the last steps.

        Power and energy are NaN if the steps were too short for the energy counter; :func:`sustained_power`
        measures them then. The result is empty on a CPU.
        """
        if not self.on_gpu:
            return {}
        seen = self.readings[-steps - 1 :]  # from the reading before the first of them
        seconds, watts = seen[-1].at_s - seen[0].at_s, power_w(seen)
        if seconds < COUNTED_S:
            watts = float("nan")
        return {
            "sm_clock_mhz": median_clock(self.readings[-steps:]),
            "clock_reasons": clock_reasons(self.readings[-steps:]),
            "power_w": watts,
            "energy_per_step_j": watts * seconds / (len(seen) - 1) if len(seen) > 1 else float("nan"),
        }


def sustained_power(
    step: Callable[[], object], device: str, before: Callable[[], object] = nothing
) -> dict[str, float]:
    """``power_w`` and ``energy_per_step_j`` of a short step, run again and again for :data:`KEPT_UP_S`; empty on a
    CPU."""
    if device != "cuda":
        return {}
    with PowerMonitor() as monitor:
        steps = run_for(step, device, KEPT_UP_S, before)
    return {"power_w": monitor.power_w, "energy_per_step_j": monitor.power_w * monitor.seconds / steps}


def median_clock(readings: Sequence[Reading]) -> float:
    """The median SM clock of the readings that have one, in MHz; nan where none has."""
    known = [one.sm_clock_mhz for one in readings if one.sm_clock_mhz == one.sm_clock_mhz]
    return float(np.median(known)) if known else float("nan")


def clock_reasons(readings: Sequence[Reading]) -> str | None:
    """Return the reasons for a lowered clock in any of the readings, such as "power cap; thermal"; empty if
    there was none, None if no reading reports them."""
    known = [int(reading.clock_reasons) for reading in readings if not np.isnan(reading.clock_reasons)]
    if not known:
        return None
    return "; ".join(name for name, bits in CLOCK_REASONS.items() if any(bits & each for each in known))
