"""The timing harness: every step by three clocks at once, every sample kept.

* host wall time: ``timeit.default_timer`` around the step and a synchronisation on either side;
* GPU time: CUDA events where the step starts and where each phase ends, read after the step, so that no phase
waits
  for another. Boundaries are shared: the phases of a step sum to its GPU time;
* enqueue time: how long the host took to hand the phase to the GPU.
"""
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from timeit import default_timer

import pandas as pd
import torch

from stepscope.step.training_step import Step, out_of_memory_names

SAMPLE_COLUMNS = ["step", "timed", "phase", "time_ms", "enqueue_ms", "sm_clock_mhz"]
# the row of a whole step, whose time is host wall time; the others' is GPU time (on a CPU, host time)
WHOLE = "step"


class Synchronized:
    """A CPU works while the host waits for it: there is nothing to wait for, and one clock tells all."""

    def synchronize(self) -> None:
        pass

    def mark(self) -> None:
        pass

    def elapsed_ms(self) -> None:
        return None


class CudaEvents:
    """Marks on the GPU's timeline."""

    def __init__(self, marks: int):
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(marks)]
        self.used = 0
        self.synchronize = torch.cuda.synchronize

    def mark(self) -> None:
        self.events[self.used].record()
        self.used += 1

    def elapsed_ms(self) -> list[float]:
        """Milliseconds between neighbouring marks; to be read when the device is synchronised. Marks start
        anew.
        """
        marked, self.used = self.events[:self.used], 0
        return [start.elapsed_time(end) for start, end in pairwise(marked)]


class PhaseClock:
    """The ``phase`` that a :class:`Step` is called with: notes when each phase was left, by host and by
    GPU.
    """

    def __init__(self, device: str, phases: int = 4):
        self.gpu = CudaEvents(phases + 1) if device == "cuda" else Synchronized()

    def start(self) -> None:
        self.gpu.synchronize()
        self.names: list[str] = []
        self.gpu.mark()
        self.host = [default_timer()]

    def __call__(self, name: str) -> "PhaseClock":
        self.names.append(name)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception) -> None:
        self.gpu.mark()
        self.host.append(default_timer())

    def stop(self) -> list[tuple[str, float, float]]:
        """Wait for the device; then (phase, time in ms, enqueue time in ms) of each phase and of the whole
        step.
        """
        self.gpu.synchronize()
        wall_ms = (default_timer() - self.host[0]) * 1e3
        enqueue_ms = [(end - start) * 1e3 for start, end in zip(self.host, self.host[1:])]
        times_ms = self.gpu.elapsed_ms() or enqueue_ms
        return [*zip(self.names, times_ms, enqueue_ms), (WHOLE, wall_ms, sum(enqueue_ms))]


def measure(step: Step, read_sm_clock: Callable[[], float | None] = lambda: None,
            watch: AbstractContextManager | None = None) -> pd.DataFrame:
    """Run the configuration's warm-up and timed steps; one row for each phase of each step, in
    :data:`SAMPLE_COLUMNS`.

    The whole step's ``time_ms`` is host wall time, a phase's is GPU time (on a CPU: host time, as nothing is
    asynchronous there). Gradients are cleared between steps, outside the clocks. ``read_sm_clock`` is called
    after each step, also outside. ``watch`` is entered before the first timed step and left after the last.

    Raises:
        torch.OutOfMemoryError: names the step in which it happened.
    """
    config = step.config
    clock, rows = PhaseClock(config.device), []
    with ExitStack() as timed_steps:
        for index in range(config.warmup_steps + config.timed_steps):
            if index == config.warmup_steps and watch:
                timed_steps.enter_context(watch)
            with out_of_memory_names(f"running step {index}"):
                step.clear_gradients()
                clock.start()
                step(clock)
                clocked = clock.stop()
            timed, sm_clock_mhz = index >= config.warmup_steps, read_sm_clock()
            rows += [(index, timed, *row, sm_clock_mhz) for row in clocked]
    return pd.DataFrame(rows, columns=SAMPLE_COLUMNS).astype({"sm_clock_mhz": "float64"})


def keep_up(step: Step, seconds: float) -> int:
    """Run the step again and again, each waited for, until ``seconds`` have passed; how many there were."""
    steps, started = 0, default_timer()
    while steps == 0 or default_timer() - started < seconds:
        step.clear_gradients()
        step()
        if step.config.device == "cuda":
            torch.cuda.synchronize()
        steps += 1
    return steps
