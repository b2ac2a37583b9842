"""The operations of steps that were captured in ranges of their own, and what is said of them.

A captured phase's range is named ``stepscope/<case>/<step>/<phase>``, where the case is a number.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from stepscope import StepscopeError
from stepscope.config import PHASES
from stepscope.stats import union
from stepscope.traces.attribution import join_launches, open_range
from stepscope.traces.torch_trace import own_records

RANGE = "stepscope"
CAPTURED = ["case", "number", "phase", "name", "family", "start_ns", "end_ns"]


class CaptureError(StepscopeError, RuntimeError):
    """A capture in which GPU time cannot be told; the text says why."""


def captured_operations(trace: Path) -> pd.DataFrame:
    """The operations that the named phases of a trace launched, on any thread: case, number, phase (of the
    range's name), name, family, start_ns and end_ns. The phase is the one open when the operation was
    launched.

    Raises:
        CaptureError: a kernel's launch is not in the trace, so that its phase is not known.
        ConservationError: two phases overlap.
        TraceError: the trace cannot be read.
    """
    records = own_records(trace)
    found, ranges = records.operations, records.ranges
    ranges = ranges[ranges["name"].astype(str).str.startswith(f"{RANGE}/")]
    if ranges.empty:
        raise CaptureError("the capture holds none of the phases")
    launched, _, time_ns = join_launches(records)
    if unknown := int((~launched).sum()):
        raise CaptureError(f"the launches of {unknown} of {len(found)} operations are not in the capture")
    open_phase = open_range(ranges, records.process, time_ns, strict=(str(trace), "phase"))
    inside = open_phase >= 0
    opened = ranges["name"].astype(str).str.split("/", expand=True)
    opened = opened.reindex(np.where(inside, open_phase, ranges.index[0])).reset_index(drop=True)
    table = pd.DataFrame(
        {
            "case": opened[1].astype(int),
            "number": opened[2].astype(int),
            "phase": opened[3],
            "name": found["name"].astype(str),
            "family": found["family"].astype(str),
            "start_ns": found["start_ns"],
            "end_ns": found["start_ns"] + found["duration_ns"],
        }
    )
    return table[inside].reset_index(drop=True)


def whole_steps(operations: pd.DataFrame) -> list[pd.DataFrame]:
    """The operations of each of one case's captured steps, in order, without steps of which the profiler lost
    some."""
    steps = [rows for _, rows in operations.groupby("number")]
    most = max(map(len, steps), default=0)
    return [rows for rows in steps if len(rows) == most]


def quickest_step(operations: pd.DataFrame) -> pd.DataFrame:
    """Of one case's captured steps the operations of the one with the least GPU time: what disturbs a step
    only adds to it."""
    return min(whole_steps(operations), key=gpu_time_ms, default=operations)


def middle_step(operations: pd.DataFrame) -> pd.DataFrame:
    """The same of the median GPU time: of a stretch of steps at the power cap, where the clock swings."""
    steps = sorted(whole_steps(operations), key=gpu_time_ms)
    return steps[(len(steps) - 1) // 2] if steps else operations


def gpu_time_ms(operations: pd.DataFrame) -> float:
    """The time in which at least one of some operations runs (the union of their intervals), in ms."""
    return union(operations["start_ns"].to_numpy(), operations["end_ns"].to_numpy()) / 1e6


def gpu_time(operations: pd.DataFrame) -> dict[str, float]:
    """Of one step, or a phase of it, :func:`gpu_time_ms` (``gpu_ms``) and the number of ``operations``; nan
    where there is none."""
    if operations.empty:
        return {"gpu_ms": np.nan, "operations": np.nan}
    return {"gpu_ms": gpu_time_ms(operations), "operations": float(len(operations))}


def by_name(operations: pd.DataFrame) -> pd.DataFrame:
    """Of one step each phase's and name's count and summed time, longest first."""
    lasted = operations.assign(gpu_ms=(operations["end_ns"] - operations["start_ns"]) / 1e6)
    keys = ["phase", "name", "family"]
    table = lasted.groupby(keys, sort=False)["gpu_ms"].agg(["size", "sum"]).reset_index()
    table.columns = [*keys, "count", "gpu_ms"]
    order = table["phase"].map({phase: at for at, phase in enumerate(PHASES["step"])})
    table = table.assign(order=order).sort_values(["order", "gpu_ms"], ascending=[True, False])
    return table.drop(columns="order")
