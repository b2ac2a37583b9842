"""Report what a PyTorch memory snapshot shows: the peak, what holds it, and which line allocated that.

``torch.cuda.memory._dump_snapshot`` writes a pickle of dicts, lists, texts and numbers. A pickle can run any
code when it is loaded, so this one is loaded without classes: a file that names one is refused.
"""

import io
import pickle
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stepscope.captures.lines import Line, clean
from stepscope.report.tables import number
from stepscope.traces.attribution import TraceError
from stepscope.traces.torch_trace import opened

MAX_BYTES = 2**29  # of a snapshot's pickle
OBJECT_BYTES = 40  # memory for each byte of a pickle, at most
EXPECTED = "expected a memory snapshot that torch.cuda.memory._dump_snapshot wrote"
TOP = 6  # lines that are named
NEVER = np.iinfo(np.int64).max
LIBRARY = re.compile(r"(^|/)(site|dist)-packages/|^torch/|/lib/python3|^<frozen")
PYTHON = re.compile(r"\.py$|^<|ipykernel")
NODE = re.compile(r"\b(\w+Backward\w*)::apply")  # among C++ frames
UNKNOWN, OLDER = "no stack was recorded", "allocated before the history begins"
COLUMNS = ["size", "allocated_at", "freed_at", "file", "line", "function"]


class _DataOnly(pickle.Unpickler):
    """An unpickler for plain data."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is code")


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle of protocol 2 or later, by its first bytes."""
    if not path.is_file():
        return False
    with opened(path) as stream:
        head = stream.read(2)
    return len(head) == 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def read_snapshot(path: Path) -> dict[str, Any]:
    """Read a memory snapshot without executing anything from it.

    Returns:
        its segments and device_traces, as PyTorch documents them.

    Raises:
        TraceError: the file is too large, cut off, or no memory snapshot.
    """
    with opened(path) as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise TraceError(f"{path}: has more than {MAX_BYTES:,} bytes, {EXPECTED} with fewer max_entries")
    try:
        with _limited_memory(OBJECT_BYTES * len(data) + 2**30):
            found = _DataOnly(io.BytesIO(data)).load()
    except MemoryError:
        raise TraceError(f"{path}: needs more memory than its size explains, {EXPECTED}") from None
    except EOFError:
        raise TraceError(f"{path}: the file is cut off, {EXPECTED}") from None
    except Exception as error:  # noqa: BLE001  what an unpickler raises depends on the damage
        reason = f"{clean(error, 200)} ({type(error).__name__})"
        raise TraceError(f"{path}: cannot be read as plain data: {reason}, {EXPECTED}") from None
    if isinstance(found, list):  # torch.cuda.memory_snapshot() returns the segments alone
        found = {"segments": found, "device_traces": []}
    parts = [found.get(key) if isinstance(found, dict) else None for key in ("segments", "device_traces")]
    if not all(isinstance(part, list) for part in parts):
        raise TraceError(f"{path}: is a pickle without the lists segments and device_traces, {EXPECTED}")
    return found


@contextmanager
def _limited_memory(extra_bytes: int) -> Iterator[None]:
    """Let this process map so many more bytes: a few bytes of a pickle can ask for any amount of memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not on Linux
        yield
        return
    limit = pages * resource.getpagesize() + extra_bytes
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def allocations_of(path: Path, snapshot: dict[str, Any], device: int) -> pd.DataFrame:
    """Every allocation of a device that the snapshot shows, a row each, in :data:`COLUMNS`.

    ``size`` is what was asked for, in bytes. ``allocated_at`` and ``freed_at`` are places in the device's
    history: -1 where the allocation is older than the history, and NEVER where it lives at the end. ``file``,
    ``line`` and ``function`` are the innermost Python frame outside of installed packages, or, where all are
    inside, the innermost one.

    Raises:
        TraceError: an entry is not of the form that PyTorch documents.
    """
    events = _events(snapshot, device)
    places: dict[int, tuple[str, int, str]] = {}  # by the list of frames, which events share
    rows: list[list[Any]] = []
    live: dict[int, int] = {}

    def add(size: int, begin: int, end: int, frames: Any) -> None:
        key = id(frames) if frames else begin < 0
        if key not in places:
            places[key] = _place(frames) if frames else ("", 0, OLDER if begin < 0 and events else UNKNOWN)
        if not 0 <= size < 2**60:
            raise ValueError(f"size {size}")
        rows.append([int(size), begin, end, *places[key]])

    with _documented(path):
        for event, entry in enumerate(events):
            action, address = entry["action"], int(entry.get("addr", 0))
            if action == "alloc":
                if address in live:  # its end was not recorded
                    rows[live[address]][2] = event
                live[address] = len(rows)
                add(entry["size"], event, NEVER, entry.get("frames"))
            elif action == "free_requested" and address in live:
                rows[live.pop(address)][2] = event
            elif action == "free_requested":
                add(entry["size"], -1, event, None)
        for block in _blocks(snapshot, device):
            if block["state"] == "active_allocated" and block["address"] not in live:
                add(block.get("requested_size", block["size"]), -1, NEVER, _frames_of_block(block))
    return pd.DataFrame(rows, columns=COLUMNS)


@contextmanager
def _documented(path: Path) -> Iterator[None]:
    """Raise TraceError where an entry is not of the form that PyTorch documents."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        reason = f"{type(error).__name__} {clean(error)}"
        raise TraceError(f"{path}: has an entry of another form ({reason}), {EXPECTED}") from None


