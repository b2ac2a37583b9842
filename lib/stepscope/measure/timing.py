"""Measure the wall time, the time of each phase and the enqueue time of training steps.

* Wall time is the host's time (``timeit.default_timer``) from the start of a step until the device has finished
  the step. The device must be idle at the start, too: a GPU works asynchronously, so the host would otherwise also
  time earlier work.
* The time of a phase is measured with CUDA events, which are recorded at the start of the step and at the end of
  each phase. The events are read only after the step, so that no phase waits for another. A CPU works
  synchronously, so the host times the phases.
* Enqueue time is the time that the host takes to launch a phase's work.
"""

from collections.abc import Callable, Sequence
from itertools import count, pairwise
from timeit import default_timer
from typing import Any, Self

import pandas as pd
import torch

from stepscope.config import TOTAL
from stepscope.model.training_step import out_of_memory_names

# Sample sizes on a GPU. If a step is GPU-bound, the median of 30 steps, or of two seconds of steps, is
# reproducible within 1%. Medians of launch-bound steps are not reproducible, even on an otherwise idle machine;
# their most stable statistic is the fastest of a hundred steps, or of three seconds of steps. Long steps of a busy
# GPU also look launch-bound once the launch queue is full. If steps take over a second, the requested number is
# enough.
STEPS, STEPS_S = 30, 2.0
LAUNCH_BOUND_STEPS, LAUNCH_BOUND_STEPS_S = 100, 3.0
MIN_STEPS = 10
LONG_MS = 1000.0
LAUNCH_BOUND_ENQUEUE = 0.8  # minimum ratio of enqueue time to wall time
SAMPLE_COLUMNS = ["step", "warmup", "phase", "wall_ms", "enqueue_ms"]


def noop() -> None:
    pass


def synchronizer(device: str) -> Callable[[], None]:
    """Return a function that waits until the device is idle. On a CPU, this function returns immediately."""
    return torch.get_device_module(device).synchronize


class Phases:
    """The ``phase`` argument of a step, which records when each phase ends on the host and on the GPU.

        phases = Phases("cuda")
        with phases("forward"):
            logits = model(tokens)

    Args:
        device: "cuda" or "cpu".
        expected: the number of phases for which events are created before timing starts.
    """

    def __init__(self, device: str, expected: int = 4):
        self.device = device
        self.has_events = device == "cuda"
        self.events: list[torch.cuda.Event] = []
        if self.has_events:
            self.events = [timing_event() for _ in range(expected + 1)]
        self.host_s: list[float] = []  # the time of the start, and the time at the end of each phase

    def start(self) -> None:
        """Start timing now. If this method isn't called, timing starts with the first phase."""
        self.names: list[str] = []
        self.host_s = [default_timer()]
        self._record_event(0)

    def _record_event(self, index: int) -> None:
        if not self.has_events:
            return
        if index == len(self.events):
            self.events.append(timing_event())
        self.events[index].record()

    def __call__(self, name: str) -> Self:
        if not self.host_s:
            self.start()
        self.names.append(name)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception) -> None:
        self._record_event(len(self.host_s))
        self.host_s.append(default_timer())

    def ms(self) -> list[tuple[str, float, float]]:
        """Return each phase's name, time in ms and enqueue time in ms, and reset. The device must be idle."""
        enqueue_ms = [(end - start) * 1e3 for start, end in pairwise(self.host_s)]
        times_ms = enqueue_ms
        if self.has_events:
            recorded = self.events[: len(self.host_s)]
            times_ms = [start.elapsed_time(end) for start, end in pairwise(recorded)]
        self.host_s = []
        return list(zip(self.names, times_ms, enqueue_ms))


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def time_step(step: Callable[[Phases], Any], phases: Phases) -> list[tuple[str, float, float]]:
    """Run one step on an idle device; return (phase, ms, enqueue ms) for each phase and then for the total.

    The time of the total row is the wall time.
    """
    synchronize = synchronizer(phases.device)
    synchronize()  # finish earlier work
    phases.start()
    started = phases.host_s[0]
    step(phases)  # on a GPU, this only launches the work
    synchronize()
    wall_ms = (default_timer() - started) * 1e3
    parts = phases.ms()
    total_enqueue_ms = sum(enqueue_ms for _, _, enqueue_ms in parts)
    return [*parts, (TOTAL, wall_ms, total_enqueue_ms)]


