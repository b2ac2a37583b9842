"""Modes of a step in this process by both clocks: wall time plain, GPU time under torch.profiler, replayed
as a CUDA graph.

All that is timed by the host is timed first, of all modes; then all are captured, and then replayed
(:mod:`stepscope.measure.profiler` says why).
"""
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from stepscope.config import PHASES, WHOLE, StepConfig
from stepscope.gpu_lock import exclusive
from stepscope.measure.clocks import SAMPLE_COLUMNS, synchronizer, time_steps, walls_ms
from stepscope.measure.graph import replay
from stepscope.measure.guard import out_of_memory
from stepscope.measure.memory import forget_peaks, peak_memory
from stepscope.measure.power import Power, kept_up_power
from stepscope.measure.profiler import capture
from stepscope.model.training_step import Step, build_step, out_of_memory_names, release
from stepscope.stats import location
from stepscope.traces.captured import by_name, gpu_time, quickest_step

REPLAYED_S = 0.4  # a mode is replayed for so long at least
LONG_MS = 1000.0  # of steps that last longer, fewer are enough where the median needs no ten
KEYS = ["mode", "precision"]
TIME_COLUMNS = [*KEYS, "phase", "wall_ms", "wall_std_ms", "wall_q1_ms", "wall_q3_ms", "enqueue_ms", "gpu_ms",
                "operations", "busy", "replayed_ms", "replay_reason", "peak_gib", "reserved_gib",
                "sm_clock_mhz", "power_w", "step_j", "compile_s", "status", "reason"]
TEXTS = [*KEYS, "phase", "replay_reason", "status", "reason"]
OPERATION_COLUMNS = [*KEYS, "phase", "name", "family", "count", "gpu_ms"]


class StepCounts(NamedTuple):
    """How many steps of each kind. Of the first mode the warm-up is ``cold``, where given."""

    steps: int = 10
    warmups: int = 2
    cold: int | None = None
    captured: int = 3
    replays: int = 5  # at least: short ones go on for REPLAYED_S; 0: none
    power_modes: Sequence[str] = tuple(PHASES)  # kept up for their power where plain steps are too short


@dataclass
class Case:
    """One mode and precision, and what was read of it, as far as it got."""

    step: Any  # a Step; None once all is read, so that its memory may be freed
    samples: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=SAMPLE_COLUMNS))
    readings: dict[str, Any] = field(default_factory=dict)  # of the mode as a whole
    captured: int = 0  # steps in the capture
    status: str = "ok"
    reason: str = ""
    key: dict[str, str] = field(default_factory=dict)  # mode and precision

    def __post_init__(self) -> None:
        self.key = self.key or {"mode": self.step.mode, "precision": self.step.precision}

    def long(self) -> bool:
        whole = self.samples[self.samples["phase"] == WHOLE]["wall_ms"]
        return bool(whole.min() > LONG_MS)


@dataclass
class Measurement:
    """What was read on the device; :meth:`tables` does the rest without it, but before another capture of
    this process: once that begins, torch no longer has the GPU's part of this one."""

    cases: list[Case]
    captured: capture | None = None
    reason: str = ""  # why nothing was captured

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """``times`` (see :func:`step_times`), ``samples`` (each plain step) and ``operations`` (of the
        quickest captured step, each name's count and summed time)."""
        operations: dict[int, pd.DataFrame] = {}
        if self.captured is not None:
            found, self.reason = self.captured.operations, self.captured.reason
            for index, case in enumerate(self.cases):  # of a step that ran out of memory there is a part
                own = found[(found["case"] == index) & (found["number"] < case.captured)]
                if len(own):
                    operations[index] = quickest_step(own)
        rows = [row for index, case in enumerate(self.cases)
                for row in case_rows(case, operations.get(index), self.reason or "nothing was captured")]
        samples = [case.samples.assign(**case.key) for case in self.cases if len(case.samples)]
        named = [by_name(own).assign(**self.cases[index].key) for index, own in operations.items()]
        return (_times(rows), _stacked(samples, [*KEYS, *SAMPLE_COLUMNS]),
                _stacked(named, OPERATION_COLUMNS))


