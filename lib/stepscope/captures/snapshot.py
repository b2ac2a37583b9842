"""Summarize a PyTorch memory snapshot: the peak, and the source lines whose allocations make up the peak.

``torch.cuda.memory._dump_snapshot`` writes a pickle of dicts, lists, strings and numbers. Because loading a pickle
can run arbitrary code, we only load plain data, and reject files that refer to a class or function.
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

from stepscope.captures.lines import Line, clean, counted
from stepscope.report.tables import number
from stepscope.traces.attribution import TraceError
from stepscope.traces.torch_trace import open_capture

MAX_BYTES = 2**29  # maximum size of the pickle
MAX_OBJECT_BYTES = 40  # maximum size of the loaded objects, in bytes per byte of the pickle
EXPECTED = "expected a memory snapshot written by torch.cuda.memory._dump_snapshot"
MAX_HOLDERS = 6  # maximum number of source lines in the summary
NEVER = np.iinfo(np.int64).max
LIBRARY = re.compile(r"(^|/)(site|dist)-packages/|^torch/|/lib/python3|^<frozen")
PYTHON = re.compile(r"\.py$|^<|ipykernel")
AUTOGRAD_NODE = re.compile(r"\b(\w+Backward\w*)::apply")  # matches C++ frames of autograd nodes
NO_STACK, BEFORE_HISTORY = "no stack was recorded", "allocated before the history began"
COLUMNS = ["size", "allocated_at", "freed_at", "file", "line", "function"]


class _DataOnly(pickle.Unpickler):
    """An unpickler that accepts only plain data."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is code")


def is_pickle(path: Path) -> bool:
    """Return whether a file begins like a pickle with protocol 2, 3, 4 or 5."""
    if not path.is_file():
        return False
    with open_capture(path) as stream:
        head = stream.read(2)
    return len(head) == 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def read_snapshot(path: Path) -> dict[str, Any]:
    """Read a memory snapshot without executing any of its contents.

    Returns:
        The snapshot's segments and device_traces, as documented by PyTorch.

    Raises:
        TraceError: If the file is too large or truncated, or isn't a memory snapshot.
    """
    with open_capture(path) as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise TraceError(f"{path} is larger than {MAX_BYTES:,} bytes; {EXPECTED} with fewer max_entries")
    try:
        with _limited_memory(MAX_OBJECT_BYTES * len(data) + 2**30):
            snapshot = _DataOnly(io.BytesIO(data)).load()
    except MemoryError:
        raise TraceError(f"{path} needs far more memory than its size suggests; {EXPECTED}") from None
    except EOFError:
        raise TraceError(f"{path}: the file is truncated; {EXPECTED}") from None
    except Exception as error:  # noqa: BLE001  the type of the exception depends on how the pickle is damaged
        reason = f"{clean(error, 200)} ({type(error).__name__})"
        raise TraceError(f"{path} cannot be read as plain data: {reason}; {EXPECTED}") from None
    if isinstance(snapshot, list):  # torch.cuda.memory_snapshot() returns only the segments
        snapshot = {"segments": snapshot, "device_traces": []}
    parts = [
        snapshot.get(key) if isinstance(snapshot, dict) else None for key in ("segments", "device_traces")
    ]
    if not all(isinstance(part, list) for part in parts):
        raise TraceError(f"{path}: this is a pickle without the lists segments and device_traces; {EXPECTED}")
    return snapshot


@contextmanager
def _limited_memory(extra_bytes: int) -> Iterator[None]:
    """Limit how much more memory this process can map, because a tiny pickle can request any amount of memory."""
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
    """Return a device's allocations in a snapshot, one row per allocation, with the columns :data:`COLUMNS`.

    ``size`` is the requested size in bytes. ``allocated_at`` and ``freed_at`` are indices of events in the
    device's history. ``allocated_at`` is -1 if the allocation is older than the history, and ``freed_at`` is
    NEVER if the memory is still allocated at the end. ``file``, ``line`` and ``function`` describe the
    innermost Python frame outside installed packages, or the innermost frame if there is no such frame.

    Raises:
        TraceError: If an entry's format differs from the format that PyTorch documents.
    """
    events = _events(snapshot, device)
    locations: dict[int, tuple[str, int, str]] = {}  # by the id of a frame list that events share
    rows: list[list[Any]] = []
    live: dict[int, int] = {}

    def add(size: int, begin: int, end: int, frames: Any) -> None:
        key = id(frames) if frames else begin < 0
        if key not in locations:
            reason = BEFORE_HISTORY if begin < 0 and events else NO_STACK
            locations[key] = _location(frames) if frames else ("", 0, reason)
        if not 0 <= size < 2**60:
            raise ValueError(f"size {size}")
        rows.append([int(size), begin, end, *locations[key]])

    with _checking_format(path):
        for event, entry in enumerate(events):
            action, address = entry["action"], int(entry.get("addr", 0))
            if action == "alloc":
                if address in live:  # the free was not recorded
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
def _checking_format(path: Path) -> Iterator[None]:
    """Raise TraceError if an entry's format differs from the format that PyTorch documents."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        reason = f"{type(error).__name__} {clean(error)}"
        raise TraceError(f"{path}: an entry has an unknown format ({reason}); {EXPECTED}") from None


def _events(snapshot: dict[str, Any], device: int) -> list[dict]:
    """Return a device's history, which is empty if none was recorded."""
    traces = snapshot["device_traces"]
    return traces[device] if device < len(traces) else []


