"""Decide which of a capture's ranges are its steps.

A step is a range that repeats on one thread of a process and encloses most of the process's launches. Some
ranges satisfy these conditions but aren't steps:

- parts of a step: ranges within a phase's range, and ranges named after a layer;
- ranges that a library opens for internal purposes;
- warm-ups and the ranges within them, provided that the process launched other work, too.

If no range is a step, but one repeated phase launches nearly all work (for example, in a benchmark of the forward
pass), that phase's ranges are the steps. Without such a phase, each replay of a large CUDA graph begins a step, as
in an inference server.
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

MAX_CANDIDATES = 50  # maximum number of range names to consider: those with the longest total times
MAX_STEPS = 10_000
MIN_STEP_SHARE = 0.5  # minimum share of all operations that the ranges of the steps enclose
MIN_NAMED_STEP_SHARE = 0.2  # the same minimum for repeated ranges with a word such as "step" in their name
MIN_PHASE_SHARE = 0.9  # the same minimum for the ranges of a phase that count as steps
MIN_GRAPH_OPS = 50  # a CUDA graph with fewer operations may be a layer
# If less than this share of all operations is launched outside warm-up ranges, warm-up ranges are treated like any
# others, and may be chosen as the steps.
MIN_MEASURED_SHARE = 0.05


@dataclass
class Steps:
    """A capture's steps and warm-ups.

    rows: the ranges that are steps; the column ``step`` numbers the steps of each process.
    warm_up: the ranges whose names denote a warm-up; empty if hardly anything was launched outside them.
    """

    rows: pd.DataFrame
    warm_up: pd.DataFrame


def find_steps(
    path: str, ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray, name: str | None
) -> Steps:
    """Find the ranges that are steps.

    Args:
        path: the file, for error messages.
        ranges: ``Records.ranges``, with the additional columns ``plain`` (see ``plain_name``) and ``phase``
            ("" if the range isn't a phase).
        process, launch: the process key and the launch time of each operation (NEVER if unknown).
        name: the name of the steps, or None to detect it.

    Raises:
        TraceError: If no range has this name.
    """
    process, launch = process[launch < NEVER], launch[launch < NEVER]
    warm_up = outermost(ranges[ranges["plain"].str.contains(WARM_UP)])
    if name is not None and WARM_UP.search(plain_name(name)):
        warm_up = ranges[:0]
    is_measured = open_range(warm_up, process, launch) < 0
    if is_measured.sum() < MIN_MEASURED_SHARE * len(launch):
        warm_up, is_measured = ranges[:0], np.full(len(launch), True)
    process, launch = process[is_measured], launch[is_measured]
    measured_ranges = ranges[~_are_within(warm_up, ranges)]
    if name is not None:
        rows = measured_ranges[measured_ranges["plain"] == plain_name(name)]
        if rows.empty:
            raise no_such_range(path, repr(name[:80]), ranges)
    else:
        is_profiler_step = matching(measured_ranges["name"], PROFILER_STEP.search)
        rows = measured_ranges[is_profiler_step]
        if rows.empty:
            rows = _repeating_ranges(measured_ranges, process, launch)
        if rows.empty:
            rows = _repeated_phase(measured_ranges, process, launch)
        if rows.empty:
            rows = _graph_replays(measured_ranges, process, launch)
    rows = outermost(rows)
    processes = rows["key"].to_numpy("int64") & PROCESS
    return Steps(rows.assign(step=rows.groupby(processes).cumcount()), warm_up)


def _are_within(outer: pd.DataFrame, ranges: pd.DataFrame) -> np.ndarray:
    """Return a mask of the ranges that a range in ``outer`` encloses or equals, on any thread of the process."""
    processes = ranges["key"].to_numpy("int64") & PROCESS
    index = open_range(outer, processes, ranges["start_ns"].to_numpy("int64"))
    outer_end = outer["end_ns"].reindex(index, fill_value=-LATEST).to_numpy()
    return (index >= 0) & (ranges["end_ns"].to_numpy() <= outer_end)


def _launch_share(rows: pd.DataFrame, process: np.ndarray, launch: np.ndarray) -> float:
    """Return the share of the operations that were launched within the ranges."""
    return float((open_range(rows, process, launch) >= 0).sum() / max(1, len(launch)))


def _repeating_ranges(ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray) -> pd.DataFrame:
    """Return the ranges whose common name most likely denotes the steps.

    Names that contain a word such as "step" take precedence, followed by names that occur more than once. Among
    these, the name whose ranges enclose the most operations is chosen. If two names enclose the same number of
    operations, the name whose ranges have the longer total time is chosen. If no name is suitable, the result is
    empty.
    """
    best, score = ranges[:0], (False, True, MIN_STEP_SHARE, 0)
    is_phase = ranges["phase"] != ""
    in_phase = pd.Series(_are_within(ranges[is_phase], ranges), ranges.index)
    is_operator = matching(ranges["name"], OPERATOR_RANGE.search)
    is_library = matching(ranges["name"], LIBRARY_RANGE.search)
    ranges = ranges[~is_operator & ~is_library]
    total_ns = (ranges["end_ns"] - ranges["start_ns"]).groupby(ranges["plain"]).sum()
    candidates = ranges[ranges["plain"].isin(total_ns.nlargest(MAX_CANDIDATES).index)]
    for name, rows in candidates.groupby("plain"):
        is_layer = LAYER_WORD.search(str(name)) is not None  # so "batch norm" doesn't count as a batch
        has_step_word = bool({*str(name).split()} & STEP_WORDS) and not is_layer
        is_part = in_phase[rows.index].mean() > 0.5 or is_layer
        is_on_several_threads = rows["key"].nunique() > (rows["key"] & PROCESS).nunique()
        if not (1 if has_step_word else 2) <= len(rows) <= MAX_STEPS or is_part or is_on_several_threads:
            continue
        share = _launch_share(rows, process, launch)
        min_share = MIN_STEP_SHARE if len(rows) == 1 else MIN_NAMED_STEP_SHARE
        rank = (has_step_word and share > min_share, len(rows) > 1, share, int(total_ns[name]))
        if rank > score:
            best, score = rows, rank
    return best


def _repeated_phase(ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray) -> pd.DataFrame:
    """Return the ranges of a repeated phase that encloses nearly all operations."""
    phases = ranges[ranges["phase"] != ""]
    for _, rows in phases.groupby("plain"):
        if 2 <= len(rows) <= MAX_STEPS and _launch_share(rows, process, launch) > MIN_PHASE_SHARE:
            return rows
    return ranges[:0]


def _graph_replays(ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray) -> pd.DataFrame:
    """Return a step for each replay of the largest CUDA graph. A step lasts until the next replay.

    A call that launched many operations counts as the launch of a graph.
    """
    calls = pd.DataFrame({"key": process, "start_ns": launch})
    calls = calls.groupby(["key", "start_ns"]).size().rename("size").reset_index()
    calls = calls[calls["size"] >= MIN_GRAPH_OPS]
    replays = [rows for _, rows in calls.groupby(["key", "size"]) if len(rows) > 1]
    main_replays = max(replays, key=lambda rows: rows["size"].sum(), default=calls[:0])
    is_small = main_replays["size"].sum() < MIN_STEP_SHARE * len(launch)
    if is_small or main_replays.empty or len(main_replays) > MAX_STEPS:
        return ranges[:0]
    start = main_replays["start_ns"].to_numpy()
    end = np.append(start[1:], start[-1] + int(np.median(np.diff(start))))
    name = pd.Categorical(["CUDA graph replay"] * len(main_replays))
    steps = pd.DataFrame(
        {"name": name, "start_ns": start, "end_ns": end, "key": main_replays["key"].to_numpy()}
    )
    return steps.set_axis(range(-1 - len(steps), -1))  # negative, unlike all row labels of ranges


def no_such_range(path: str, name: str, ranges: pd.DataFrame) -> TraceError:
    """Return an error that lists the capture's ranges, longest first."""
    is_step = matching(ranges["name"], PROFILER_STEP.search)
    rows = ranges[is_step | ~matching(ranges["name"], OPERATOR_RANGE.search)]
    longest = (
        rows.assign(time=rows["end_ns"] - rows["start_ns"])
        .groupby("plain")
        .agg(time=("time", "sum"), name=("name", "first"), count=("time", "size"))
        .nlargest(8, "time")
    )
    expected = ", ".join(
        f"{str(name)[:60]!r} ({count})" for name, count in zip(longest["name"], longest["count"])
    )
    return TraceError(
        f"{path}: no range is named {name};"
        f" {f'expected one of {expected}' if expected else 'the capture has no ranges'}"
    )