def step_times(cases: Mapping[Any, Mapping[str, str]], samples: Mapping[Any, pd.DataFrame],
               operations: pd.DataFrame, readings: Mapping[Any, Mapping[str, Any]],
               status: Mapping[Any, tuple[str, str]], reason: str = "") -> pd.DataFrame:
    """The table of times of what was measured step by step: a row a case and phase and one of its whole, in
    :data:`TIME_COLUMNS`; of a case that did not fit only that.

    Args:
        cases: of each its ``mode`` and ``precision``, in order.
        samples: of each what :func:`time_steps` gave.
        operations: what :class:`capture` gave.
        readings: of each what is known of the whole: peak_gib, power_w, replayed_ms, ...
        status: of the cases that failed, as :class:`out_of_memory` notes it.
        reason: why nothing was captured.
    """
    rows: list[dict[str, Any]] = []
    for name, key in cases.items():
        state, why = status.get(name, ("ok", ""))
        case = Case(None, status=state, reason=why, key=dict(key), readings=dict(readings.get(name, {})))
        case.samples = samples.get(name, case.samples)
        own = _of_case(operations, name)
        rows += case_rows(case, quickest_step(own) if len(own) else None, reason or "nothing was captured")
    return _times(rows)


def operations_by_name(cases: Mapping[Any, Mapping[str, str]], operations: pd.DataFrame) -> pd.DataFrame:
    """Of each case's quickest captured step each phase's and name's count and summed time, in
    :data:`OPERATION_COLUMNS`."""
    of_cases = {name: _of_case(operations, name) for name in cases}
    return _stacked([by_name(quickest_step(own)).assign(**cases[name])
                     for name, own in of_cases.items() if len(own)], OPERATION_COLUMNS)


def _of_case(operations: pd.DataFrame, name: Hashable) -> pd.DataFrame:
    return operations[[one == name for one in operations["case"]]]  # a name may be a tuple


