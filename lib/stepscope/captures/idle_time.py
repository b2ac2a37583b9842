"""Explain why a GPU is idle, based on what the host did during each idle gap.

A gap ends with an operation that some thread launched. The host causes the gap only until that launch
returns. After that, the GPU itself waits for an event, another stream or another GPU ("device"). If the
capture omits the launch, the cause is "unknown". The thread launched the operation late because it

- did something else for most of a long gap: it was in a driver call ("call"), in a range, operator or Python
  frame that launched nothing ("host"), or in code that the capture does not name ("unnamed");
- had waited for the GPU earlier ("sync"): without the synchronizing call, the thread would have been ahead by the
  time that it spent in the call, so the call explains later gaps, up to this time in total;
- was busy launching ("launch").
"""

import re

import numpy as np
import pandas as pd

from stepscope.captures.range_names import phase_of
from stepscope.captures.step_breakdown import Device
from stepscope.traces.attribution import LATEST, enclosing

SYNCHRONIZES = re.compile(
    r"Synchronize|cudaMemcpy(?:2D|3D)?$|hip(?:Memcpy|MemcpyWithStream)$"
    r"|cuMemcpy\w*(?<!Async)(?:_v2)?$"
)
MIN_LONG_GAP_NS = 200_000  # a host that is busy launching leaves shorter gaps
MAX_START_LATENCY_NS = 10_000  # maximum time from a launch until an idle GPU starts the operation
MAX_EXPLAINED_GAPS = 2_000  # maximum number of gaps to explain, longest first; all others count as "launch"
MAX_PARTS = 4  # maximum number of host events that together explain one gap
# Frames and operators that don't show what the program itself does.
LIBRARY = re.compile(
    r"^<|^torch/|/torch/|site-packages|/lib/python|^(?:threading|contextlib|runpy|socket"
    r"|selectors|functools)\.py|^nn\.Module|^autograd::|^ProfilerStep|^PyTorch Profiler"
)
COLUMNS = ["cause", "call", "where", "event", "begin", "end", "ms", "head", "next"]
HOST_CAUSES = ("launch", "sync", "call", "host", "unnamed")  # all causes except "device" and "unknown"
CAUSES_WITH_PLACE = ("sync", "call", "host", "unnamed", "device")  # causes that are reported per place


def explain_gaps(gpu: Device) -> pd.DataFrame:
    """Explain the median step's idle gaps.

    Returns:
        A row per gap or part of a gap; a gap's parts add up to the gap. Columns: cause (device, unknown, sync,
        call, host, unnamed, launch); call (the driver call, for the causes sync and call); where (the open
        operator, range or frame; for the cause device, the operation that waits; "" if unknown); event (the
        host event's number; -1 if there is none); and begin, end, ms, head and next as in ``Device.gaps``.
    """
    gaps = _split_at_launch_return(gpu.gaps)
    is_long = gaps["end"] - gaps["begin"] >= MIN_LONG_GAP_NS
    long_gaps = gaps.index[(gaps["cause"] == "device") & is_long]
    waiting = gpu.classified_ops["name"].iloc[gaps.loc[long_gaps, "next"]]
    gaps.loc[long_gaps, "where"] = waiting.astype(str).to_numpy()
    host = _host_events_near_median(gpu)
    late = gaps[gaps["cause"] == "launch"].nlargest(MAX_EXPLAINED_GAPS, "ms").sort_values("begin")
    parts = [gaps.drop(index=late.index)]
    for pass_number in range(MAX_PARTS):
        if late.empty:
            break
        explained, late = _assign_causes(gpu, late, host, is_rest=pass_number > 0)
        parts.append(explained)
    gaps = pd.concat([*parts, late]).sort_values(["begin", "end"], ignore_index=True)
    return gaps.assign(ms=(gaps["end"] - gaps["begin"]) / 1e6)[COLUMNS]


def _host_events_near_median(gpu: Device) -> pd.DataFrame:
    """Return the host events near the median step, ordered by thread and start.

    The result contains the process's events that overlap the median step, or one step's length of time before it.
    """
    host, windows = gpu.capture.host, gpu.windows[gpu.median_indices]
    begin, end = int(windows[:, 0].min()), int(windows[:, 1].max())
    earlier = begin - int((windows[:, 1] - windows[:, 0]).max())
    is_near = (host["process"] == gpu.process) & (host["end_ns"] >= earlier) & (host["start_ns"] < end)
    return host[is_near].sort_values(["thread", "start_ns"]).reset_index(drop=True)