def looks_launch_bound(enqueue_ms: float, wall_ms: float) -> bool:
    """Return whether the host spends most of the step's wall time enqueuing work.

    This heuristic doesn't need the GPU time. Once the GPU time is known, use :func:`stepscope.stats.launch_bound`
    instead.
    """
    return enqueue_ms >= LAUNCH_BOUND_ENQUEUE * wall_ms


def has_enough_samples(rows: Sequence[tuple], min_steps: int, device: str) -> bool:
    """Return whether there are enough timed steps for a reliable median (or minimum, if they are launch-bound).

    On a GPU, this module's constants define how many steps are enough. On a CPU, ``min_steps`` steps are enough.

    Args:
        rows: the steps so far, as tuples with the columns :data:`SAMPLE_COLUMNS`.
        min_steps: the minimum number of timed steps.
        device: "cuda" or "cpu".
    """
    steps, total_wall_ms, total_enqueue_ms = 0, 0.0, 0.0
    for _, is_warmup, phase, wall_ms, enqueue_ms in rows:
        if phase == TOTAL and not is_warmup:
            steps += 1
            total_wall_ms += wall_ms
            total_enqueue_ms += enqueue_ms
    if steps < min_steps:
        return False
    is_long = total_wall_ms > LONG_MS * steps
    if device == "cpu" or is_long:
        return True
    wanted, seconds = STEPS, STEPS_S
    if looks_launch_bound(total_enqueue_ms, total_wall_ms):
        wanted, seconds = LAUNCH_BOUND_STEPS, LAUNCH_BOUND_STEPS_S
    has_lasted = total_wall_ms >= seconds * 1e3
    return steps >= wanted or (steps >= MIN_STEPS and has_lasted)


def time_steps(
    step: Callable[[Phases], Any],
    steps: int,
    warmups: int,
    device: str,
    *,
    before: Callable[[], object] = noop,
    after: Callable[[], object] = noop,
    at_least_s: float = 0.0,
    until_enough: bool = False,
) -> pd.DataFrame:
    """Run ``warmups`` steps and then at least ``steps`` timed steps, one by one.

    Args:
        step: the step, which is called with :class:`Phases` and may ignore this argument.
        before, after: functions to call before and after each step, outside the timed interval.
        at_least_s: the minimum total wall time of the timed steps, in seconds.
        until_enough: whether to run more steps until :func:`has_enough_samples` returns True.

    Returns:
        One row per step and phase, and one row per step for its total, with the columns :data:`SAMPLE_COLUMNS`.

    Raises:
        torch.OutOfMemoryError: If memory runs out; the message names the step.
    """
    phases = Phases(device)
    timed_ms = 0.0
    rows: list[tuple] = []

    def is_done(index: int) -> bool:
        if index < warmups + steps or timed_ms < at_least_s * 1e3:
            return False
        return not until_enough or has_enough_samples(rows, steps, device)

    for index in count():
        if is_done(index):
            break
        with out_of_memory_names(f"running step {index}"):
            before()
            parts = time_step(step, phases)
        after()
        is_warmup = index < warmups
        rows += [(index, is_warmup, *part) for part in parts]
        if not is_warmup:
            _, wall_ms, _ = parts[-1]
            timed_ms += wall_ms
    return pd.DataFrame(rows, columns=SAMPLE_COLUMNS)


def wall_times_ms(samples: pd.DataFrame) -> pd.Series:
    """Return the wall time in ms of each timed step (without warm-up steps) in a table from :func:`time_steps`."""
    is_total = samples["phase"] == TOTAL
    is_warmup = samples["warmup"].astype(bool)
    return samples.loc[is_total & ~is_warmup, "wall_ms"]


def back_to_back(step: Callable[[], Any], device: str, steps: int) -> list[float]:
    """Run steps back to back, as in training; return the time of each step in ms.

    The host waits only once, after the last step. On a GPU, the times are measured with CUDA events, and on a CPU,
    with the host's clock.
    """
    phases = Phases(device, steps)
    synchronize = synchronizer(device)
    synchronize()
    phases.start()
    for _ in range(steps):
        with phases("step"):
            step()
    synchronize()
    return [ms for _, ms, _ in phases.ms()]


def run_for(step: Callable[[], Any], device: str, seconds: float, before: Callable[[], object] = noop) -> int:
    """Run ``step`` at least once and for at least ``seconds``; return the number of steps.

    The host waits for the device after each step.

    Args:
        before: a function to call before each step.
    """
    synchronize = synchronizer(device)
    started = default_timer()
    steps = 0
    while steps == 0 or default_timer() - started < seconds:
        before()
        step()
        synchronize()
        steps += 1
    return steps
