"""Wall time of plain steps, and of the same step as a CUDA graph.

* host wall time: ``timeit.default_timer`` around the step and a synchronisation on either side;
* a phase's time: CUDA events where the step starts and where each phase ends, read after the step, so that no
  phase waits for another (on a CPU, where nothing is asynchronous, the host's clock);
* enqueue time: how long the host took to hand the phase to the GPU.
"""
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from timeit import default_timer
from typing import Any

import pandas as pd
import torch

from stepscope import StepscopeError
from stepscope.step.training_step import Step, out_of_memory_names, release

SAMPLE_COLUMNS = ["step", "warmup", "phase", "wall_ms", "enqueue_ms"]
WHOLE = "whole"  # the row of a mode as a whole


class NotReplayed(StepscopeError, RuntimeError):
    """A step that cannot be made a CUDA graph here; the text says why."""


class Cpu:
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
        """Milliseconds between neighbouring marks, once the device is synchronised. Marks start anew."""
        marked, self.used = self.events[:self.used], 0
        return [start.elapsed_time(end) for start, end in pairwise(marked)]


class PhaseClock:
    """The ``phase`` that a :class:`Step` is called with: notes when each phase was left, by host and GPU."""

    def __init__(self, device: str, phases: int = 4):
        self.gpu = CudaEvents(phases + 1) if device == "cuda" else Cpu()

    def waited(self) -> float:
        """The host's clock once the device has done everything: no other reading is a wall time."""
        self.gpu.synchronize()
        return default_timer()

    def start(self) -> None:
        self.names: list[str] = []
        self.host = [self.waited()]
        self.gpu.mark()

    def __call__(self, name: str) -> "PhaseClock":
        self.names.append(name)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception) -> None:
        self.gpu.mark()
        self.host.append(default_timer())

    def stop(self) -> list[tuple[str, float, float]]:
        """Wait for the device; then (phase, ms, enqueue ms) of each phase and, by host wall time, of
        :data:`WHOLE`."""
        wall_ms = (self.waited() - self.host[0]) * 1e3
        enqueue_ms = [(end - start) * 1e3 for start, end in pairwise(self.host)]
        times_ms = self.gpu.elapsed_ms() or enqueue_ms
        return [*zip(self.names, times_ms, enqueue_ms), (WHOLE, wall_ms, sum(enqueue_ms))]


def plain_steps(step: Step, count: int, warmups: int = 0,
                after: Callable[[], object] = lambda: None) -> pd.DataFrame:
    """Run ``warmups`` steps and then ``count``, one by one; a row for each phase of each, and for the whole,
    in :data:`SAMPLE_COLUMNS`. Gradients are cleared between steps, and ``after`` called after each, both
    outside the clocks.

    Raises:
        torch.OutOfMemoryError: names the step in which it happened.
    """
    clock, rows = PhaseClock(step.device), []
    for index in range(warmups + count):
        with out_of_memory_names(f"running step {index}"):
            step.clear_gradients()
            clock.start()
            step(clock)
            rows += [(index, index < warmups, *row) for row in clock.stop()]
        after()
    return pd.DataFrame(rows, columns=SAMPLE_COLUMNS)


def keep_up(step: Step, seconds: float) -> int:
    """Run the step again and again, each waited for, until ``seconds`` have passed; how many there were."""
    clock, steps, started = PhaseClock(step.device, phases=0), 0, default_timer()
    while steps == 0 or clock.waited() - started < seconds:
        step.clear_gradients()
        step()
        steps += 1
    clock.waited()
    return steps


def replay_ms(step: Step, replays: int) -> list[float]:
    """Wall times of the step as a CUDA graph, in ms. Weights move on by the replays, and the optimizer's
    state is gone after them.

    Raises:
        NotReplayed: why the step cannot be captured, or its graph does not fit.
    """
    if reason := not_capturable(step):
        raise NotReplayed(reason)
    found, failure = None, None
    with capturable(step.optimizer if step.mode == "step" else None):
        try:
            found = _replay_ms(step, replays)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            failure = capture_failure(error)
        if failure:  # not in the handler: the error holds what its frames hold
            torch.cuda.set_stream(torch.cuda.default_stream())  # a capture that fails leaves its own current
            gc.collect()
    step.clear_gradients()
    release(step.device, after_error=bool(failure))
    if found is None:
        raise NotReplayed(failure)
    return found


def not_capturable(step: Step) -> str:
    """Why a step cannot be made a CUDA graph; empty where it can."""
    if step.device != "cuda":
        return "a CPU has no CUDA graphs"
    if step.mode == "step" and step.scaler.is_enabled():
        return "GradScaler asks on the CPU whether gradients overflowed, which a CUDA graph cannot"
    return ""


def capture_failure(error: BaseException | None) -> str:
    """What went wrong first: ending a broken capture fails as well, and that error says nothing."""
    causes = []
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    short = next((one for one in causes if isinstance(one, torch.OutOfMemoryError)), None)
    if short is not None:
        return f"out of memory: {re.split(r' (?:Including|Process [0-9])', str(short))[0]}"[:300]
    return f"{type(causes[-1]).__name__}: {causes[-1]}".partition("\n")[0][:300]


@contextmanager
def capturable(optimizer: Any) -> Iterator[None]:
    """Let an optimizer's steps be captured: the count of its steps, which AdamW keeps on the CPU, moves to
    the GPU. Its state is gone afterwards, so that the next step makes the plain one's anew."""
    if optimizer is None:
        yield
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
    for parameter, state in optimizer.state.items():
        state["step"] = state["step"].to(parameter.device)
    try:
        yield
    finally:
        for group in optimizer.param_groups:
            group["capturable"] = False
        optimizer.state.clear()


def _replay_ms(step: Step, replays: int) -> list[float]:
    step.clear_gradients()
    torch.cuda.empty_cache()  # the warm-up's stream does not reuse what others have cached
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    step.clear_gradients()  # the graph's own are made in its pool, and must not stand beside these
    graph, clock, times_ms = torch.cuda.CUDAGraph(), PhaseClock(step.device, phases=1), []
    with torch.cuda.graph(graph, stream=side):
        step()
    for _ in range(replays):
        clock.start()
        with clock("replay"):
            graph.replay()
        times_ms.append(clock.stop()[-1][1])
    return times_ms