def _events(snapshot: dict[str, Any], device: int) -> list[dict]:
    """The history of a device; empty where none was recorded."""
    traces = snapshot["device_traces"]
    return traces[device] if device < len(traces) else []


def _blocks(snapshot: dict[str, Any], device: int) -> Iterator[dict]:
    """The blocks of a device's segments. Snapshots of PyTorch before 2.1 give them no address."""
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        address = segment.get("address", 0)
        for block in segment["blocks"]:
            yield {"address": address} | block
            address += block["size"]


def _frames_of_block(block: dict) -> Any:
    history = block.get("history")  # of PyTorch before 2.1
    return block.get("frames") or (history[0].get("frames") if history else None) or ()


def _place(frames: Any) -> tuple[str, int, str]:
    """The file, line and function that allocated, by the frames from the innermost outwards."""
    python = [frame for frame in frames if PYTHON.search(str(frame.get("filename", "")))]
    own = [frame for frame in python if not LIBRARY.search(str(frame["filename"]))]
    for frame in (own or python)[:1]:
        return str(frame["filename"]), int(frame.get("line", 0)), str(frame.get("name", ""))
    for frame in frames:
        if node := NODE.search(str(frame.get("name", ""))):
            return "", 0, f"autograd's {node[1]}"
    return "", 0, "a thread without Python frames, such as autograd's"


def snapshot_lines(path: Path, device: int | None = None, csv: Path | str | None = None) -> list[Line]:
    """Report a memory snapshot, a line for each fact.

    Args:
        device: the GPU; None takes the one with the most memory allocated at its peak.
        csv: where the allocations go, one for each line.

    Raises:
        TraceError: the file is no memory snapshot, or has nothing of such a GPU.
        OSError: the CSV cannot be written.
    """
    snapshot = read_snapshot(path)
    with _documented(path):
        numbers = {int(segment.get("device", 0)) for segment in snapshot["segments"]}
        numbers |= {place for place, trace in enumerate(snapshot["device_traces"]) if trace}
    tables = {one: allocations_of(path, snapshot, one) for one in sorted(numbers)}
    tables = {one: table for one, table in tables.items() if len(table)}
    if not tables:
        raise TraceError(f"{path}: holds no allocations, {EXPECTED} (after _record_memory_history)")
    if device is not None and device not in tables:
        raise TraceError(f"{path}: has no allocations of GPU {device}, expected one of {[*tables]}")
    most = device if device is not None else max(tables, key=lambda one: peak_of(tables[one])[1])
    if csv is not None:
        tables[most].replace({"freed_at": {NEVER: -1}}).to_csv(csv, index=False)
    with _documented(path):
        return _lines(snapshot, most, tables[most], len(tables))


def peak_of(table: pd.DataFrame) -> tuple[int, int]:
    """The place in the history, and the bytes, of the most memory that is allocated at once; -1: before it."""
    begin, end = table["allocated_at"].to_numpy(), table["freed_at"].to_numpy()
    ended = end < NEVER
    places = np.concatenate([begin, end[ended]])
    changes = np.concatenate([table["size"], -table["size"].to_numpy()[ended]])
    level = np.zeros(places.max() + 2, np.int64)
    np.add.at(level, places + 1, changes)
    level = level.cumsum()
    place = int(level.argmax())
    return place - 1, int(level[place])


