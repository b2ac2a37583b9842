"""Which phase, region and step of training launched each GPU operation of a capture.

**The question.** A capture lists what ran on the GPU (kernels, copies, fills: *operations*), each with a
name such as ``ampere_sgemm_128x64``, a start and an end. It does not say for what. The program said that,
on the host: it opened a range (NVTX push/pop, record_function) for each phase of the step and each region
of the model. Ranges have times, too, but comparing them with the operations' is wrong: the host runs ahead,
and when a kernel runs, the host is in another phase already.

**The launch is the link.** The call on the host that launched an operation stands in the capture as well,
under the same correlation id:

    host, thread 1   [forward ....[ffn ... c7 ]...]      [backward ......................]
    host, autograd                                          [ffn .... c8 ....]
    GPU                                    [kernel c7]            [kernel c8]

An operation belongs to what its launch was part of. The launch's thread and time are known, ranges are a
stack on each thread, and so

- its **phase** is the phase range open in the process, on *any* thread, when the call began: phases follow
  one another, and ``backward()`` blocks its caller for as long as autograd launches from a thread of its
  own (c8);
- its **region** is the innermost range open on the *launching* thread: ffn of c8 is a range that autograd's
  thread has opened itself (see :mod:`stepscope.model.ranges`, which hangs them on autograd's nodes);
- its **step** is the step range open in the process, counted from 0.

What launched within no phase is ``outside``; within a phase but no region, ``unattributed``. A CUDA graph's
operations all have one launch, the graph's.

**Finding the innermost range.** A capture has millions of launches. Ranges of one thread nest, so that
opening and closing events in order of time are brackets; after each event the innermost open range is the
one that opened last to the present depth. Points are then looked up among the events by bisection
(:func:`enclosing`). All threads are put on one axis, one thread's times after the other's, so that one pass
does for all.

**What is checked.** Profiles of this project are read strictly (:func:`attribute`): ranges of a thread that
cross have no innermost one, and two phases open at once would count an operation twice, so both are errors,
never a guess. Other people's captures are read leniently (:mod:`stepscope.captures.capture`): of ranges that
overlap, the one that began first counts. Both find launches and open ranges by the same functions
(:func:`join_launches`, :func:`open_range`). That nothing is lost is checked afterwards
(:mod:`stepscope.traces.conservation`): phases, regions and steps each sum to the capture, to the
nanosecond.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stepscope import StepscopeError
from stepscope.config import PHASE_NAMES

STEP = "step"
OUTSIDE, UNATTRIBUTED = "outside", "unattributed"
KINDS = ("kernel", "memcpy", "memset")
PROCESS = ~0xFFFFFF  # mask: a thread's key has the thread in the lowest 24 bits, the process above
NEVER = np.iinfo(np.int64).max
LATEST = 2**62  # ns: the difference of two times up to it fits into 64 bits
CORRELATIONS = 2**32  # CUPTI's ids are 32 bits wide
SHORT_NS = 5_000  # shorter host events don't explain idle gaps


class TraceError(StepscopeError, ValueError):
    """A file that cannot be read as a capture of GPU operations; the message names it and the problem."""


class ConservationError(StepscopeError, ValueError):
    """A capture's operations do not add up: some are lost, counted twice, or in two phases at once."""


@dataclass
class Records:
    """The records of a capture, before they are joined.

    operations: kind, name, family, start_ns, duration_ns, device, stream, correlation_id (-1 for none) and row;
        sorted by start.
    process: (operations,) the process key of each operation.
    launches: (4, calls) thread key, correlation id, and start and end in ns.
    ranges: name, start_ns, end_ns, process, thread, key; sorted by thread and start, outer ranges first.
    """

    path: str
    operations: pd.DataFrame
    process: np.ndarray
    launches: np.ndarray
    ranges: pd.DataFrame


