"""The GPU's clock, power, energy and throttling while steps run, by NVML.

Nothing runs beside the timed steps: NVML's counters are read before and after them, and the SM clock after
each, outside the clocks. Power needs polling, from a thread that shares the interpreter with the launches; so
it is polled while the same step is kept up right afterwards, for half a second at least, in no sample.
"""
import threading
from collections.abc import Callable, Sequence
from timeit import default_timer
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
import pynvml

from stepscope.step.sm_clock import nvml_device, sm_clock_mhz
from stepscope.step.timing import WHOLE, keep_up, measure
from stepscope.step.training_step import Step

POLL_S = 0.02
KEEP_UP_S = 0.5
# The energy counter is brought up to date about ten times a second: unpolled, a window has to be this long.
LEAST_COUNTED_S = 2.0
# NVML's counters of time (ns) for which clocks were held back, by reason.
THROTTLES = {"power_cap": "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP",
             "thermal": "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
             "hardware_thermal": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
             "power_brake": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
             "sync_boost": "NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST"}


class Poll(NamedTuple):
    """The device at one moment; nan where the driver says nothing."""

    at_s: float
    sm_clock_mhz: float
    power_w: float
    energy_j: float  # since the driver was loaded


class DeviceWatch:
    """A context manager around work on the GPU; ``readings`` afterwards, a flat dict with units in its names.

    ``watched_s``; ``throttled_<reason>_us``, the growth of each of the driver's counters; ``energy_j`` by its
    energy counter; if polled, also what :func:`from_polls` says. What the driver refuses, or what a window is
    too short for, is None, and ``unread`` says why. On a CPU ``readings`` is empty.

    Args:
        device: ``cuda`` or ``cpu``.
        poll: read clock, power and energy every :data:`POLL_S` from a thread that sleeps in between.
        counters, read: the readings, if not NVML's of torch's first device.
    """

    def __init__(self, device: str, poll: bool = False,
                 counters: Callable[[], tuple[dict[str, float | None], dict[str, str]]] | None = None,
                 read: Callable[[], Poll] | None = None):
        self.on, self.poll = device == "cuda", poll
        self.counters, self.read = counters or nvml_counters, read or nvml_poll
        self.readings: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if self.on:
            self.before, self.refused = self.counters()
            self.polls = [self.read()] if self.poll else []
            self.done = threading.Event()
            self.thread = threading.Thread(target=self._polling, daemon=True) if self.poll else None
            self.started = default_timer()
            if self.thread:
                self.thread.start()
        return self

    def _polling(self) -> None:
        while not self.done.wait(POLL_S):
            self.polls.append(self.read())

    def __exit__(self, *exception) -> None:
        if not self.on:
            return
        watched_s = default_timer() - self.started
        self.done.set()
        if self.thread:
            self.thread.join()
        after, _ = self.counters()
        self.readings = {"watched_s": watched_s} | differences(self.before, after)
        unread = dict(self.refused)
        if self.poll:
            self.readings |= from_polls(self.polls)
            if self.readings["energy_j"] is None:
                unread.setdefault("energy_j", "the energy counter did not change twice")
        elif watched_s < LEAST_COUNTED_S:
            self.readings["energy_j"] = None
            unread.setdefault("energy_j", f"watched for less than {LEAST_COUNTED_S:g} s")
        self.readings["unread"] = "; ".join(f"{name}: {why}" for name, why in unread.items()) or None


def differences(before: dict[str, float | None], after: dict[str, float | None]) -> dict[str, float | None]:
    """By how much each counter has grown; None where either reading is."""
    return {name: None if was is None or (now := after.get(name)) is None else now - was
            for name, was in before.items()}


def from_polls(polls: Sequence[Poll]) -> dict[str, float | int | None]:
    """``polls``; ``sm_clock_median_mhz``, ``sm_clock_least_mhz``; ``power_w``, the mean of the polled power;
    and over ``energy_s``, from the first to the last change of the energy counter, ``energy_j`` by the
    counter and ``energy_polled_j``, the integral of the polled power (trapezoids).

    The counter is stale by up to a tenth of a second, at a change it is not. None where nothing can be said.
    """
    at_s, clock_mhz, power_w, energy_j = np.array(polls, dtype=float).reshape(-1, len(Poll._fields)).T
    found: dict[str, float | int | None] = {"polls": len(polls)}
    found |= {"sm_clock_median_mhz": _or_none(clock_mhz, np.median),
              "sm_clock_least_mhz": _or_none(clock_mhz, np.min),
              "power_w": _or_none(power_w, np.mean)}
    changes = np.flatnonzero(np.diff(energy_j) > 0) + 1
    if len(changes) < 2:
        return found | {"energy_s": None, "energy_j": None, "energy_polled_j": None}
    between = slice(changes[0], changes[-1] + 1)
    polled = np.trapezoid(power_w[between], at_s[between])
    return found | {"energy_s": float(at_s[changes[-1]] - at_s[changes[0]]),
                    "energy_j": float(energy_j[changes[-1]] - energy_j[changes[0]]),
                    "energy_polled_j": None if np.isnan(polled) else float(polled)}