def _times(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows of times as a table; what a row lacks is nan, or "" where it is a text."""
    unread = {name: "" if name in TEXTS else np.nan for name in TIME_COLUMNS}
    times = pd.DataFrame([unread | dict(row) for row in rows], columns=TIME_COLUMNS)
    return times.astype({name: str if name in TEXTS else float for name in TIME_COLUMNS})


def without_readings(modes: Sequence[str], precision: str, status: str, reason: str) -> Measurement:
    """What is known where nothing could be read: every mode's outcome."""
    keys = ({"mode": mode, "precision": precision} for mode in modes)
    return Measurement([Case(None, status=status, reason=reason, key=key) for key in keys], reason=reason)


def _stacked(frames: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def measure_steps(steps: Sequence[Step], counts: StepCounts = StepCounts()) -> Measurement:  # noqa: B008
    """Measure steps of one model: all plain, then all captured, then replayed. To be called in an exclusive
    section.

    What runs out of memory is noted, and the others go on. What is returned holds no step."""
    cases = [Case(step) for step in steps]
    for case in cases:
        warmups = min(counts.warmups, 1) if any(one.long() for one in cases) else counts.warmups
        if case is cases[0] and counts.cold is not None:
            warmups = counts.cold
        unless_out_of_memory(case, partial(time_plain, case, counts.steps, warmups, counts.power_modes))
    measurement = capture_cases(cases, counts.captured)
    for case in optimizer_last(cases):
        if counts.replays and case.step.mode != "forward_backward" and case.status == "ok":
            time_replays(case, min(counts.replays, 3) if case.long() else counts.replays)
    for case in cases:
        case.step = None
    return measurement


def optimizer_last(cases: Sequence[Case]) -> list[Case]:
    """Cases without an optimizer first, so that they may have its memory."""
    return sorted(cases, key=lambda case: case.step.mode == "step")


def unless_out_of_memory(case: Case, part: Callable[[], None]) -> None:
    """A part of one case; if memory runs out the case has the reason, and all of its memory is given back."""
    ended: dict[Hashable, tuple[str, str]] = {}
    with out_of_memory(ended, "case"):
        part()
    case.step.clear_gradients()
    if ended:
        case.status, case.reason = ended["case"]
        if case.step.optimizer is not None:
            case.step.optimizer.state.clear()
    release(case.step.device, after_error=bool(ended))


def time_plain(case: Case, steps: int, warmups: int, power_modes: Sequence[str] = ()) -> None:
    """The plain steps, their peaks of memory, the SM clock after each, and the energy a step takes."""
    step = case.step
    if step.mode != "step" and step.optimizer is not None:
        step.optimizer.state.clear()  # the moments are no part of this mode's memory
    forget_peaks(step.device)
    power = Power(step.device)
    case.samples = time_steps(step, steps, warmups, step.device, before=step.clear_gradients,
                              after=power.read)
    case.readings = peak_memory(step.device) | power.per_step(steps)
    if np.isnan(case.readings.get("power_w", 0)) and step.mode in power_modes:
        case.readings |= kept_up_power(step, step.device, step.clear_gradients)


def time_replays(case: Case, replays: int) -> None:
    """The case as a CUDA graph, or why not. AdamW's moments are made anew where they are needed."""
    step = case.step
    if step.optimizer is not None:
        step.optimizer.state.clear()
    times_ms, reason = replay(
        step, step.device, optimizer=step.optimizer if step.mode == "step" else None, scaler=step.scaler,
        clear=step.clear_gradients, replays=replays, at_least_s=REPLAYED_S)
    case.readings |= {"replay_reason": reason} if reason else {"replayed_ms": float(np.median(times_ms))}


def capture_cases(cases: list[Case], count: int) -> Measurement:
    """Some steps of every case in one capture."""
    with capture(cases[0].step.device) as captured:
        for case in optimizer_last(cases):
            if case.status == "ok":
                steps = min(count, 2) if case.long() else count
                unless_out_of_memory(case, partial(capture_steps, captured, case, cases.index(case), steps))
                if case.status == "oom":  # it has been timed, and stays so
                    case.status, case.reason = "ok", f"not captured: {case.reason}"
    return Measurement(cases, captured)


def capture_steps(captured: capture, case: Case, index: int, count: int) -> None:
    step, synchronize = case.step, synchronizer(case.step.device)
    if step.mode == "step" and not step.optimizer.state:
        step.clear_gradients()
        step()  # makes the moments, which other steps find there
    for number in range(count):
        with out_of_memory_names("capturing"):
            step.clear_gradients()
            synchronize()
            step(captured.phases(index, number))
            synchronize()
        case.captured += 1


def case_rows(case: Case, operations: pd.DataFrame | None, reason: str) -> list[dict[str, Any]]:
    """A case's rows of ``times``: one of each phase and one of the whole; of one that did not fit only that.

    Args:
        operations: of its quickest captured step; None where nothing was captured, and ``reason`` says why.
    """
    outcome = case.key | {"status": case.status, "reason": case.reason}
    if case.status != "ok":
        return [outcome | {"phase": WHOLE}]
    if operations is None:
        outcome["reason"] = case.reason or reason
    plain = case.samples[~case.samples["warmup"].astype(bool)]
    rows = []
    for phase in [*PHASES[case.key["mode"]], WHOLE]:
        own = plain[plain["phase"] == phase]
        wall = {f"wall{'' if name == 'median' else f'_{name}'}_ms": value
                for name, value in location(own["wall_ms"]).items()}
        gpu = dict.fromkeys(("gpu_ms", "operations"), np.nan)
        if operations is not None:
            gpu = gpu_time(operations if phase == WHOLE else operations[operations["phase"] == phase])
        rows.append(outcome | {"phase": phase, **wall, "enqueue_ms": own["enqueue_ms"].median(), **gpu,
                               "busy": gpu["gpu_ms"] / wall["wall_ms"]})
    rows[-1] |= case.readings
    return rows


def launch_rate(device: str) -> tuple[float, float] | None:
    """Microseconds that this host takes for a launch, the least and the most of ten steps whose GPU work is
    tiny: the size small, batch 1, context 16. None on a CPU, which launches nothing."""
    if device != "cuda":
        return None
    shape: dict[str, Any] = {"size": "small", "batch_size": 1, "context_length": 16}
    config = StepConfig(device="cuda", **shape)
    with exclusive():
        measurement = measure_steps([build_step(config)], StepCounts(replays=0))
    times, samples, _ = measurement.tables()
    launches = times.loc[times["phase"] == WHOLE, "operations"].iloc[0]
    walls = walls_ms(samples)
    return walls.min() / launches * 1e3, walls.max() / launches * 1e3
