"""Steps one after another, as training runs them: the host enqueues, and waits only for the last."""
import math
from collections.abc import Callable
from itertools import pairwise
from timeit import default_timer
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from stepscope.step.watch import Watch
from stepscope.traces.in_process import RANGE, profiled

WATCHED_S = 0.5  # the energy counter is brought up to date ten times a second
MOST_STEPS = 300  # of a burst


def back_to_back(step: Callable[[], Any], device: str, steps: int) -> list[float]:
    """Milliseconds of each of some steps: on a GPU by events between them, on a CPU by the host's clock."""
    if device != "cuda":
        clock = [default_timer()]
        for _ in range(steps):
            step()
            clock.append(default_timer())
        return [(second - first) * 1e3 for first, second in pairwise(clock)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in pairwise(marks)]


def steps_in(seconds: float, step_ms: float) -> int:
    return min(MOST_STEPS, math.ceil(seconds * 1e3 / step_ms))


def watched(step: Callable[[], Any], device: str, step_ms: float) -> dict[str, float]:
    """The step kept up for half a second: ``sm_clock_mhz``, ``power_w``, ``step_j``; empty on a CPU."""
    if device != "cuda":
        return {}
    steps = steps_in(WATCHED_S, step_ms)
    with Watch() as watch:
        times = back_to_back(step, device, steps)
    step_s = sum(times) / steps / 1e3
    return {"sm_clock_mhz": watch.sm_clock_mhz, "power_w": watch.power_w, "step_j": watch.power_w * step_s}


def capture(step: Callable[[], Any], device: str, steps: int) -> torch.profiler.profile:
    """Some steps under torch.profiler, each waited for and in a range of its own, as
    :func:`stepscope.traces.in_process.captured_operations` reads them."""
    on_gpu = device == "cuda"
    with profiled([ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
        for number in range(steps):
            with record_function(f"{RANGE}/0/{number}/whole"):
                step()
                if on_gpu:
                    torch.cuda.synchronize()
    return profiler
