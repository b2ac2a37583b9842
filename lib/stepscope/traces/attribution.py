"""Find the phase, region and step of training that launched each GPU operation of a capture.

**The question.** A capture lists the kernels, copies and fills that ran on the GPU (*operations*), each with a
name such as ``ampere_sgemm_128x64``, a start and an end. The capture doesn't say what an operation was for. On the
host, however, the program opened a range (NVTX push/pop, record_function) for each phase of the step and each
region of the model. Ranges have times, too, but we can't compare these with the times of operations: the host runs
ahead, and while a kernel runs, the host may already be in another phase.

**The launch is the link.** The capture also contains the call on the host that launched an operation, with the
same correlation id:

    host, thread 1   [forward ....[ffn ... c7 ]...]      [backward ......................]
    host, autograd                                          [ffn .... c8 ....]
    GPU                                    [kernel c7]            [kernel c8]

An operation belongs to the ranges that were open at its launch. We know the thread and the time of the launch, and
the ranges of each thread form a stack. So an operation's

- **phase** is the phase range that was open in the process, on *any* thread, when the call began. Phases follow
  one another, and ``backward()`` blocks its caller while autograd launches operations from its own thread (c8).
- **region** is the innermost range that was open on the *launching* thread. Autograd's thread opened the range ffn
  around c8 (:mod:`stepscope.model.ranges` attaches such ranges to autograd's nodes).
- **step** is the step range that was open in the process, counted from 0.

An operation launched outside all phases is ``outside``; one launched within a phase but outside all regions is
``unattributed``. All operations of a CUDA graph have the same launch: the launch of the graph.

**Finding the innermost range.** A capture has millions of launches. The ranges of one thread nest, so their
opening and closing events, in order of time, are like brackets. After each event, the innermost open range is the
last one that opened at the current depth. We find each launch among the events by bisection (:func:`enclosing`).
All threads are placed on one axis, one after another, so that one pass covers them all.

**Checks.** We read this project's profiles strictly (:func:`attribute`). If the ranges of a thread cross, none is
the innermost, and if two phases are open at once, an operation would count twice, so both are errors. We read
other people's captures leniently (:mod:`stepscope.captures.capture`): if ranges overlap, the one that began first
counts. Both readers use the same functions to find launches and open ranges (:func:`join_launches`,
:func:`open_range`). :mod:`stepscope.traces.conservation` then checks that nothing is lost: phases, regions and
steps each sum to the capture's total, to the nanosecond.
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
# A mask that selects the process in a thread's key. The lowest 24 bits of the key are the thread.
PROCESS = ~0xFFFFFF
NEVER = np.iinfo(np.int64).max
LATEST = 2**62  # ns; differences between earlier times fit into 64 bits
CORRELATIONS = 2**32  # CUPTI's ids are 32 bits wide
SHORT_NS = 5_000  # shorter host events don't explain idle gaps


class TraceError(StepscopeError, ValueError):
    """Raised if a file isn't a readable capture of GPU operations. The message names the file and the problem."""


class ConservationError(StepscopeError, ValueError):
    """Raised if a capture's operations don't add up: some are lost, counted twice, or in two phases at once."""


@dataclass
class Records:
    """The records of a capture before operations, launches and ranges are joined.

    path: the file, for error messages.
    operations: a row per operation, sorted by start, with the columns kind, name, kernel_category, start_ns,
        duration_ns, device, stream, correlation_id (-1 if there is none), row and bytes.
    process: (operations,) the process key of each operation.
    launches: (4, calls) the thread key, the correlation id, the start in ns and the end in ns of each call.
    ranges: a row per range, sorted by thread and start, outer ranges first, with the columns name, start_ns,
        end_ns, process, thread and key.
    """

    path: str
    operations: pd.DataFrame
    process: np.ndarray
    launches: np.ndarray
    ranges: pd.DataFrame


