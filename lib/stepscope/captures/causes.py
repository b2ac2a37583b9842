"""Why a GPU is idle: what the host did in each idle gap.

A gap ends with an operation, which one thread launched. Idle time is the host's only until that launch
returned; after that, the GPU waits by itself ("device"): for an event, another stream or another GPU. Where
the launch is not in the capture, nobody knows ("unknown"). Until the launch returned, the thread was late,
because it

- did something else for most of a long gap: a call of the driver ("call"), a range, an operator or a frame of
  Python that launched nothing ("host"), or something that the capture does not name ("unnamed");
- had waited for the GPU: the time that it spent in a synchronizing call is time by which it would be ahead
  without that call, and gaps up to so much are the call's ("sync");
- was busy launching ("launch").
"""

import re

import numpy as np
import pandas as pd

from stepscope.captures.account import Device
from stepscope.captures.range_names import phase_of
from stepscope.traces.attribution import LATEST, enclosing

SYNCHRONIZES = re.compile(
    r"Synchronize|cudaMemcpy(?:2D|3D)?$|hip(?:Memcpy|MemcpyWithStream)$"
    r"|cuMemcpy\w*(?<!Async)(?:_v2)?$"
)
LONG_NS = 200_000  # between two launches a host that launches takes less
START_NS = 10_000  # a GPU that is idle starts an operation within this time after its launch
MAX_EXPLAINED = 2_000  # gaps, the longest; in the rest the host launches
MAX_PARTS = 4  # events that explain one gap together
# Frames and operators that say nothing of what a program does.
LIBRARY = re.compile(
    r"^<|^torch/|/torch/|site-packages|/lib/python|^(?:threading|contextlib|runpy|socket"
    r"|selectors|functools)\.py|^nn\.Module|^autograd::|^ProfilerStep|^PyTorch Profiler"
)
COLUMNS = ["cause", "call", "where", "event", "begin", "end", "ms", "head", "next"]
HOST_CAUSES = ("launch", "sync", "call", "host", "unnamed")  # all but the GPU's own and unknown ones
NAMED = ("sync", "call", "host", "unnamed", "device")  # causes whose time is kept apart by place


def pauses(one: Device) -> pd.DataFrame:
    """Explain the idle gaps of the median step.

    Returns:
        a row a gap, or a part of one: cause (device, unknown, sync, call, host, unnamed, launch), call (the
        driver's, of sync and call), where (the operator, range or frame that was open; of device the
        operation that waits; "": none is known), event (which one of the host's it is; -1) and begin, end,
        ms, head and next of ``Device.gaps``. Together they last as long as the gaps.
    """
    gaps = _split(one.gaps)
    long = gaps.index[(gaps["cause"] == "device") & (gaps["end"] - gaps["begin"] >= LONG_NS)]
    gaps.loc[long, "where"] = one.placed["name"].iloc[gaps.loc[long, "next"]].astype(str).to_numpy()
    host = _host_of_windows(one)
    late = gaps[gaps["cause"] == "launch"].nlargest(MAX_EXPLAINED, "ms").sort_values("begin")
    found = [gaps.drop(index=late.index)]
    for part in range(MAX_PARTS):
        if late.empty:
            break
        explained, late = _explain(one, late, host, is_rest=part > 0)
        found.append(explained)
    gaps = pd.concat([*found, late]).sort_values(["begin", "end"], ignore_index=True)
    return gaps.assign(ms=(gaps["end"] - gaps["begin"]) / 1e6)[COLUMNS]


def _host_of_windows(one: Device) -> pd.DataFrame:
    """Return the host's events in the median step, or as long before it, by thread and start."""
    host, windows = one.capture.host, one.windows[one.middle]
    begin, end = int(windows[:, 0].min()), int(windows[:, 1].max())
    earlier = begin - int((windows[:, 1] - windows[:, 0]).max())
    near = (host["process"] == one.process) & (host["end_ns"] >= earlier) & (host["start_ns"] < end)
    return host[near].sort_values(["thread", "start_ns"]).reset_index(drop=True)


def _split(gaps: pd.DataFrame) -> pd.DataFrame:
    """Split gaps into the host's part, until the launch returned, and the GPU's own."""
    begin, end, returned = (gaps[name].to_numpy("int64") for name in ("begin", "end", "returned"))
    known = returned > -LATEST
    host_end = np.where(known, returned.clip(begin, end), begin)
    starts_soon = (host_end > begin) & (end - host_end <= START_NS)  # the rest is what a launch takes
    host_end = np.where(starts_soon, end, host_end)
    host = gaps.assign(end=host_end, cause="launch")[host_end > begin]
    rest = gaps.assign(begin=host_end, cause=np.where(known, "device", "unknown"))[host_end < end]
    rest = rest.assign(head=rest["head"] & (rest["begin"] == begin[rest.index]))
    parts = pd.concat([host, rest]).sort_values(["begin", "end"], ignore_index=True)
    return parts.assign(ms=(parts["end"] - parts["begin"]) / 1e6, call="", where="", event=-1)