def _blocks(snapshot: dict[str, Any], device: int) -> Iterator[dict]:
    """Yield the blocks of a device's segments, and add the block addresses that PyTorch before 2.1 omits."""
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        address = segment.get("address", 0)
        for block in segment["blocks"]:
            yield {"address": address} | block
            address += block["size"]


def _frames_of_block(block: dict) -> Any:
    history = block.get("history")  # PyTorch before 2.1
    return block.get("frames") or (history[0].get("frames") if history else None) or ()


def _location(frames: Any) -> tuple[str, int, str]:
    """Return the file, line and function of an allocation, given its frames, innermost frame first."""
    python_frames = [frame for frame in frames if PYTHON.search(str(frame.get("filename", "")))]
    user_frames = [frame for frame in python_frames if not LIBRARY.search(str(frame["filename"]))]
    for frame in (user_frames or python_frames)[:1]:
        return str(frame["filename"]), int(frame.get("line", 0)), str(frame.get("name", ""))
    for frame in frames:
        if node := AUTOGRAD_NODE.search(str(frame.get("name", ""))):
            return "", 0, f"autograd's {node[1]}"
    return "", 0, "a thread without Python frames, such as autograd's"


def snapshot_lines(path: Path, device: int | None = None, csv: Path | str | None = None) -> list[Line]:
    """Summarize a memory snapshot with one line per fact.

    Args:
        device: the index of the GPU, or None for the GPU with the highest peak.
        csv: a CSV file to which the allocations are written, one per line.

    Raises:
        TraceError: If the file isn't a memory snapshot, or contains no allocations on the GPU.
        OSError: If the CSV can't be written.
    """
    snapshot = read_snapshot(path)
    with _checking_format(path):
        numbers = {int(segment.get("device", 0)) for segment in snapshot["segments"]}
        numbers |= {number for number, trace in enumerate(snapshot["device_traces"]) if trace}
    tables = {number: allocations_of(path, snapshot, number) for number in sorted(numbers)}
    tables = {number: table for number, table in tables.items() if len(table)}
    if not tables:
        raise TraceError(f"{path}: no allocations; {EXPECTED} (after _record_memory_history)")
    if device is not None and device not in tables:
        raise TraceError(f"{path}: no allocations on GPU {device}; expected one of {[*tables]}")
    device_shown = (
        device if device is not None else max(tables, key=lambda number: peak_of(tables[number])[1])
    )
    if csv is not None:
        tables[device_shown].replace({"freed_at": {NEVER: -1}}).to_csv(csv, index=False)
    with _checking_format(path):
        return _summary_lines(snapshot, device_shown, tables[device_shown], len(tables))


def peak_of(table: pd.DataFrame) -> tuple[int, int]:
    """Return the index of the event after which allocated memory is at its peak, and the peak in bytes.

    The index is -1 if the memory peaks before the history begins.
    """
    begin, end = table["allocated_at"].to_numpy(), table["freed_at"].to_numpy()
    is_freed = end < NEVER
    events = np.concatenate([begin, end[is_freed]])
    changes = np.concatenate([table["size"], -table["size"].to_numpy()[is_freed]])
    allocated = np.zeros(events.max() + 2, np.int64)
    np.add.at(allocated, events + 1, changes)
    allocated = allocated.cumsum()
    peak_index = int(allocated.argmax())
    return peak_index - 1, int(allocated[peak_index])


