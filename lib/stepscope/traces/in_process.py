"""Work of this process under torch.profiler: its kernels, or the clocks of a step's phases.

What a launch takes meanwhile is longer, a kernel is not; and launches stay longer afterwards, so what is to
be timed is timed before.
"""
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import torch
from torch.profiler import ProfilerActivity

from stepscope.step.training_step import Step
from stepscope.traces.conservation import check_conservation, phase_clocks
from stepscope.traces.export import OUTSIDE, activity_totals, load_trace
from stepscope.traces.families import families
from stepscope.traces.profiled import profiled
from stepscope.traces.torch_profiler import convert, operations

KERNEL_COLUMNS = ["name", "family", "count", "total_ms"]


def kernels(run: Callable[[], None], device: str, steps: int = 1) -> pd.DataFrame:
    """Kernels, copies and fills while ``run`` is called ``steps`` times (on a CPU: torch's operators). Only
    the device is watched where there is one, so that a capture of thousands of kernels costs a second.

    Returns a row for each name, the longest in sum first: name, family, count and total_ms, both a step.
    """
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profiled(activities=[activity]) as profiler:
        for _ in range(steps):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        found = operations(trace)
    table = pd.DataFrame({"name": [event["name"] for event in found],
                          "total_ms": [(event["end"] - event["start"]) / 1e6 for event in found]})
    table = table.groupby("name", sort=False)["total_ms"].agg(["size", "sum"]).div(steps).reset_index()
    table = table.set_axis(["name", "count", "total_ms"], axis=1).sort_values("total_ms", ascending=False)
    return table.assign(family=families(table["name"]).astype(str))[KERNEL_COLUMNS].reset_index(drop=True)


def step_clocks(step: Step, steps: int = 2) -> pd.DataFrame:
    """Each phase's clocks in so many steps: ``conservation.phase_clocks`` by step (0, 1, ...) and phase.

    Raises:
        ConservationError: an operation of the capture belongs to no step, or to two.
    """
    synchronize = torch.cuda.synchronize if step.config.device == "cuda" else lambda: None
    with TemporaryDirectory(prefix="stepscope-") as folder:
        trace, export = Path(folder, "trace.json"), Path(folder, "trace.sqlite")
        with profiled() as profiler:
            for _ in range(steps):
                step.clear_gradients()
                synchronize()
                with torch.profiler.record_function("step"):
                    step(torch.profiler.record_function)
                    synchronize()
        profiler.export_chrome_trace(str(trace))
        convert(trace, export)
        found, ranges = load_trace(export)
        check_conservation(found, activity_totals(export))
    clocks = phase_clocks(found, ranges, ("step", "phase"))
    return clocks[clocks["phase"] != OUTSIDE].astype({"phase": str})