def _explain(
    one: Device, late: pd.DataFrame, host: pd.DataFrame, is_rest: bool
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Set the cause of gaps that end with a late launch, in their order, by what the host did.

    Args:
        is_rest: the gaps are what another event left of longer ones, so that no earlier call is their cause.

    Returns:
        the gaps, cut to what explains them; and the rest of those that were cut, with the cause launch.
    """
    rows = one.placed
    following = late["next"].to_numpy()
    thread = np.append(rows["thread"].to_numpy(), -1)[following]
    main = rows.loc[rows["thread"] >= 0, "thread"].mode()
    thread = np.where(thread < 0, main.iloc[0] if len(main) else -1, thread)
    begin, end = (late[name].to_numpy("int64") for name in ("begin", "end"))
    end = np.maximum(begin + 1, np.minimum(end, late["returned"].to_numpy("int64")))
    events, parents = _longest(host, thread, begin, end)
    calls = np.full(len(late), -1) if is_rest else _last_sync(host, thread, begin)
    starts, ends = (host[name].to_numpy("int64") for name in ("start_ns", "end_ns"))
    kinds, names = host["kind"].astype(object).tolist(), host["name"].astype(object).tolist()
    left: dict[int, int] = {}  # of a synchronizing call, the ns by which the host would be ahead without it
    launched = _launched(one)
    launches_nothing = _launch_nothing(launched, host)
    silent = _silent(launched, thread, begin, end)
    found: list[tuple[str, str, str, int]] = []
    for event, call, length, without_launch in zip(
        events.tolist(), calls.tolist(), (end - begin).tolist(), silent.tolist()
    ):
        kind, name = (kinds[event], str(names[event])) if event >= 0 else ("", "")
        fills = (
            event >= 0
            and length >= LONG_NS
            and not SYNCHRONIZES.search(name)
            and (
                launches_nothing[event]
                or kind == "call"
                or (kind == "range" and ends[event] - starts[event] < 2 * length)
            )
        )
        if fills and not _generic(one, kind, name):
            is_call = kind == "call"
            place = _where(one, host, event, parents)
            found.append(("call" if is_call else "host", name if is_call else "", place, event))
        elif call >= 0 and left.setdefault(call, int(ends[call] - starts[call])) * 2 >= length:
            left[call] -= length
            found.append(("sync", str(names[call]), _where(one, host, call, parents), call))
        elif length < LONG_NS:
            found.append(("launch", "", "", -1))
        elif kind == "call" and SYNCHRONIZES.search(name):  # of another stream or GPU, as this one is idle
            found.append(("sync", name, _where(one, host, event, parents), event))
        else:
            launches = event >= 0 and kind == "operator" and not _generic(one, kind, name)
            cause = "unnamed" if without_launch and not launches else "launch"
            found.append((cause, "", _where(one, host, event, parents), -1))
    causes = pd.DataFrame(found, columns=["cause", "call", "where", "event"], index=late.index)
    return _cut(late.assign(**causes), starts, ends)


def _cut(gaps: pd.DataFrame, starts: np.ndarray, ends: np.ndarray) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Cut gaps to the event that explains them, where some time before or after it is left."""
    begin, end = (gaps[name].to_numpy("int64") for name in ("begin", "end"))
    event = gaps["event"].to_numpy()
    lasts = gaps["cause"].isin(["call", "host"]).to_numpy()
    first = np.where(lasts, np.append(starts, 0)[event], begin)
    last = np.where(lasts, np.append(ends, 0)[event], end)
    first = np.where(first - begin >= START_NS, first, begin)
    last = np.where(end - last >= START_NS, last, end)
    unexplained = {"cause": "launch", "call": "", "where": "", "event": -1}
    earlier = gaps.assign(end=first, returned=first, **unexplained)[first > begin]
    later = gaps.assign(begin=last, **unexplained)[last < end]
    return gaps.assign(begin=first, end=last), pd.concat([earlier, later]).sort_values("begin")


def _silent(known: pd.DataFrame, thread: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return in which intervals the thread, for most of the time and for long, launches nothing: between its
    last launch and the one that ends the interval.

    Args:
        known: of ``_launched``.
    """
    found = np.full(len(begin), False)
    for key in np.unique(thread):
        own, points = known[known["thread"] == key], thread == key
        start = own["launch_start_ns"].to_numpy("int64")
        order = np.argsort(start, kind="stable")
        start = start[order]
        returned = (start + own["launch_duration_ns"].to_numpy("int64")[order]).clip(min=-LATEST)
        place = np.searchsorted(start, end[points] - 1, side="right") - 1  # the launch that ends it
        last = np.append(returned, -LATEST)[np.maximum(place - 1, -1)]
        quiet = np.append(start, -LATEST)[place] - np.maximum(last, begin[points])
        # a step's end comes without a launch
        open_end = np.append(returned, -LATEST)[place] < begin[points]
        quiet = np.where(open_end, (end - begin)[points], quiet)
        found[points] = (quiet >= LONG_NS) & (2 * quiet >= (end - begin)[points])
    return found


def _launched(one: Device) -> pd.DataFrame:
    """Return the operations of the process, on any GPU, whose launch is known."""
    rows = one.capture.operations
    known = (rows["process"] == one.process) & rows["launch_start_ns"].notna()
    return rows.loc[known, ["thread", "launch_start_ns", "launch_duration_ns"]]


def _launch_nothing(known: pd.DataFrame, host: pd.DataFrame) -> np.ndarray:
    """Return which of the host's events see nothing launched on their thread; known: of ``_launched``."""
    quiet = np.full(len(host), True)
    for thread, rows in known.groupby("thread"):
        own = np.flatnonzero(host["thread"] == thread)
        times = np.sort(rows["launch_start_ns"].to_numpy("int64"))
        first, last = (np.searchsorted(times, host[name].to_numpy()[own]) for name in ("start_ns", "end_ns"))
        quiet[own] = first == last
    return quiet


def _generic(one: Device, kind: str, name: str) -> bool:
    """Whether something on the host says no more than that it is a step, a phase or autograd's."""
    return (
        name in one.capture.step_names
        or (kind == "range" and phase_of(name) is not None)
        or (kind == "operator" and LIBRARY.search(name) is not None)
    )


def _last_sync(host: pd.DataFrame, thread: np.ndarray, time: np.ndarray) -> np.ndarray:
    """The synchronizing call that began last on each thread before each time; -1 for none."""
    wanted = [name for name in host["name"].unique() if SYNCHRONIZES.search(str(name))]
    calls = host[(host["kind"] == "call") & host["name"].isin(wanted)]
    found = np.full(len(time), -1)
    for key, rows in calls.groupby("thread"):
        own = np.flatnonzero(thread == key)
        at = np.searchsorted(rows["start_ns"], time[own], side="right") - 1
        found[own] = np.where(at >= 0, rows.index.to_numpy()[at], -1)
    return found


def _longest(
    host: pd.DataFrame, thread: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The innermost event on each thread that fills at least half of each interval (it is open in its
    middle); -1 for none. And each event's parent."""
    keys, starts, ends = (host[name].to_numpy("int64") for name in ("thread", "start_ns", "end_ns"))
    found: np.ndarray
    found, parents, _ = enclosing(keys, starts, ends, thread.astype("int64"), (begin + end) // 2)
    starts, ends, parents = np.append(starts, 0), np.append(ends, 0), np.append(parents, -1)
    while True:
        filled = np.minimum(ends[found], end) - np.maximum(starts[found], begin)
        short = (found >= 0) & (filled * 2 < end - begin)
        if not short.any():
            return found, parents
        found = np.where(short, parents[found], found)


def _where(one: Device, host: pd.DataFrame, event: int, parents: np.ndarray) -> str:
    """Return the place of an event: the outermost operator around it, else the event itself, and the
    innermost range and line of the program's own Python; "" where nothing but the step is known."""
    if event < 0:
        return ""
    operator = frame = span = ""
    kind, name = host.at[event, "kind"], str(host.at[event, "name"])
    is_step = name in one.capture.step_names or name.startswith("ProfilerStep")
    innermost = "" if kind == "call" or is_step else _short(name)
    while event >= 0:
        kind, name = host.at[event, "kind"], str(host.at[event, "name"])
        if LIBRARY.search(name) or name in one.capture.step_names:
            pass
        elif kind == "operator":
            operator = name
        elif kind == "frame" and not frame:
            frame = _short(name)
        elif kind == "range" and not span:
            span = name
        event = int(parents[event])
    return ", ".join(dict.fromkeys(filter(None, (operator or frame or span or innermost, span, frame))))


def _short(frame: str) -> str:
    """A frame with the last folder of its file: "a/b/c/train.py(3): step" is "train.py(3): step"."""
    return re.sub(r"^\S*/(?=[^/\s]+\.py\()", "", frame)


def waits(found: pd.DataFrame, steps: int) -> pd.DataFrame:
    """Sum gaps by cause, call and where: ms a step, count (of calls and events, or of gaps) and the longest,
    ms; the most first. Launches and unknown causes have no place."""
    place = found["where"].where(found["cause"].isin(NAMED), "")
    groups = found.assign(where=place).groupby(["cause", "call", "where"], sort=False)
    rows = groups.agg(
        ms=("ms", "sum"), gaps=("ms", "size"), events=("event", "nunique"), longest_ms=("ms", "max")
    ).reset_index()
    by_event = rows["cause"].isin(["sync", "call", "host"])
    rows["count"] = rows.pop("events").where(by_event, rows.pop("gaps")) / steps
    return rows.assign(ms=rows["ms"] / steps).sort_values("ms", ascending=False, ignore_index=True)