def thread_columns(key: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns process, thread and key for thread keys."""
    return {"process": key >> 24 & 0xFFFFFF, "thread": key & 0xFFFFFF, "key": key}


def attribute(records: Records) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Assign each operation to one phase, one region and one step.

    Ranges with the name of a phase, or named "step", are phases and steps; all others are regions.

    Args:
        records: its operations are modified in place.

    Returns:
        operations: with launch_start_ns and launch_duration_ns (of the call on the host; NA if the capture
            lacks it), process, thread (of the launch; -1 if unknown), phase ("outside" if none is open),
            region ("unattributed" if none is open within the phase), step (0, 1, ... in each process; -1 if
            none is open).
        ranges: with role (phase, step, region) and step.

    Raises:
        TraceError: the ranges of a thread cross, or the capture spans too much time.
        ConservationError: two phases or two steps of a process overlap.
    """
    _check_span(records)
    path, operations = records.path, records.operations
    names, roles = records.ranges["name"].cat, {STEP: "step"} | dict.fromkeys(PHASE_NAMES, "phase")
    role = pd.Categorical([roles.get(str(name), "region") for name in names.categories])
    ranges = records.ranges.assign(role=role[names.codes])
    is_known, thread, time_ns = join_launches(records)
    launch_process = records.process[is_known]

    def spread(values: np.ndarray) -> np.ndarray:
        """Expand values of the operations with known launches to all; -1 for the others."""
        result = np.full(len(operations), -1)
        result[is_known] = values
        return result

    def opened(role: str) -> np.ndarray:
        rows = ranges[ranges["role"] == role]
        return spread(open_range(rows, launch_process, time_ns, strict=(path, role)))

    innermost = spread(_innermost_ranges(path, ranges, thread, time_ns))
    steps = opened("step")
    phase = _take_or_missing(ranges["name"], opened("phase"), OUTSIDE)
    operations["phase"] = phase.set_categories([*PHASE_NAMES, OUTSIDE])
    in_region = np.append(ranges["role"] == "region", False)[innermost]
    operations["region"] = _take_or_missing(ranges["name"], np.where(in_region, innermost, -1), UNATTRIBUTED)
    operations["step"] = np.append(ranges["step"], -1)[steps]
    return operations, ranges.drop(columns="key")


def join_launches(records: Records) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add launch_start_ns, launch_duration_ns, process and thread to the operations (see ``attribute``).

    Returns:
        A mask of the operations with known launches; and the thread key and time in ns of these launches.
    """
    operations = records.operations
    launch = find_launches(records.process, operations["correlation_id"].to_numpy(), records.launches)
    known = launch >= 0
    thread, _, start, end = (np.append(values, -1)[launch] for values in records.launches)
    operations["launch_start_ns"] = pd.arrays.IntegerArray(start, ~known)
    operations["launch_duration_ns"] = pd.arrays.IntegerArray(end - start, ~known)
    operations["process"] = records.process >> 24 & 0xFFFFFF
    operations["thread"] = np.where(known, thread & 0xFFFFFF, -1)
    return known, thread[known], start[known]


def _check_span(records: Records) -> None:
    """Raise TraceError if the threads' times don't fit on the one axis that ``enclosing`` puts them on."""
    launches, ranges = records.launches, records.ranges
    times = np.concatenate([launches[2], launches[3], ranges["start_ns"], ranges["end_ns"]])
    threads = len(pd.unique(np.concatenate([launches[0], ranges["key"], records.process])))
    first, last = int(times.min(initial=NEVER)), int(times.max(initial=0))
    if len(times) and threads * (last - first + 2) > NEVER:
        raise TraceError(
            f"{records.path}: {threads} threads have times from {first} to {last} ns, expected"
            " a capture short enough that the times of all threads, one after another, fit into 64 bits"
        )


def open_range(
    ranges: pd.DataFrame, process: np.ndarray, time_ns: np.ndarray, strict: tuple[str, str] | None = None
) -> np.ndarray:
    """Find the range that is open in a process, on any thread, at each time.

    Args:
        ranges: ranges of one role, such as the steps: key, start_ns and end_ns.
        process, time_ns: (n,) process key and time of each point.
        strict: the file and the ranges' role, for the error message. None is lenient: of ranges that overlap,
            the one that started first counts.

    Returns:
        (n,) the index of the open range in ``ranges``; -1 if none is open.

    Raises:
        ConservationError: ``strict`` is given, and two of the ranges overlap.
    """
    rows = outermost(ranges)
    if strict and len(rows) < len(ranges):
        inner = ranges.drop(index=rows.index).iloc[0]
        is_same_process = rows["key"] & PROCESS == inner["key"] & PROCESS
        outer = rows[is_same_process & (rows["start_ns"] <= inner["start_ns"])].iloc[-1]
        path, role = strict
        raise ConservationError(
            f"{path}: {role} '{inner['name']}' begins at {inner['start_ns']} ns within {role} "
            f"'{outer['name']}' of {outer['start_ns']} to {outer['end_ns']} ns, expected none in another"
        )
    open_index = np.full(len(time_ns), -1)
    keys, index = rows["key"].to_numpy() & PROCESS, rows.index.to_numpy()
    starts, ends = rows["start_ns"].to_numpy(), np.maximum(rows["end_ns"], rows["start_ns"] + 1).to_numpy()
    for key in np.unique(keys):
        is_process, is_point = keys == key, process == key
        times = time_ns[is_point]
        position = np.searchsorted(starts[is_process], times, side="right") - 1
        is_inside = (position >= 0) & (times < ends[is_process][position])
        open_index[is_point] = np.where(is_inside, index[is_process][position], -1)
    return open_index


def outermost(ranges: pd.DataFrame) -> pd.DataFrame:
    """Sort ranges by process and start; drop those that start inside another one of their process."""
    process, start = ranges["key"].to_numpy("int64") & PROCESS, ranges["start_ns"].to_numpy("int64")
    end = np.maximum(ranges["end_ns"].to_numpy("int64"), start + 1)  # an empty range contains its start
    order = np.lexsort((-end, start, process))
    is_outermost = np.full(len(order), True)
    firsts = np.flatnonzero(np.diff(process[order])) + 1
    for rows in np.split(np.arange(len(order)), firsts):
        reached = np.maximum.accumulate(end[order[rows]])
        is_outermost[rows[1:]] = start[order[rows[1:]]] >= reached[:-1]
    return ranges.iloc[order[is_outermost]]


def _innermost_ranges(path: str, ranges: pd.DataFrame, key: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
    """Add the step of each range; return the row of the innermost range at each time on its thread.

    Raises:
        TraceError: the ranges of a thread cross.
    """
    range_key, starts, ends = (ranges[column].to_numpy() for column in ("key", "start_ns", "end_ns"))
    innermost, parent, _ = enclosing(range_key, starts, ends, key, time_ns)
    is_crossing = np.append(ends, NEVER)[parent] < ends
    if is_crossing.any():
        raise TraceError(
            f"{path}: range '{ranges['name'][is_crossing.argmax()]:.100}' ends after the range it"
            " began in, expected the ranges of a thread to nest"
        )
    steps = ranges.loc[ranges["role"] == "step"]
    step_numbers = np.full(len(ranges) + 1, -1)  # the last is for row -1, "no range"
    step_numbers[steps.index] = steps.groupby("process")["start_ns"].rank() - 1
    ranges["step"] = step_numbers[open_range(steps, range_key & PROCESS, starts, strict=(path, "step"))]
    return innermost


def enclosing(
    keys: np.ndarray, start: np.ndarray, end: np.ndarray, point_keys: np.ndarray, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the innermost interval [start, end) around each point, among the intervals with the point's key.

    Args:
        keys, start, end: (n,) int64. Intervals with the same key must nest: of any two, one contains the other
            or they are disjoint.
        point_keys, points: (m,) int64.

    Returns:
        innermost: (m,) index of the innermost interval around each point; -1 for none.
        parent: (n,) index of the innermost interval around each interval; -1 for none.
        depth: (n,) the number of intervals that contain each interval, itself included.
    """
    n = len(start)
    if not n:
        return np.full(len(points), -1), np.zeros(0, int), np.zeros(0, int)
    # Put all keys on one axis, one after another; between two keys, no interval is open.
    _, codes = np.unique(np.concatenate([keys, point_keys]), return_inverse=True)
    end = np.maximum(end, start + 1)  # so that empty intervals also open before they close
    first = min(start.min(), points.min(initial=NEVER))
    offset = codes * (max(end.max(), points.max(initial=end[0])) - first + 1) - first
    opened, closed = start + offset[:n], end + offset[:n]

    order = np.lexsort((-closed, opened))  # if several open at once, the longest opens first
    events = np.concatenate([closed[order], opened[order]])
    by_time = np.argsort(events, kind="stable")  # at the same time, closings come first
    events, opens, which = events[by_time], by_time >= n, np.concatenate([order, order])[by_time]
    depth = np.cumsum(np.where(opens, 1, -1))  # after each event
    # After an event, the innermost interval is the last one that opened at the remaining depth.
    by_depth = np.argsort(depth, kind="stable")
    last_opened = np.maximum.accumulate(np.where(opens[by_depth], np.arange(2 * n), 0))
    innermost = np.full(2 * n + 1, -1)  # the last is for event -1, "before all events"
    innermost[by_depth] = which[by_depth][last_opened]
    innermost[:-1][depth == 0] = -1

    openings = np.flatnonzero(opens)
    parents: np.ndarray = np.empty(n, int)
    depths: np.ndarray = np.empty(n, int)
    parents[which[openings]] = innermost[openings - 1]
    depths[which[openings]] = depth[openings]
    return innermost[np.searchsorted(events, points + offset[n:], side="right") - 1], parents, depths


def find_launches(process: np.ndarray, correlation: np.ndarray, launches: np.ndarray) -> np.ndarray:
    """Return the column of ``launches`` for each process and correlation id; -1 for none."""
    _, codes = np.unique(np.concatenate([launches[0] & PROCESS, process]), return_inverse=True)
    # Correlation ids are unique within a process; operations without one (-1) match nothing.
    key = codes << 32 | np.concatenate([launches[1], correlation])
    key, operation_key = key[: launches.shape[1]], key[launches.shape[1] :]
    # if a runtime call made a driver call with the same id, take the outer call
    order = np.lexsort((launches[2], key))
    positions = np.searchsorted(key[order], operation_key)
    order, key = np.append(order, -1), np.append(key, -1)
    return np.where((key[order[positions]] == operation_key) & (correlation >= 0), order[positions], -1)


def matching(names: pd.Series, predicate: Callable[[str], object]) -> np.ndarray:
    """Return a mask of the names that fulfill a predicate, which is called once per distinct name."""
    is_match = np.array([bool(predicate(str(name))) for name in names.cat.categories], bool)
    return is_match[names.cat.codes]


def _take_or_missing(values: pd.Series, rows: np.ndarray, missing: str) -> pd.Categorical:
    """Return values[rows] of a categorical column, or ``missing`` if the row is -1."""
    categories = values.cat.categories.union([missing], sort=False)
    codes: np.ndarray = np.append(values.cat.codes.astype(int), categories.get_loc(missing))
    return pd.Categorical.from_codes(codes[rows], categories).remove_unused_categories()