def thread_columns(key: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns process, thread and key, given the keys of threads."""
    return {"process": key >> 24 & 0xFFFFFF, "thread": key & 0xFFFFFF, "key": key}


def attribute(records: Records) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Assign each operation to one phase, one region and one step.

    A range with the name of a phase is a phase, and a range named "step" is a step. All others are regions.

    Args:
        records: a capture's records. The operations are modified in place.

    Returns:
        operations: the operations with the additional columns launch_start_ns and launch_duration_ns (of the call
            on the host; NA if the capture lacks it), process, thread (of the launch; -1 if unknown), phase
            ("outside" if none was open), region ("unattributed" if none was open), and step (0, 1, ... in each
            process; -1 if none was open).
        ranges: the ranges with the additional columns role (phase, step, region) and step.

    Raises:
        TraceError: If the ranges of a thread cross, or if the capture spans too much time.
        ConservationError: If two phases or two steps of a process overlap.
    """
    _check_span(records)
    path = records.path
    operations = records.operations
    ranges = records.ranges.assign(role=_roles(records.ranges))
    is_known, thread, time_ns = join_launches(records)
    launch_process = records.process[is_known]

    def spread(values: np.ndarray) -> np.ndarray:
        """Expand values from the operations with known launches to all operations; the other operations get -1."""
        result = np.full(len(operations), -1)
        result[is_known] = values
        return result

    def open_row(role: str) -> np.ndarray:
        """Return, for each operation, the row of the range with this role that was open at its launch, or -1."""
        rows = ranges[ranges["role"] == role]
        open_index = open_range(rows, launch_process, time_ns, strict=(path, role))
        return spread(open_index)

    innermost = spread(_innermost_ranges(path, ranges, thread, time_ns))
    step_row = open_row("step")
    names = ranges["name"]
    phase = _take_or_missing(names, open_row("phase"), OUTSIDE)
    operations["phase"] = phase.set_categories([*PHASE_NAMES, OUTSIDE])
    # the value appended to each array is for row -1, which means "none"
    is_region = np.append(ranges["role"] == "region", False)
    region_row = np.where(is_region[innermost], innermost, -1)
    operations["region"] = _take_or_missing(names, region_row, UNATTRIBUTED)
    step_numbers = np.append(ranges["step"], -1)
    operations["step"] = step_numbers[step_row]
    return operations, ranges.drop(columns="key")


def _roles(ranges: pd.DataFrame) -> pd.Categorical:
    """Return the role of each range according to its name: phase, step or region."""
    roles = {STEP: "step"} | dict.fromkeys(PHASE_NAMES, "phase")
    names = ranges["name"].cat
    by_name = [roles.get(str(name), "region") for name in names.categories]
    return pd.Categorical(by_name)[names.codes]


def join_launches(records: Records) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add launch_start_ns, launch_duration_ns, process and thread to the operations (see ``attribute``).

    Returns:
        A mask of the operations with known launches, and the thread keys and the times in ns of these launches.
    """
    operations = records.operations
    correlation = operations["correlation_id"].to_numpy()
    launch = find_launches(records.process, correlation, records.launches)
    is_known = launch >= 0
    thread, _, start, end = [np.append(values, -1)[launch] for values in records.launches]
    operations["launch_start_ns"] = pd.arrays.IntegerArray(start, ~is_known)
    operations["launch_duration_ns"] = pd.arrays.IntegerArray(end - start, ~is_known)
    operations["process"] = records.process >> 24 & 0xFFFFFF
    operations["thread"] = np.where(is_known, thread & 0xFFFFFF, -1)
    return is_known, thread[is_known], start[is_known]


def _check_span(records: Records) -> None:
    """Check that the times of all threads fit on the single axis that ``enclosing`` uses.

    Raises:
        TraceError: If they don't fit.
    """
    ranges = records.ranges
    thread, _, start, end = records.launches
    times = np.concatenate([start, end, ranges["start_ns"], ranges["end_ns"]])
    keys = np.concatenate([thread, ranges["key"], records.process])
    threads = len(pd.unique(keys))
    first = int(times.min(initial=NEVER))
    last = int(times.max(initial=0))
    span = last - first + 2
    if len(times) and threads * span > NEVER:
        raise TraceError(
            f"{records.path}: {threads} threads have times from {first} to {last} ns; expected"
            " a capture short enough that the times of all threads, one after another, fit into 64 bits"
        )


def open_range(
    ranges: pd.DataFrame, process: np.ndarray, time_ns: np.ndarray, strict: tuple[str, str] | None = None
) -> np.ndarray:
    """Find the range that is open in a process, on any thread, at each time.

    Args:
        ranges: the ranges of one role, for example the steps, with the columns key, start_ns and end_ns.
        process, time_ns: (n,) the process key and the time of each point.
        strict: the file and the role of the ranges, for the error message. If it is None, ranges may overlap, and
            the range that started first counts.

    Returns:
        (n,) the index in ``ranges`` of the open range; -1 if none is open.

    Raises:
        ConservationError: If ``strict`` is given, and two of the ranges overlap.
    """
    rows = outermost(ranges)
    if strict and len(rows) < len(ranges):
        raise _overlap_error(ranges, rows, *strict)
    open_index = np.full(len(time_ns), -1)
    keys, starts, ends = _range_arrays(rows)
    index = rows.index.to_numpy()
    for key in np.unique(keys):
        is_process = keys == key
        is_point = process == key
        times = time_ns[is_point]
        position = np.searchsorted(starts[is_process], times, side="right") - 1
        is_before_end = times < ends[is_process][position]
        is_inside = is_before_end & (position >= 0)
        open_index[is_point] = np.where(is_inside, index[is_process][position], -1)
    return open_index


def _overlap_error(
    ranges: pd.DataFrame, outer_ranges: pd.DataFrame, path: str, role: str
) -> ConservationError:
    """Return an error that names the first range that starts inside another range."""
    inner = ranges.drop(index=outer_ranges.index).iloc[0]
    is_same_process = outer_ranges["key"] & PROCESS == inner["key"] & PROCESS
    is_earlier = outer_ranges["start_ns"] <= inner["start_ns"]
    outer = outer_ranges[is_same_process & is_earlier].iloc[-1]
    return ConservationError(
        f"{path}: {role} '{inner['name']}' begins at {inner['start_ns']} ns within {role} "
        f"'{outer['name']}', which lasts from {outer['start_ns']} to {outer['end_ns']} ns; expected no {role}"
        " within another"
    )


def _range_arrays(ranges: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the process key, start and end of each range. Empty ranges are extended to contain their start."""
    process = ranges["key"].to_numpy("int64") & PROCESS
    start = ranges["start_ns"].to_numpy("int64")
    end = ranges["end_ns"].to_numpy("int64")
    return process, start, np.maximum(end, start + 1)


def outermost(ranges: pd.DataFrame) -> pd.DataFrame:
    """Sort ranges by process and start; drop ranges that start within another range of the same process."""
    process, start, end = _range_arrays(ranges)
    order = np.lexsort((-end, start, process))
    process, start, end = process[order], start[order], end[order]
    is_outermost = np.full(len(order), True)
    firsts = np.flatnonzero(np.diff(process)) + 1
    for rows in np.split(np.arange(len(order)), firsts):
        covered_until = np.maximum.accumulate(end[rows])
        later = rows[1:]
        is_outermost[later] = start[later] >= covered_until[:-1]
    return ranges.iloc[order[is_outermost]]


def _innermost_ranges(path: str, ranges: pd.DataFrame, key: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
    """Add the column ``step`` to ``ranges``; return the innermost range's row for each thread key and time.

    Raises:
        TraceError: If the ranges of a thread cross.
    """
    range_key = ranges["key"].to_numpy()
    starts = ranges["start_ns"].to_numpy()
    ends = ranges["end_ns"].to_numpy()
    innermost, parent, _ = enclosing(range_key, starts, ends, key, time_ns)
    parent_ends = np.append(ends, NEVER)[parent]
    is_crossing = parent_ends < ends
    if is_crossing.any():
        name = ranges["name"][is_crossing.argmax()]
        raise TraceError(
            f"{path}: range '{name:.100}' ends after the range in which"
            " it began; expected the ranges of a thread to nest"
        )
    steps = ranges.loc[ranges["role"] == "step"]
    step_numbers = np.full(len(ranges) + 1, -1)  # the last element is for row -1, which means "no range"
    step_numbers[steps.index] = steps.groupby("process")["start_ns"].rank() - 1
    open_step = open_range(steps, range_key & PROCESS, starts, strict=(path, "step"))
    ranges["step"] = step_numbers[open_step]
    return innermost


def enclosing(
    keys: np.ndarray, start: np.ndarray, end: np.ndarray, point_keys: np.ndarray, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the innermost interval [start, end) around each point, among the intervals with the point's key.

    Args:
        keys, start, end: (n,) int64. Intervals with the same key must nest: any two are disjoint, or one contains
            the other.
        point_keys, points: (m,) int64.

    Returns:
        innermost: (m,) the index of the innermost interval around each point; -1 if there is none.
        parent: (n,) the index of the innermost interval around each interval; -1 if there is none.
        depth: (n,) the number of intervals that contain each interval, including the interval itself.
    """
    n = len(start)
    if not n:
        none = np.full(len(points), -1)
        return none, np.zeros(0, int), np.zeros(0, int)
    # Place all keys one after another on a single time axis, so that no interval spans two keys.
    _, codes = np.unique(np.concatenate([keys, point_keys]), return_inverse=True)
    end = np.maximum(end, start + 1)  # so that empty intervals also open before they close
    first = min(start.min(), points.min(initial=NEVER))
    last = max(end.max(), points.max(initial=end[0]))
    offset = codes * (last - first + 1) - first
    interval_offset, point_offset = offset[:n], offset[n:]
    opened = start + interval_offset
    closed = end + interval_offset

    order = np.lexsort((-closed, opened))  # if several intervals open at once, the longest opens first
    events = np.concatenate([closed[order], opened[order]])
    by_time = np.argsort(events, kind="stable")  # at the same time, closings come first
    events = events[by_time]
    opens = by_time >= n
    interval = np.tile(order, 2)[by_time]
    depth = np.cumsum(np.where(opens, 1, -1))  # after each event
    # After an event, the innermost interval is the last one that opened at the remaining depth.
    by_depth = np.argsort(depth, kind="stable")
    positions = np.where(opens[by_depth], np.arange(2 * n), 0)
    last_opened = np.maximum.accumulate(positions)
    innermost = np.full(2 * n + 1, -1)  # the last element is for event -1, which means "before all events"
    innermost[by_depth] = interval[by_depth][last_opened]
    innermost[:-1][depth == 0] = -1

    openings = np.flatnonzero(opens)
    opened_interval = interval[openings]
    parents: np.ndarray = np.empty(n, int)
    parents[opened_interval] = innermost[openings - 1]
    depths: np.ndarray = np.empty(n, int)
    depths[opened_interval] = depth[openings]
    last_event = np.searchsorted(events, points + point_offset, side="right") - 1
    return innermost[last_event], parents, depths


def find_launches(process: np.ndarray, correlation: np.ndarray, launches: np.ndarray) -> np.ndarray:
    """Return each operation's column in ``launches``, found by process and correlation id; -1 if there is none."""
    thread, launch_correlation, start, _ = launches
    processes = np.concatenate([thread & PROCESS, process])
    _, codes = np.unique(processes, return_inverse=True)
    # Correlation ids are unique within a process; operations without one (-1) match nothing.
    keys = codes << 32 | np.concatenate([launch_correlation, correlation])
    launch_key, operation_key = np.split(keys, [len(thread)])
    # if a runtime call made a driver call with the same id, take the outer call
    order = np.lexsort((start, launch_key))
    sorted_key = launch_key[order]
    positions = np.searchsorted(sorted_key, operation_key)
    launch = np.append(order, -1)[positions]
    is_match = np.append(launch_key, -1)[launch] == operation_key
    return np.where(is_match & (correlation >= 0), launch, -1)


def matching(names: pd.Series, predicate: Callable[[str], object]) -> np.ndarray:
    """Return a mask of the names that satisfy a predicate. The predicate is called only once per distinct name."""
    matches = [bool(predicate(str(name))) for name in names.cat.categories]
    return np.array(matches, bool)[names.cat.codes]


def _take_or_missing(values: pd.Series, rows: np.ndarray, missing: str) -> pd.Categorical:
    """Return ``values[rows]`` for a categorical column, with ``missing`` where the row is -1."""
    categories = values.cat.categories.union([missing], sort=False)
    missing_code = categories.get_loc(missing)
    codes = np.append(values.cat.codes.astype(int), missing_code)
    result = pd.Categorical.from_codes(codes[rows], categories)
    return result.remove_unused_categories()