def _split_at_launch_return(gaps: pd.DataFrame) -> pd.DataFrame:
    """Split each gap at the time when the launch of the next operation returned.

    The host causes the part before that time, and the GPU causes the rest.
    """
    begin, end, returned = (gaps[name].to_numpy("int64") for name in ("begin", "end", "returned"))
    is_known = returned > -LATEST
    host_end = np.where(is_known, returned.clip(begin, end), begin)
    starts_soon = (host_end > begin) & (end - host_end <= MAX_START_LATENCY_NS)  # the rest is launch latency
    host_end = np.where(starts_soon, end, host_end)
    host = gaps.assign(end=host_end, cause="launch")[host_end > begin]
    rest = gaps.assign(begin=host_end, cause=np.where(is_known, "device", "unknown"))[host_end < end]
    rest = rest.assign(head=rest["head"] & (rest["begin"] == begin[rest.index]))
    parts = pd.concat([host, rest]).sort_values(["begin", "end"], ignore_index=True)
    return parts.assign(ms=(parts["end"] - parts["begin"]) / 1e6, call="", where="", event=-1)


def _assign_causes(
    gpu: Device, late: pd.DataFrame, host: pd.DataFrame, is_rest: bool
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Determine from the host's activity what causes each gap that ends with a late launch.

    Args:
        late: the gaps that end with a late launch.
        host: the host events, ordered by thread and start.
        is_rest: whether the gaps are the remaining parts of longer gaps. No earlier call can have caused such
            parts.

    Returns:
        The gaps, cut to the events that explain them, and the remaining parts of the gaps. The preliminary cause
        of a remaining part is launch.
    """
    rows = gpu.classified_ops
    following = late["next"].to_numpy()
    thread = np.append(rows["thread"].to_numpy(), -1)[following]
    main_threads = rows.loc[rows["thread"] >= 0, "thread"].mode()
    thread = np.where(thread < 0, main_threads.iloc[0] if len(main_threads) else -1, thread)
    begin, end = (late[name].to_numpy("int64") for name in ("begin", "end"))
    end = np.maximum(begin + 1, np.minimum(end, late["returned"].to_numpy("int64")))
    events, parents = _longest_events(host, thread, begin, end)
    calls = np.full(len(late), -1) if is_rest else _last_sync_calls(host, thread, begin)
    starts, ends = (host[name].to_numpy("int64") for name in ("start_ns", "end_ns"))
    kinds, names = host["kind"].astype(object).tolist(), host["name"].astype(object).tolist()
    remaining_ns: dict[int, int] = {}  # for each sync call, how many ns of later gaps it can still explain
    known_launches = _known_launches(gpu)
    without_launches = _are_without_launches(known_launches, host)
    is_silent = _is_thread_silent(known_launches, thread, begin, end)
    records: list[tuple[str, str, str, int]] = []
    for event, call, length, thread_is_silent in zip(
        events.tolist(), calls.tolist(), (end - begin).tolist(), is_silent.tolist()
    ):
        kind, name = (kinds[event], str(names[event])) if event >= 0 else ("", "")
        fills_gap = (
            event >= 0
            and length >= MIN_LONG_GAP_NS
            and not SYNCHRONIZES.search(name)
            and (
                without_launches[event]
                or kind == "call"
                or (kind == "range" and ends[event] - starts[event] < 2 * length)
            )
        )
        if fills_gap and not _is_generic(gpu, kind, name):
            is_call = kind == "call"
            location = _location(gpu, host, event, parents)
            records.append(("call" if is_call else "host", name if is_call else "", location, event))
        elif call >= 0 and remaining_ns.setdefault(call, int(ends[call] - starts[call])) * 2 >= length:
            remaining_ns[call] -= length
            records.append(("sync", str(names[call]), _location(gpu, host, call, parents), call))
        elif length < MIN_LONG_GAP_NS:
            records.append(("launch", "", "", -1))
        elif kind == "call" and SYNCHRONIZES.search(name):
            # this GPU is idle, so the call must be waiting for another stream or another GPU
            records.append(("sync", name, _location(gpu, host, event, parents), event))
        else:
            is_launching_operator = event >= 0 and kind == "operator" and not _is_generic(gpu, kind, name)
            cause = "unnamed" if thread_is_silent and not is_launching_operator else "launch"
            records.append((cause, "", _location(gpu, host, event, parents), -1))
    causes = pd.DataFrame(records, columns=["cause", "call", "where", "event"], index=late.index)
    return _cut_to_events(late.assign(**causes), starts, ends)


def _cut_to_events(
    gaps: pd.DataFrame, starts: np.ndarray, ends: np.ndarray
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Cut gaps to the events that explain them; return these gaps, and the parts before and after the events."""
    begin, end = (gaps[name].to_numpy("int64") for name in ("begin", "end"))
    event = gaps["event"].to_numpy()
    is_event = gaps["cause"].isin(["call", "host"]).to_numpy()
    first = np.where(is_event, np.append(starts, 0)[event], begin)
    last = np.where(is_event, np.append(ends, 0)[event], end)
    first = np.where(first - begin >= MAX_START_LATENCY_NS, first, begin)
    last = np.where(end - last >= MAX_START_LATENCY_NS, last, end)
    unexplained = {"cause": "launch", "call": "", "where": "", "event": -1}
    earlier = gaps.assign(end=first, returned=first, **unexplained)[first > begin]
    later = gaps.assign(begin=last, **unexplained)[last < end]
    return gaps.assign(begin=first, end=last), pd.concat([earlier, later]).sort_values("begin")


def _is_thread_silent(
    launches: pd.DataFrame, thread: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Return a mask of the intervals in which the thread launches nothing for a long time.

    This time begins with the thread's previous launch, and ends with the launch that ends the interval. It must
    last at least MIN_LONG_GAP_NS and cover at least half of the interval.
    """
    is_silent = np.full(len(begin), False)
    for key in np.unique(thread):
        rows, is_thread = launches[launches["thread"] == key], thread == key
        start = rows["launch_start_ns"].to_numpy("int64")
        order = np.argsort(start, kind="stable")
        start = start[order]
        returned = (start + rows["launch_duration_ns"].to_numpy("int64")[order]).clip(min=-LATEST)
        # the launch that ends the interval
        position = np.searchsorted(start, end[is_thread] - 1, side="right") - 1
        last_returned = np.append(returned, -LATEST)[np.maximum(position - 1, -1)]
        quiet_ns = np.append(start, -LATEST)[position] - np.maximum(last_returned, begin[is_thread])
        # a gap that lasts until the end of the step has no such launch
        ends_without_launch = np.append(returned, -LATEST)[position] < begin[is_thread]
        quiet_ns = np.where(ends_without_launch, (end - begin)[is_thread], quiet_ns)
        is_silent[is_thread] = (quiet_ns >= MIN_LONG_GAP_NS) & (2 * quiet_ns >= (end - begin)[is_thread])
    return is_silent


def _known_launches(gpu: Device) -> pd.DataFrame:
    """Return the launches in the capture that belong to the process's operations, on all GPUs."""
    rows = gpu.capture.operations
    known = (rows["process"] == gpu.process) & rows["launch_start_ns"].notna()
    return rows.loc[known, ["thread", "launch_start_ns", "launch_duration_ns"]]


def _are_without_launches(launches: pd.DataFrame, host: pd.DataFrame) -> np.ndarray:
    """Return a mask of the host events during which the event's thread launches nothing."""
    is_without = np.full(len(host), True)
    for thread, rows in launches.groupby("thread"):
        event_indices = np.flatnonzero(host["thread"] == thread)
        times = np.sort(rows["launch_start_ns"].to_numpy("int64"))
        events = host.iloc[event_indices]
        first = np.searchsorted(times, events["start_ns"].to_numpy())
        last = np.searchsorted(times, events["end_ns"].to_numpy())
        is_without[event_indices] = first == last
    return is_without


def _is_generic(gpu: Device, kind: str, name: str) -> bool:
    """Return whether a host event's name only denotes a step, a phase, an autograd node or library code."""
    return (
        name in gpu.capture.step_names
        or (kind == "range" and phase_of(name) is not None)
        or (kind == "operator" and LIBRARY.search(name) is not None)
    )


def _last_sync_calls(host: pd.DataFrame, thread: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Return the index of the last synchronizing call that the thread made before each time, or -1."""
    sync_names = [name for name in host["name"].unique() if SYNCHRONIZES.search(str(name))]
    calls = host[(host["kind"] == "call") & host["name"].isin(sync_names)]
    last_calls = np.full(len(time), -1)
    for key, rows in calls.groupby("thread"):
        is_thread = np.flatnonzero(thread == key)
        positions = np.searchsorted(rows["start_ns"], time[is_thread], side="right") - 1
        last_calls[is_thread] = np.where(positions >= 0, rows.index.to_numpy()[positions], -1)
    return last_calls


def _longest_events(
    host: pd.DataFrame, thread: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the innermost event that is open at each interval's midpoint and covers at least half of the interval.

    Returns:
        The index of each interval's event (-1 if there is none), and the parent of each host event.
    """
    threads, starts, ends = (host[name].to_numpy("int64") for name in ("thread", "start_ns", "end_ns"))
    events: np.ndarray
    events, parents, _ = enclosing(threads, starts, ends, thread.astype("int64"), (begin + end) // 2)
    starts, ends, parents = np.append(starts, 0), np.append(ends, 0), np.append(parents, -1)
    while True:
        overlap = np.minimum(ends[events], end) - np.maximum(starts[events], begin)
        is_too_short = (events >= 0) & (overlap * 2 < end - begin)
        if not is_too_short.any():
            return events, parents
        events = np.where(is_too_short, parents[events], events)


def _location(gpu: Device, host: pd.DataFrame, event: int, parents: np.ndarray) -> str:
    """Describe an event's location: its outermost operator, innermost range and innermost line of Python code.

    If no operator is open, the description begins with the frame, the range or the event itself. It is "" if only
    the step is known.
    """
    if event < 0:
        return ""
    operator = frame = range_name = ""
    kind, name = host.at[event, "kind"], str(host.at[event, "name"])
    is_step = name in gpu.capture.step_names or name.startswith("ProfilerStep")
    innermost = "" if kind == "call" or is_step else _short_frame(name)
    while event >= 0:
        kind, name = host.at[event, "kind"], str(host.at[event, "name"])
        if LIBRARY.search(name) or name in gpu.capture.step_names:
            pass
        elif kind == "operator":
            operator = name
        elif kind == "frame" and not frame:
            frame = _short_frame(name)
        elif kind == "range" and not range_name:
            range_name = name
        event = int(parents[event])
    place = operator or frame or range_name or innermost
    return ", ".join(dict.fromkeys(filter(None, (place, range_name, frame))))


def _short_frame(frame: str) -> str:
    """Remove the folders from a frame's path: "a/b/c/train.py(3): step" becomes "train.py(3): step"."""
    return re.sub(r"^\S*/(?=[^/\s]+\.py\()", "", frame)


def sum_by_cause(gaps: pd.DataFrame, steps: int) -> pd.DataFrame:
    """Sum the durations of gaps, grouped by cause, call and where; sort the sums in descending order.

    Returns:
        A table with the columns cause, call, where ("" for the causes launch and unknown), ms (per step),
        longest_ms, and count (per step: the number of events for the causes sync, call and host, and the number of
        gaps for all other causes).
    """
    place = gaps["where"].where(gaps["cause"].isin(CAUSES_WITH_PLACE), "")
    groups = gaps.assign(where=place).groupby(["cause", "call", "where"], sort=False)
    rows = groups.agg(
        ms=("ms", "sum"), gaps=("ms", "size"), events=("event", "nunique"), longest_ms=("ms", "max")
    ).reset_index()
    counts_events = rows["cause"].isin(["sync", "call", "host"])
    rows["count"] = rows.pop("events").where(counts_events, rows.pop("gaps")) / steps
    return rows.assign(ms=rows["ms"] / steps).sort_values("ms", ascending=False, ignore_index=True)
