"""Read the operations of profiled steps, and compute their GPU time.

Each phase has a range named ``stepscope/<case>/<step>/<phase>``, where the case is a number.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from stepscope import StepscopeError
from stepscope.config import PHASES
from stepscope.stats import union
from stepscope.traces.attribution import join_launches, open_range
from stepscope.traces.torch_trace import records_of_own_trace

RANGE = "stepscope"
PROFILED_COLUMNS = ["case", "number", "phase", "name", "kernel_category", "start_ns", "end_ns"]


class CaptureError(StepscopeError, RuntimeError):
    """Raised if GPU time can't be determined from a trace. The message gives the reason."""


def profiled_operations(trace: Path) -> pd.DataFrame:
    """Return the operations that were launched within the trace's named phases, on any thread.

    The columns are case, number and phase (from the name of the range that was open at the launch), name,
    kernel_category, start_ns, end_ns, and in_graph (whether the operation is part of a CUDA graph).

    Raises:
        CaptureError: If the trace has no named phases, or an operation's launch is missing from the trace.
        ConservationError: If two phases overlap.
        TraceError: If the trace cannot be read.
    """
    records = records_of_own_trace(trace)
    operations = records.operations
    names = records.ranges["name"].astype(str)
    is_phase = names.str.startswith(f"{RANGE}/")
    phases = records.ranges[is_phase]
    if phases.empty:
        raise CaptureError("the trace contains no named phases")
    is_known, _, time_ns = join_launches(records)
    if not is_known.all():
        unknown = len(operations) - is_known.sum()
        raise CaptureError(f"the trace lacks the launches of {unknown} of {len(operations)} operations")
    open_phase = open_range(phases, records.process, time_ns, strict=(str(trace), "phase"))
    is_inside = open_phase >= 0
    inside = operations[is_inside]
    parts = names[is_phase].str.split("/", expand=True)
    parts = parts.loc[open_phase[is_inside]].set_axis(inside.index)
    table = pd.DataFrame(
        {
            "case": parts[1].astype(int),
            "number": parts[2].astype(int),
            "phase": parts[3],
            "name": inside["name"].astype(str),
            "kernel_category": inside["kernel_category"].astype(str),
            "start_ns": inside["start_ns"],
            "end_ns": inside["start_ns"] + inside["duration_ns"],
            # only the launch of a CUDA graph launches several operations
            "in_graph": inside["correlation_id"].duplicated(keep=False),
        }
    )
    return table.reset_index(drop=True)


def complete_steps(operations: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the operations of each profiled step of a case, in order, omitting steps that lost operations."""
    steps = [step for _, step in operations.groupby("number")]
    max_operations = max(map(len, steps), default=0)
    return [step for step in steps if len(step) == max_operations]


def fastest_step(operations: pd.DataFrame) -> pd.DataFrame:
    """Return the operations of a case's fastest profiled step.

    Disturbances can only add GPU time, so the fastest step is the least disturbed one.
    """
    return min(complete_steps(operations), key=gpu_time_ms, default=operations)


def median_step(operations: pd.DataFrame) -> pd.DataFrame:
    """Return the operations of a case's profiled step with the median GPU time.

    If the number of steps is even, the low median (the faster of the two middle steps) is used. Use this function
    for power-limited runs, in which the SM clock fluctuates.
    """
    steps = sorted(complete_steps(operations), key=gpu_time_ms)
    return steps[(len(steps) - 1) // 2] if steps else operations


def gpu_time_ms(operations: pd.DataFrame) -> float:
    """Return the time in ms during which at least one operation runs (the length of the intervals' union)."""
    starts = operations["start_ns"].to_numpy()
    ends = operations["end_ns"].to_numpy()
    return union(starts, ends) / 1e6


def gpu_time(operations: pd.DataFrame) -> dict[str, float]:
    """Return ``gpu_ms`` (see :func:`gpu_time_ms`) and the number of ``operations``, both NaN if there are none."""
    if operations.empty:
        return {"gpu_ms": np.nan, "operations": np.nan}
    return {"gpu_ms": gpu_time_ms(operations), "operations": float(len(operations))}


def by_name(operations: pd.DataFrame) -> pd.DataFrame:
    """Return the ``count`` and ``gpu_ms`` of a step's operations by phase and name.

    In each phase, the operations with the longest total time come first.
    """
    duration_ns = operations["end_ns"] - operations["start_ns"]
    timed = operations.assign(gpu_ms=duration_ns / 1e6)
    keys = ["phase", "name", "kernel_category"]
    groups = timed.groupby(keys, sort=False)["gpu_ms"]
    table = groups.agg(["size", "sum"]).reset_index()
    table.columns = [*keys, "count", "gpu_ms"]
    phase_order = {phase: index for index, phase in enumerate(PHASES["step"])}
    table["order"] = table["phase"].map(phase_order)
    table = table.sort_values(["order", "gpu_ms"], ascending=[True, False])
    return table.drop(columns="order")