def _summary_lines(snapshot: dict[str, Any], device: int, table: pd.DataFrame, devices: int) -> list[Line]:
    peak_event, peak = peak_of(table)
    unit, scale = ("GiB", 2**30) if peak >= 2**30 else ("MiB", 2**20)
    held = table[(table["allocated_at"] <= peak_event) & (table["freed_at"] > peak_event)]
    events = _events(snapshot, device)
    reserved = [
        segment.get("total_size", 0) for segment in snapshot["segments"] if segment.get("device", 0) == device
    ]
    lines = [_header_line(table, device, devices, len(events))]

    def size(value: float) -> str:
        return number(value / scale, unit)

    has_history = (table["allocated_at"] >= 0).any()
    at_peak = sum(reserved) - _bytes_reserved_after(events, peak_event)
    lines.append(
        Line(
            "peak" if has_history else "allocated",
            f"{size(peak)} in {len(held):,} allocations, out of {size(at_peak)} reserved",
            {"peak_bytes": peak, "allocations": len(held), "reserved_bytes": at_peak, "event": peak_event},
        )
    )
    lines += _holder_lines(held, peak, unit, scale)
    largest = held.loc[held["size"].idxmax()]
    values = {"largest_bytes": int(largest["size"])}
    lines.append(
        Line("largest", f"{size(largest['size'])} in one allocation: {_location_text(largest)}", values)
    )
    older_bytes = int(held.loc[held["allocated_at"] < 0, "size"].sum())
    if has_history and older_bytes:
        share = number(older_bytes / peak, "%")
        text = f"{size(older_bytes)} ({share}) of the peak was allocated before the history began"
        lines.append(Line("older", text, {"older_bytes": older_bytes}))
    if has_history:
        end_bytes = int(table.loc[table["freed_at"] == NEVER, "size"].sum())
        text = f"{size(end_bytes)} allocated, {size(sum(reserved))} reserved"
        lines.append(Line("at the end", text, {"end_bytes": end_bytes, "end_reserved_bytes": sum(reserved)}))
    failed = [entry for entry in events if entry["action"] == "oom"]
    if failed:
        requested, free = (int(failed[-1].get(key, 0)) for key in ("size", "device_free"))
        count = counted(failed, "failed request")
        text = f"{count}; the last was for {size(requested)}, with {size(free)} free on the GPU"
        lines.append(
            Line(
                "out of memory", text, {"failures": len(failed), "asked_bytes": requested, "free_bytes": free}
            )
        )
    return lines


def _header_line(table: pd.DataFrame, device: int, devices: int, events: int) -> Line:
    of_gpus = f" (of {devices} GPUs)" if devices > 1 else ""
    history = f"a history of {events:,} events" if events else "no history, only the current allocations"
    text = f"memory snapshot of GPU {device}{of_gpus}: {len(table):,} allocations, {history}"
    return Line("snapshot", text, {"device": device, "devices": devices, "events": events})


def _bytes_reserved_after(events: list[dict], event: int) -> int:
    """Return the bytes that were reserved after an event, minus those that were released after it."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    later_events = events[event + 1 :]
    return sum(
        signs[entry["action"]] * int(entry["size"]) for entry in later_events if entry["action"] in signs
    )


def _holder_lines(held: pd.DataFrame, peak: int, unit: str, scale: int) -> list[Line]:
    """Name the source lines whose allocations make up the peak, largest first."""
    sums = held.groupby(["file", "line", "function"])["size"].agg(["sum", "size"])
    sums = sums.sort_values("sum", ascending=False).reset_index()
    lines = []
    for rank, row in sums.head(MAX_HOLDERS).iterrows():
        share = number(row["sum"] / peak, "%")
        text = f"{number(row['sum'] / scale, unit)} ({share}) in"
        count = f"{row['size']:,} allocation{'s' * (row['size'] != 1)}"
        values = {"bytes": int(row["sum"]), "count": int(row["size"])}
        values |= {"file": row["file"], "line": int(row["line"]), "function": row["function"]}
        lines.append(Line("" if rank else "held by", f"{text} {count}: {_location_text(row)}", values))
    if rest := int(sums["sum"].iloc[MAX_HOLDERS:].sum()):
        share = number(rest / peak, "%")
        text = f"{number(rest / scale, unit)} ({share}) in {len(sums) - MAX_HOLDERS:,} other places"
        lines.append(Line("", text, {"bytes": rest}))
    return lines


def _location_text(row: pd.Series) -> str:
    """Format a source location, such as "project/train.py:42 in step"."""
    if not row["file"]:
        return clean(row["function"])
    file = "/".join(Path(row["file"]).parts[-2:])
    return f"{clean(file)}:{row['line']} in {clean(row['function'])}"
