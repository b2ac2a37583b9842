"""The kernels of some work in this process, by torch.profiler: what ran, how often and how long.

Only the device is watched where there is one, so that a capture of thousands of kernels costs a second; what
a launch takes meanwhile is longer, a kernel is not.
"""
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import torch
from torch.profiler import ProfilerActivity

from stepscope.traces.families import families
from stepscope.traces.profiled import profiled
from stepscope.traces.torch_profiler import operations

KERNEL_COLUMNS = ["name", "family", "count", "total_ms"]


def kernels(run: Callable[[], None], device: str, steps: int = 1) -> pd.DataFrame:
    """Kernels, copies and fills while ``run`` is called ``steps`` times (on a CPU: torch's operators).

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
