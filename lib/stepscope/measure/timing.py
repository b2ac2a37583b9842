"""The clock of all that is timed, and the loop that times steps.

* Wall time is the host's clock (``timeit.default_timer``) around a step, with the device waited for before
  and after: no other reading of it is a wall time, since a GPU is only given its work and does it later.
* A phase's time is read from CUDA events where the step starts and where each phase ends, after the step, so
  that no phase waits for another. On a CPU, where nothing is asynchronous, it is the host's.
* Enqueue time is how long the host took to hand a phase to the GPU.
"""

from collections.abc import Callable, Sequence
from itertools import count, pairwise
from timeit import default_timer
from typing import Any, Self

import pandas as pd
import torch

from stepscope.config import TOTAL
from stepscope.model.training_step import out_of_memory_names

# How many timed steps tell their time, on a GPU: medians of 30 steps, or of two seconds of them, repeat
# within 1% where the GPU sets the pace. Where the host does, they do not repeat even on a machine alone: what
# repeats there, as far as anything does, is the fastest of a hundred, or of three seconds of them. A full
# launch queue makes long steps of a busy GPU look so, too. Of steps over a second as many as were asked for
# are enough.
STEPS, STEPS_S, MIN_STEPS, LONG_MS = 30, 2.0, 10, 1000.0
HOST_STEPS, HOST_STEPS_S, ENQUEUES = 100, 3.0, 0.8
SAMPLE_COLUMNS = ["step", "warmup", "phase", "wall_ms", "enqueue_ms"]


def nothing() -> None:
    pass


def synchronizer(device: str) -> Callable[[], None]:
    """What waits until the device has done all that it was given; on a CPU there is nothing to wait for."""
    return torch.get_device_module(device).synchronize


class Phases:
    """The ``phase`` that a step is called with: notes when each phase was left, by the host and on the GPU.

        phases = Phases("cuda")
        with phases("forward"):
            logits = model(tokens)

    Args:
        expected: phases of a step; their events are made before the clock starts.
        wait: let the host wait for the device at each phase's end and tell its time: for phases of which each
            is measured by itself.
    """

    def __init__(self, device: str, expected: int = 4, wait: bool = False):
        self.device, self.wait, self.on_gpu = device, wait, device == "cuda" and not wait
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range((expected + 1) * self.on_gpu)]
        self.host: list[float] = []  # the start, and each phase's end

    def start(self) -> None:
        """Start the first interval now. Without this call it starts with the first phase."""
        self.names: list[str] = []
        self.host = [default_timer()]
        self._mark(0)

    def _mark(self, place: int) -> None:
        if self.on_gpu:
            if place == len(self.events):
                self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[place].record()

    def __call__(self, name: str) -> Self:
        if not self.host:
            self.start()
        self.names.append(name)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception) -> None:
        if self.wait:
            synchronizer(self.device)()
        self._mark(len(self.host))
        self.host.append(default_timer())

    def ms(self) -> list[tuple[str, float, float]]:
        """Return each phase's name, time and enqueue time in ms, and start over. The device must be idle."""
        enqueue_ms = [(end - start) * 1e3 for start, end in pairwise(self.host)]
        marks = self.events[: len(self.host)]
        self.host = []
        times_ms = [first.elapsed_time(second) for first, second in pairwise(marks)] or enqueue_ms
        return list(zip(self.names, times_ms, enqueue_ms))


def time_step(step: Callable[[Phases], Any], phases: Phases) -> list[tuple[str, float, float]]:
    """One step between two waits for the device: (phase, ms, enqueue ms) of each of its phases and, by the
    host's wall time, of :data:`TOTAL`."""
    synchronize = synchronizer(phases.device)
    synchronize()  # the device has nothing left to do
    phases.start()
    started = phases.host[0]
    step(phases)  # a GPU is only given its work here
    synchronize()  # here it is waited for
    wall_ms = (default_timer() - started) * 1e3
    parts = phases.ms()
    return [*parts, (TOTAL, wall_ms, sum(enqueue_ms for *_, enqueue_ms in parts))]