def _lines(snapshot: dict[str, Any], device: int, table: pd.DataFrame, devices: int) -> list[Line]:
    place, peak = peak_of(table)
    unit, scale = ("GiB", 2**30) if peak >= 2**30 else ("MiB", 2**20)
    held = table[(table["allocated_at"] <= place) & (table["freed_at"] > place)]
    events = _events(snapshot, device)
    reserved = [
        segment.get("total_size", 0) for segment in snapshot["segments"] if segment.get("device", 0) == device
    ]
    lines = [_header(table, device, devices, len(events))]

    def size(value: float) -> str:
        return number(value / scale, unit)

    known = (table["allocated_at"] >= 0).any()
    at_peak = sum(reserved) - _reserved_later(events, place)
    lines.append(
        Line(
            "peak" if known else "allocated",
            f"{size(peak)} in {len(held):,} allocations, of {size(at_peak)} reserved",
            {"peak_bytes": peak, "allocations": len(held), "reserved_bytes": at_peak, "event": place},
        )
    )
    lines += _holders(held, peak, unit, scale)
    largest = held.loc[held["size"].idxmax()]
    values = {"largest_bytes": int(largest["size"])}
    lines.append(Line("largest", f"{size(largest['size'])} at once: {_place_text(largest)}", values))
    old = int(held.loc[held["allocated_at"] < 0, "size"].sum())
    if known and old:
        text = f"{size(old)} ({number(old / peak, '%')}) of it was allocated before the history begins"
        lines.append(Line("older", text, {"older_bytes": old}))
    if known:
        end = int(table.loc[table["freed_at"] == NEVER, "size"].sum())
        text = f"{size(end)} allocated, {size(sum(reserved))} reserved"
        lines.append(Line("at the end", text, {"end_bytes": end, "end_reserved_bytes": sum(reserved)}))
    failed = [entry for entry in events if entry["action"] == "oom"]
    if failed:
        asked, free = (int(failed[-1].get(key, 0)) for key in ("size", "device_free"))
        text = f"{len(failed):,} x; the last asked for {size(asked)} with {size(free)} free on the GPU"
        lines.append(
            Line("out of memory", text, {"failures": len(failed), "asked_bytes": asked, "free_bytes": free})
        )
    return lines


def _header(table: pd.DataFrame, device: int, devices: int, events: int) -> Line:
    of = f" (of {devices} GPUs)" if devices > 1 else ""
    history = f"a history of {events:,} events" if events else "no history, only what is allocated now"
    text = f"memory snapshot of GPU {device}{of}: {len(table):,} allocations, {history}"
    return Line("snapshot", text, {"device": device, "devices": devices, "events": events})


def _reserved_later(events: list[dict], place: int) -> int:
    """The bytes that were reserved after an event, less those that were released after it."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    later = events[place + 1 :]
    return sum(signs[entry["action"]] * int(entry["size"]) for entry in later if entry["action"] in signs)


def _holders(held: pd.DataFrame, peak: int, unit: str, scale: int) -> list[Line]:
    """The lines of code whose allocations hold the peak, largest first."""
    sums = held.groupby(["file", "line", "function"])["size"].agg(["sum", "size"])
    sums = sums.sort_values("sum", ascending=False).reset_index()
    lines = []
    for place, row in sums.head(TOP).iterrows():
        share = number(row["sum"] / peak, "%")
        text = f"{number(row['sum'] / scale, unit)} ({share}) in"
        count = f"{row['size']:,} allocation{'s' * (row['size'] != 1)}"
        values = {"bytes": int(row["sum"]), "count": int(row["size"])}
        values |= {"file": row["file"], "line": int(row["line"]), "function": row["function"]}
        lines.append(Line("" if place else "held by", f"{text} {count}: {_place_text(row)}", values))
    if rest := int(sums["sum"].iloc[TOP:].sum()):
        share = number(rest / peak, "%")
        text = f"{number(rest / scale, unit)} ({share}) in {len(sums) - TOP:,} other places"
        lines.append(Line("", text, {"bytes": rest}))
    return lines


def _place_text(row: pd.Series) -> str:
    """A line of code as "project/train.py:42 in step"."""
    if not row["file"]:
        return clean(row["function"])
    file = "/".join(Path(row["file"]).parts[-2:])
    return f"{clean(file)}:{row['line']} in {clean(row['function'])}"
