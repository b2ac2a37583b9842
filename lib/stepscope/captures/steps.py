"""Which ranges of a capture are its steps.

A step is a range that repeats on one thread of a process, around most of what the process launches. Some
ranges do so too and are no steps:

- a part of a step: a range within a phase's range, or one with a layer's name;
- a range that a library opens for its own purposes;
- a warm-up and what lies within it, as long as something else was launched.

Where no range is a step, but nearly all work is launched within one repeated phase (a benchmark of forward,
say), that phase's ranges are the steps. Where there is no such phase either, each replay of a large CUDA
graph begins a step, as in an inference server.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from stepscope.captures.range_names import (
    LAYER_WORD,
    LIBRARY_RANGE,
    OPERATOR_RANGE,
    PROFILER_STEP,
    STEP_WORDS,
    WARM_UP,
    plain_name,
)
from stepscope.traces.attribution import LATEST, NEVER, PROCESS, TraceError, matching, open_range, outermost

MAX_CANDIDATES = 50  # names of ranges, those with the most time, among which steps are looked for
MAX_STEPS = 10_000
MIN_SHARE = 0.5  # of all operations: a range that repeats around fewer is no step
MIN_SHARE_NAMED = 0.2  # the same of a range with a word such as "step" in its name
MIN_SHARE_PHASE = 0.9  # the same of a phase that stands for a step
MIN_GRAPH = 50  # operations of a CUDA graph: a smaller one may be a layer
MIN_MEASURED = 0.05  # of all operations: where fewer are launched outside of warm-ups, these are the steps


@dataclass
class Steps:
    """rows: the ranges that are steps, with ``step``, their number in each process. warm_up: the ranges that
    say warm-up and are no steps, because something else was measured."""

    rows: pd.DataFrame
    warm_up: pd.DataFrame


def find_steps(
    path: str, ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray, name: str | None
) -> Steps:
    """Find the ranges that are steps.

    Args:
        ranges: of Records, with ``plain`` (``plain_name``) and ``phase`` ("" for none).
        process, launch: the process's key and the launch of each operation (NEVER: unknown).
        name: the steps' name; None finds it.

    Raises:
        TraceError: no range has the name.
    """
    process, launch = process[launch < NEVER], launch[launch < NEVER]
    warm_up = outermost(ranges[ranges["plain"].str.contains(WARM_UP)])
    if name is not None and WARM_UP.search(plain_name(name)):
        warm_up = ranges[:0]
    measured = open_range(warm_up, process, launch) < 0
    if measured.sum() < MIN_MEASURED * len(launch):
        warm_up, measured = ranges[:0], np.full(len(launch), True)
    process, launch = process[measured], launch[measured]
    measured_ranges = ranges[~_lies_in(warm_up, ranges)]
    if name is not None:
        rows = measured_ranges[measured_ranges["plain"] == plain_name(name)]
        if rows.empty:
            raise no_such_range(path, repr(name[:80]), ranges)
    else:
        own = matching(measured_ranges["name"], PROFILER_STEP.search)
        rows = measured_ranges[own]
        if rows.empty:
            rows = _repeating(measured_ranges, process, launch)
        if rows.empty:
            rows = _repeated_phase(measured_ranges, process, launch)
        if rows.empty:
            rows = _graph_replays(measured_ranges, process, launch)
    rows = outermost(rows)
    processes = rows["key"].to_numpy("int64") & PROCESS
    return Steps(rows.assign(step=rows.groupby(processes).cumcount()), warm_up)


def _lies_in(outer: pd.DataFrame, ranges: pd.DataFrame) -> np.ndarray:
    """Return which ranges are a part of one of ``outer``, or one of them, on any thread of the process."""
    processes = ranges["key"].to_numpy("int64") & PROCESS
    index = open_range(outer, processes, ranges["start_ns"].to_numpy("int64"))
    outer_end = outer["end_ns"].reindex(index, fill_value=-LATEST).to_numpy()
    return (index >= 0) & (ranges["end_ns"].to_numpy() <= outer_end)


def _share(rows: pd.DataFrame, process: np.ndarray, launch: np.ndarray) -> float:
    """Return the share of operations that were launched within these ranges."""
    return float((open_range(rows, process, launch) >= 0).sum() / max(1, len(launch)))


def _repeating(ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray) -> pd.DataFrame:
    """Return the ranges of the one name that repeat around most operations, best with a word for a step in
    it; of two that hold as much, the longer ones."""
    best, score = ranges[:0], (False, True, MIN_SHARE, 0)
    is_phase = ranges["phase"] != ""
    in_phase = pd.Series(_lies_in(ranges[is_phase], ranges), ranges.index)
    library = matching(ranges["name"], OPERATOR_RANGE.search) | matching(ranges["name"], LIBRARY_RANGE.search)
    ranges = ranges[~library]
    lasted = (ranges["end_ns"] - ranges["start_ns"]).groupby(ranges["plain"]).sum()
    candidates = ranges[ranges["plain"].isin(lasted.nlargest(MAX_CANDIDATES).index)]
    for name, rows in candidates.groupby("plain"):
        is_layer = LAYER_WORD.search(str(name)) is not None  # "batch norm", too
        worded = bool({*str(name).split()} & STEP_WORDS) and not is_layer
        is_part = in_phase[rows.index].mean() > 0.5 or is_layer
        several_threads = rows["key"].nunique() > (rows["key"] & PROCESS).nunique()
        if not (1 if worded else 2) <= len(rows) <= MAX_STEPS or is_part or several_threads:
            continue
        share = _share(rows, process, launch)
        enough = MIN_SHARE if len(rows) == 1 else MIN_SHARE_NAMED
        rank = (worded and share > enough, len(rows) > 1, share, int(lasted[name]))
        if rank > score:
            best, score = rows, rank
    return best


def _repeated_phase(ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray) -> pd.DataFrame:
    """Return the ranges of a phase that repeats around nearly all operations."""
    phases = ranges[ranges["phase"] != ""]
    for _, rows in phases.groupby("plain"):
        if 2 <= len(rows) <= MAX_STEPS and _share(rows, process, launch) > MIN_SHARE_PHASE:
            return rows
    return ranges[:0]


def _graph_replays(ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray) -> pd.DataFrame:
    """Return a step for each replay of the CUDA graph that holds most operations, until the next replay. A
    call that launched many operations is a graph's launch."""
    calls = pd.DataFrame({"key": process, "start_ns": launch})
    calls = calls.groupby(["key", "start_ns"]).size().rename("size").reset_index()
    calls = calls[calls["size"] >= MIN_GRAPH]
    replays = [rows for _, rows in calls.groupby(["key", "size"]) if len(rows) > 1]
    most = max(replays, key=lambda rows: rows["size"].sum(), default=calls[:0])
    if most["size"].sum() < MIN_SHARE * len(launch) or len(most) > MAX_STEPS or most.empty:
        return ranges[:0]
    start = most["start_ns"].to_numpy()
    end = np.append(start[1:], start[-1] + int(np.median(np.diff(start))))
    name = pd.Categorical(["CUDA graph replay"] * len(most))
    steps = pd.DataFrame({"name": name, "start_ns": start, "end_ns": end, "key": most["key"].to_numpy()})
    return steps.set_axis(range(-1 - len(steps), -1))  # no row of ranges


def no_such_range(path: str, name: str, ranges: pd.DataFrame) -> TraceError:
    """Return the error that there is no such range; it lists those there are, the longest first."""
    is_step = matching(ranges["name"], PROFILER_STEP.search)
    rows = ranges[is_step | ~matching(ranges["name"], OPERATOR_RANGE.search)]
    summed = (
        rows.assign(time=rows["end_ns"] - rows["start_ns"])
        .groupby("plain")
        .agg(time=("time", "sum"), name=("name", "first"), count=("time", "size"))
        .nlargest(8, "time")
    )
    known = ", ".join(f"{str(name)[:60]!r} ({count})" for name, count in zip(summed["name"], summed["count"]))
    return TraceError(
        f"{path}: no range is named {name}, expected one of {known or 'none: the capture has no ranges'}"
    )