def looks_launch_bound(enqueue_ms: float, wall_ms: float) -> bool:
    """Whether it looks so before GPU time is known (:func:`stepscope.stats.launch_bound` says so after): the
    host is still enqueuing when most of the step is over."""
    return enqueue_ms >= ENQUEUES * wall_ms


def has_enough_samples(rows: Sequence[tuple], least: int, device: str) -> bool:
    """Whether so many timed steps tell their time: at least so many, and on a GPU as many as the constants
    above say.

    Args:
        rows: of :data:`SAMPLE_COLUMNS`, as far as there are.
    """
    steps = [
        (wall_ms, enqueue_ms)
        for _, warmup, phase, wall_ms, enqueue_ms in rows
        if phase == TOTAL and not warmup
    ]
    wall_times_ms, enqueued_ms = (sum(times) for times in zip(*steps)) if steps else (0, 0)
    if device == "cpu" or len(steps) < least or wall_times_ms > LONG_MS * len(steps):
        return len(steps) >= least
    by_host = looks_launch_bound(enqueued_ms, wall_times_ms)
    wanted, seconds = (HOST_STEPS, HOST_STEPS_S) if by_host else (STEPS, STEPS_S)
    return len(steps) >= wanted or (len(steps) >= MIN_STEPS and wall_times_ms >= seconds * 1e3)


def time_steps(
    step: Callable[[Phases], Any],
    steps: int,
    warmups: int,
    device: str,
    *,
    before: Callable[[], object] = nothing,
    after: Callable[[], object] = nothing,
    at_least_s: float = 0.0,
    until_enough: bool = False,
) -> pd.DataFrame:
    """Run ``warmups`` steps and then ``steps``, one by one, and more until these have lasted ``at_least_s``;
    a row for each phase of each, and for the whole, in :data:`SAMPLE_COLUMNS`.

    Args:
        step: is called with the phases, which it may leave alone.
        before, after: called before and after each step, outside of the clock.
        until_enough: go on until there are :func:`enough`.

    Raises:
        torch.OutOfMemoryError: names the step in which it happened.
    """
    phases, lasted_ms = Phases(device), 0.0
    rows: list[tuple] = []
    for index in count():
        if (
            index >= warmups + steps
            and lasted_ms >= at_least_s * 1e3
            and (not until_enough or has_enough_samples(rows, steps, device))
        ):
            break
        with out_of_memory_names(f"running step {index}"):
            before()
            parts = time_step(step, phases)
        after()
        rows += [(index, index < warmups, *part) for part in parts]
        lasted_ms += parts[-1][1] * (index >= warmups)
    return pd.DataFrame(rows, columns=SAMPLE_COLUMNS)


def wall_times_ms(samples: pd.DataFrame) -> pd.Series:
    """The wall times of whole steps among :func:`time_steps`' rows, without warm-ups."""
    return samples.loc[(samples["phase"] == TOTAL) & ~samples["warmup"].astype(bool), "wall_ms"]


def back_to_back(step: Callable[[], Any], device: str, steps: int) -> list[float]:
    """Milliseconds of each of some steps one after another, as training runs them: the host enqueues, and
    waits only for the last. On a GPU the events between steps tell, on a CPU the host's clock."""
    phases, synchronize = Phases(device, steps), synchronizer(device)
    synchronize()
    phases.start()
    for _ in range(steps):
        with phases("step"):
            step()
    synchronize()
    return [ms for _, ms, _ in phases.ms()]


def run_for(
    step: Callable[[], Any], device: str, seconds: float, before: Callable[[], object] = nothing
) -> int:
    """Run the step again and again, each waited for, until ``seconds`` have passed; how many there were."""
    synchronize, steps, started = synchronizer(device), 0, default_timer()
    while steps == 0 or default_timer() - started < seconds:
        before()
        step()
        synchronize()
        steps += 1
    return steps
