"""A pass of attention by both clocks: by the host's, and its kernels from a capture of a few passes."""
from collections.abc import Callable, Sequence
from contextlib import suppress
from timeit import default_timer

import pandas as pd
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from stepscope.step.stats import location
from stepscope.studies.attention.config import PASSES, Config
from stepscope.studies.attention.implementations import Implementations, Inputs, each
from stepscope.studies.attention.memory import memory_pass
from stepscope.traces.in_process import RANGE, CaptureError, gpu_time, operations_of, profiled, quickest

KEY = ["implementation", "sequence", "phase"]
TIMED = [*KEY, "passes", "wall_ms", "wall_std_ms", "saved_mib", "in_use_mib", "peak_mib"]
CAPTURED = [*KEY, "gpu_ms", "operations", "kernel"]
Cell = tuple[str, int]  # implementation and sequence
MOST_NAME = 160  # characters of a kernel's name that are kept


def waiter(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def time_all(calls: Implementations, config: Config, cells: Sequence[Cell]) -> pd.DataFrame:
    """Of these cells wall times and memory: a row for each implementation, sequence and phase."""
    rows = []
    for name, inputs in each(config, cells):
        call = calls.prepare(name, inputs)
        memory = memory_pass(call, inputs, inputs.held_bytes(name), config.device)
        walls = timed_passes(call, inputs, config)
        for phase in PASSES:
            wall = location(walls[phase])
            sizes = (memory["saved"], memory["in_use"], memory.get(phase, float("nan")))
            rows.append((name, inputs.sequence, phase, len(walls), wall["median"], wall["std"],
                         *(size / 2**20 for size in sizes)))
    return pd.DataFrame(rows, columns=TIMED)


def timed_passes(call: Callable[[], Tensor], inputs: Inputs, config: Config) -> pd.DataFrame:
    """Wall times of forward and of backward in ms, a row a pass, after warm-ups: as many as fit into
    ``cell_seconds``, within the configuration's bounds."""
    wait = waiter(config.device)

    def once() -> tuple[float, float]:
        inputs.clear_gradients()
        wait()
        started = default_timer()
        output = call()
        wait()
        middle = default_timer()
        output.backward(inputs.gradient)
        wait()
        return (middle - started) * 1e3, (default_timer() - middle) * 1e3

    spent_ms, last_ms, warmups = 0.0, 0.0, 0
    while warmups < config.warmup_steps and spent_ms < config.cell_seconds * 1e3 / 4:
        last_ms = sum(once())
        spent_ms, warmups = spent_ms + last_ms, warmups + 1
    affordable = int(config.cell_seconds * 1e3 / last_ms)
    passes = min(config.timed_steps, max(config.least_passes, affordable))
    return pd.DataFrame([once() for _ in range(passes)], columns=list(PASSES))


def capture_all(calls: Implementations, config: Config, cells: Sequence[Cell]
                ) -> torch.profiler.profile | str:
    """Some passes of every cell in one session of torch.profiler, or why there is none. After all timing:
    once CUPTI has watched a process, its launches stay longer."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (config.device == "cuda")]
    try:
        with profiled(activities) as profiler:
            for name, inputs in each(config, cells):
                index = cells.index((name, inputs.sequence))
                with suppress(torch.OutOfMemoryError):  # it has been timed, and stays so
                    captured_passes(calls.prepare(name, inputs), inputs, config, index)
    except RuntimeError as error:  # of CUPTI, when the capture begins or ends
        return f"torch.profiler: {' '.join(str(error).split())[:200]}"
    return profiler


def captured_passes(call: Callable[[], Tensor], inputs: Inputs, config: Config, index: int) -> None:
    """The device is waited for inside each range, which so holds all that its phase launched."""
    wait = waiter(config.device)
    for number in range(config.captured_passes):
        inputs.clear_gradients()
        wait()
        with record_function(f"{RANGE}/{index}/{number}/forward"):
            output = call()
            wait()
        with record_function(f"{RANGE}/{index}/{number}/backward"):
            output.backward(inputs.gradient)
            wait()


def read_capture(profiler: torch.profiler.profile | str, cells: Sequence[Cell]) -> tuple[pd.DataFrame, str]:
    """Each cell's and phase's ``gpu_ms``, ``operations`` and longest ``kernel``; and why some have none."""
    if isinstance(profiler, str):
        return pd.DataFrame(columns=CAPTURED), profiler
    try:
        found = operations_of(profiler)
    except (CaptureError, ValueError) as error:  # a trace that cannot be read is a TraceError, a ValueError
        return pd.DataFrame(columns=CAPTURED), str(error)
    rows = []
    for (index, phase), own in found.groupby(["index", "phase"]):
        lasted = (own["end"] - own["start"]).groupby(own["name"]).sum()
        name, sequence = cells[index]
        rows.append({"implementation": name, "sequence": sequence, "phase": phase, **gpu_time(quickest(own)),
                     "kernel": str(lasted.idxmax())[:MOST_NAME]})
    return pd.DataFrame(rows, columns=CAPTURED), "its kernels are not in the capture"