def _or_none(values: np.ndarray, of: Callable) -> float | None:
    known = values[~np.isnan(values)]
    return float(of(known)) if len(known) else None


def measure_watched(step: Step) -> tuple[pd.DataFrame, dict[str, Any]]:
    """:func:`stepscope.step.timing.measure`, and the device's state meanwhile; {} on a CPU.

    ``timed_...``: over the timed steps, counters only, and ``timed_sm_clock_median_mhz`` and ``_least_mhz``
    of their samples. Then what :func:`keep_up_watched` says, beside whose time the timed steps' tells what
    polling disturbs.

    Raises:
        torch.OutOfMemoryError: names the step in which it happened.
    """
    device = step.config.device
    timed = DeviceWatch(device)
    samples = measure(step, sm_clock_mhz if timed.on else lambda: None, timed)
    if not timed.on:
        return samples, {}
    clocks = samples.loc[samples["timed"] & (samples["phase"] == WHOLE), "sm_clock_mhz"].to_numpy()
    state = {f"timed_{name}": value for name, value in timed.readings.items()}
    state |= {"timed_sm_clock_median_mhz": _or_none(clocks, np.median),
              "timed_sm_clock_least_mhz": _or_none(clocks, np.min)}
    return samples, state | keep_up_watched(step)


def keep_up_watched(step: Step) -> dict[str, Any]:
    """The device's state while the step is kept up for :data:`KEEP_UP_S`; {} on a CPU.

    ``kept_up_...``: :class:`DeviceWatch`'s readings, polled; ``kept_up_steps``, how many;
    ``kept_up_step_ms``, their time; ``step_energy_j``, their energy each, by the counter.

    Raises:
        torch.OutOfMemoryError: a step needs more memory than there is.
    """
    device = step.config.device
    if device != "cuda":
        return {}
    with DeviceWatch(device, poll=True) as kept_up:
        steps = keep_up(step, KEEP_UP_S)
    readings = kept_up.readings
    step_s = readings["watched_s"] / steps
    joules = readings["energy_j"]
    return {f"kept_up_{name}": value for name, value in readings.items()} | {
        "kept_up_steps": steps, "kept_up_step_ms": step_s * 1e3,
        "step_energy_j": None if joules is None else joules / readings["energy_s"] * step_s}


def nvml_counters() -> tuple[dict[str, float | None], dict[str, str]]:
    """NVML's counters now: ``energy_j``, ``throttled_<reason>_us``; why, of those that the driver refuses."""
    counted: dict[str, float | None] = {"energy_j": None}
    refused: dict[str, str] = {}
    try:
        counted["energy_j"] = pynvml.nvmlDeviceGetTotalEnergyConsumption(nvml_device()) / 1e3
    except pynvml.NVMLError as error:
        refused["energy_j"] = str(error)
    for reason, field in THROTTLES.items():
        try:
            counted[f"throttled_{reason}_us"] = nvml_field(field) / 1e3
        except pynvml.NVMLError as error:
            counted[f"throttled_{reason}_us"], refused[f"throttled_{reason}_us"] = None, str(error)
    return counted, refused


def nvml_field(name: str) -> float:
    """The value of one of NVML's fields.

    Raises:
        pynvml.NVMLError: the driver, or this pynvml, has no such field.
    """
    if not hasattr(pynvml, name):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    [field] = pynvml.nvmlDeviceGetFieldValues(nvml_device(), [getattr(pynvml, name)])
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(field.nvmlReturn)
    members = [member for member, _ in field.value._fields_]  # in the order of NVML's value types
    return float(getattr(field.value, members[field.valueType]))


def nvml_poll() -> Poll:
    """The device now. Power is the instantaneous field; ``nvmlDeviceGetPowerUsage`` is a second's mean."""
    def read(what: Callable[[], float]) -> float:
        try:
            return what()
        except pynvml.NVMLError:
            return float("nan")
    clock_mhz = sm_clock_mhz()
    return Poll(default_timer(), float("nan") if clock_mhz is None else clock_mhz,
                read(lambda: nvml_field("NVML_FI_DEV_POWER_INSTANT") / 1e3),
                read(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(nvml_device()) / 1e3))
