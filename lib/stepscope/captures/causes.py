"""Why a GPU waits: what the host did in each of its pauses.

A pause ends with an operation, which one thread launched. Was it launched before the pause began, the GPU
waited by itself ("device"). Else that thread was late, because it
- did something else for most of a long pause: a call of the driver ("call"), or a range, an operator or a
  frame of Python that launched nothing ("host");
- had waited for the GPU: the time that it spent in a synchronising call is time by which it would be ahead
  without that call, and pauses up to so much are the call's ("sync");
- was busy launching ("launch").
"""

import re

import numpy as np
import pandas as pd

from stepscope.captures.account import Device
from stepscope.captures.range_names import phase_of
from stepscope.traces.attribution import enclosing

SYNCHRONIZES = re.compile(
    r"Synchronize|cudaMemcpy(?:2D|3D)?$|hip(?:Memcpy|MemcpyWithStream)$"
    r"|cuMemcpy\w*(?<!Async)(?:_v2)?$"
)
LONG_NS = 200_000  # between two launches a host that launches takes less
MOST = 2_000  # pauses that are looked into, the longest; the rest is launching
# Frames and operators that say nothing of what a program does.
LIBRARY = re.compile(
    r"^<|^torch/|/torch/|site-packages|/lib/python|^(?:threading|contextlib|runpy|socket"
    r"|selectors|functools)\.py|^nn\.Module|^autograd::|^ProfilerStep|^PyTorch Profiler"
)
COLUMNS = ["cause", "call", "where", "event", "begin", "end", "ms", "head", "next"]


def pauses(one: Device) -> pd.DataFrame:
    """A row a pause of the median step: cause (device, sync, call, host, launch), call (the driver's, of sync
    and call), where (the operator, range or frame that was open; "": none is known), event (which one of the
    host's it is; -1) and begin, end, ms, head and next of ``Device.gaps``."""
    gaps = one.gaps.nlargest(MOST, "ms").sort_values("begin").reset_index(drop=True)
    gaps = gaps.assign(cause=np.where(gaps["late"], "launch", "device"), call="", where="", event=-1)
    host = one.capture.host
    host = host[host["process"] == one.all_operations["process"].iloc[0]]
    late = gaps.index[gaps["late"]]
    if len(host) and len(late):
        _explain(one, gaps, late, host.sort_values(["thread", "start_ns"]).reset_index(drop=True))
    return gaps[COLUMNS]


def _explain(one: Device, gaps: pd.DataFrame, late: pd.Index, host: pd.DataFrame) -> None:
    """Fill in what the host tells of the pauses that are late, in their order."""
    rows = one.placed
    following = gaps.loc[late, "next"].to_numpy()
    thread = np.append(rows["thread"].to_numpy(), -1)[following]
    main = rows.loc[rows["thread"] >= 0, "thread"].mode()
    thread = np.where(thread < 0, main.iloc[0] if len(main) else -1, thread)
    launched = rows["launch_start_ns"] + rows["launch_duration_ns"]
    launch = np.append(launched.to_numpy("int64", na_value=-1), -1)[following]
    begin, end = (gaps.loc[late, name].to_numpy() for name in ("begin", "end"))
    end = np.where(launch > begin, np.minimum(launch, end), end)
    doing, parents = _longest(host, thread, begin, end)
    waited = _last_sync(host, thread, begin)
    kinds, starts, ends = host["kind"].astype(str), host["start_ns"], host["end_ns"]
    left: dict[int, int] = {}  # of a synchronising call the ns by which the host would be ahead without it
    quiet = _launch_nothing(one, host)
    for at, event, call, length in zip(late, doing, waited, end - begin):
        name = str(host.at[event, "name"]) if event >= 0 else ""
        other = (
            event >= 0
            and length >= LONG_NS
            and not SYNCHRONIZES.search(name)
            and (
                quiet[event]
                or kinds[event] == "call"
                or (kinds[event] == "range" and ends[event] - starts[event] < 2 * length)
            )
        )
        if other and not _generic(one, kinds[event], name):
            named = name if kinds[event] == "call" else ""
            gaps.loc[at, ["cause", "call", "where", "event"]] = (
                "call" if named else "host",
                named,
                _where(host, event, parents),
                event,
            )
        elif call >= 0 and left.setdefault(call, int(ends[call] - starts[call])) * 2 >= length:
            left[call] -= length
            gaps.loc[at, ["cause", "call", "where", "event"]] = (
                "sync",
                str(host.at[call, "name"]),
                _where(host, call, parents),
                call,
            )
        elif event >= 0 and length >= LONG_NS:
            gaps.loc[at, "where"] = _where(host, event, parents)


def _launch_nothing(one: Device, host: pd.DataFrame) -> np.ndarray:
    """Which of the host's events see nothing launched on their thread."""
    known = one.placed[one.placed["launch_start_ns"].notna()]
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
        name in one.capture.steps
        or (kind == "range" and phase_of(name) is not None)
        or (kind == "operator" and LIBRARY.search(name) is not None)
    )


def _last_sync(host: pd.DataFrame, thread: np.ndarray, time: np.ndarray) -> np.ndarray:
    """The synchronising call that began last on each thread before each time; -1 for none."""
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


def _where(host: pd.DataFrame, event: int, parents: np.ndarray) -> str:
    """The outermost operator around an event, else itself, and the innermost range and own line of Python."""
    operator = frame = span = ""
    innermost = "" if host.at[event, "kind"] == "call" else _short(str(host.at[event, "name"]))
    while event >= 0:
        kind, name = host.at[event, "kind"], str(host.at[event, "name"])
        if kind == "operator" and not LIBRARY.search(name):
            operator = name
        elif kind == "frame" and not frame and not LIBRARY.search(name):
            frame = _short(name)
        elif kind == "range" and not span and not LIBRARY.search(name):
            span = name
        event = int(parents[event])
    return ", ".join(dict.fromkeys(filter(None, (operator or frame or span or innermost, span, frame))))


def _short(frame: str) -> str:
    """A frame with the last folder of its file: "a/b/c/train.py(3): step" is "train.py(3): step"."""
    return re.sub(r"^\S*/(?=[^/\s]+\.py\()", "", frame)


def waits(found: pd.DataFrame, steps: int) -> pd.DataFrame:
    """Pauses by cause, call and where: ms a step, count (of calls and things, or of pauses) and the longest,
    ms; the most first."""
    place = found["where"].where(found["cause"].isin(["sync", "call", "host"]), "")
    groups = found.assign(where=place).groupby(["cause", "call", "where"], sort=False)
    rows = groups.agg(
        ms=("ms", "sum"), pauses=("ms", "size"), events=("event", "nunique"), longest_ms=("ms", "max")
    ).reset_index()
    several = rows["cause"].isin(["sync", "call", "host"])
    rows["count"] = rows.pop("events").where(several, rows.pop("pauses")) / steps
    return rows.assign(ms=rows["ms"] / steps).sort_values("ms", ascending=False, ignore_index=True)
