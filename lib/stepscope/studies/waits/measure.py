"""A known delay of the host, a known load of the GPU, and what a step does under each."""
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter_ns

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.step.timing import CudaEvents, measure
from stepscope.step.training_step import Step, build_step
from stepscope.studies.waits.config import Config
from stepscope.traces.in_process import step_clocks

CALIBRATION_CYCLES = 20_000_000  # about 10 ms


class SlowHost(TorchDispatchMode):
    """Every operator's call spins for so long before it goes on, on whatever thread; counts the calls."""

    def __init__(self, delay_us: float):
        super().__init__()
        self.delay_ns, self.calls = round(delay_us * 1e3), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        until = perf_counter_ns() + self.delay_ns
        while perf_counter_ns() < until:
            pass
        return func(*args, **(kwargs or {}))


class BusyGPU:
    """Before every block of the model, forward and backward, the GPU is given a kernel that only takes time.

    To enqueue it costs the host one launch a block and way.
    """

    def __init__(self, model: torch.nn.Module, load_us: float, cycles_per_us: float):
        self.model, self.cycles, self.loads = model, round(load_us * cycles_per_us), 0

    def load(self, *_) -> None:
        self.loads += 1
        torch.cuda._sleep(self.cycles)

    def __enter__(self) -> "BusyGPU":
        self.hooks = [hook for block in self.model.blocks for hook in (
            block.register_forward_pre_hook(self.load), block.register_forward_hook(self.load_backward))]
        return self

    def load_backward(self, block, inputs, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.load)

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()


def cycles_per_us() -> float:
    """What torch.cuda._sleep takes for a microsecond, measured at the clock of now."""
    events = CudaEvents(3)
    for _ in range(2):  # the first warms up
        events.mark()
        torch.cuda._sleep(CALIBRATION_CYCLES)
    events.mark()
    events.synchronize()
    times_ms = events.elapsed_ms()
    return CALIBRATION_CYCLES / times_ms[-1] / 1e3 if times_ms else float("nan")


def arms_of(config: Config) -> pd.DataFrame:
    """What is done to the step, a row an arm: host_delay_us (NaN: calls are not looked at), gpu_load_us."""
    host = [(delay, 0.0) for delay in config.host_delays_us]
    gpu = [(float("nan"), load) for load in config.gpu_loads_us if config.device == "cuda"]
    table = pd.DataFrame([(float("nan"), 0.0), *host, *gpu], columns=["host_delay_us", "gpu_load_us"])
    return table.rename_axis("arm").reset_index()


def measure_arms(config: Config) -> dict[str, pd.DataFrame]:
    """Time the step in every arm, then count and capture each.

    Returns:
        arms: arm, host_delay_us, gpu_load_us, phase, calls (operators' calls a step), added_host_ms (of the
            known delay), added_gpu_ms (of the known load).
        samples: arm, and what ``timing.measure`` gives, no profiler having been in the process.
        clocks: arm, and ``phase_clocks`` of each captured step and phase.
    """
    step, arms = build_step(config.step()), arms_of(config)
    per_us = cycles_per_us() if config.device == "cuda" else float("nan")
    found: dict[str, list[pd.DataFrame]] = {"samples": [], "arms": [], "clocks": []}
    # All of them timed before any is captured: a profiler leaves hooks in the driver behind.
    for name, done, work in (("samples", "timed", measure), ("arms", "its calls counted", added),
                             ("clocks", "captured", step_clocks)):
        for arm in arms.itertuples():
            slowed = nullcontext() if pd.isna(arm.host_delay_us) else SlowHost(arm.host_delay_us)
            loaded = BusyGPU(step.model, arm.gpu_load_us, per_us) if arm.gpu_load_us else nullcontext()
            with slowed, loaded:
                found[name].append(work(step).assign(arm=arm.arm))
            print(f"arm {arm.arm + 1} of {len(arms)} {done}", flush=True)
    tables = {name: pd.concat(parts, ignore_index=True) for name, parts in found.items()}
    table = arms.merge(tables["arms"], on="arm")
    table["added_host_ms"] = (table["calls"] * table["host_delay_us"] / 1e3).fillna(0)
    table["added_gpu_ms"] = table.pop("loads") * table["gpu_load_us"] / 1e3
    return tables | {"arms": table}


def added(step: Step) -> pd.DataFrame:
    """By phase of one step: operators' calls, and loads given to the GPU (one a block and way)."""
    rows, layers = [], len(step.model.blocks)
    with SlowHost(0) as host:
        @contextmanager
        def phase(name: str) -> Iterator[None]:
            before = host.calls
            yield
            rows.append((name, host.calls - before, layers * (name in ("forward", "backward"))))

        step.clear_gradients()
        step(phase)
    return pd.DataFrame(rows, columns=["phase", "calls", "loads"])
