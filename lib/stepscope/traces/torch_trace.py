"""torch.profiler's traces (JSON, also gzipped), in the shape of nsys's records.

On a GPU kernels come from CUPTI, as nsys's do, or from ROCm's tracer. Of this project's own traces of a CPU,
which has no kernels, the operators that do work and call no other that does stand in their place, each
launched by itself.
"""
import gzip
import json
import re
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from stepscope.traces.attribution import (
    CORRELATIONS,
    KINDS,
    LATEST,
    Records,
    TraceError,
    attribute,
    enclosing,
    find_launches,
    matching,
    thread_columns,
)
from stepscope.traces.families import families

# Operators that allocate, or look at the same numbers in another shape: no work, and they hide what does it.
NO_WORK = re.compile(
    r"aten::(resolve_|as_strided|view|_unsafe_view|_reshape_alias|empty|result_type|promote_types|expand|t$"
    r"|transpose|lift_fresh|detach|to$|unsqueeze|select$|slice$|set_$|_local_scalar_dense|unflatten|flatten"
    r"|reshape$|chunk$|split|item$)")
PROCESS_KEY = 1 << 48 | 7 << 24
# The categories of events that are read.
WORK = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LAUNCHES, OPERATOR, RANGE = ("cuda_runtime", "cuda_driver"), "cpu_op", "user_annotation"
CATEGORIES = [*WORK, *LAUNCHES, OPERATOR, RANGE]
CODES = {category: code for code, category in enumerate(CATEGORIES)}
COLUMNS = ("cat", "name", "tid", "start", "end", "correlation", "device", "stream", "bytes", "external")
EXPECTED = "expected torch.profiler's trace: JSON with a list traceEvents of events"


def load_torch_trace(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """All operations of a trace of this process, its ranges, and what check_conservation compares with.

    Returns:
        operations, ranges: as ``export.load_trace`` of nsys's capture.
        totals: operations and duration_ns by kind.

    Raises:
        TraceError: the file is no such trace, or an event has no times or ids that can be used.
        ConservationError: two phases, or two steps, overlap.
    """
    records = own_records(path)
    kinds = records.operations.groupby("kind", observed=False)["duration_ns"]
    totals = kinds.agg(["size", "sum"]).set_axis(["operations", "duration_ns"], axis="columns")
    return *attribute(records), totals


def own_records(path: Path) -> Records:
    """The records of a trace of this process; torch's own ranges, which have a "#" in their names, are left
    out.

    Raises:
        TraceError: as load_torch_trace.
    """
    events = read_trace(path).events
    found = events[events["cat"].isin([*WORK])]
    if found.empty:
        found = _leaves(events[(events["cat"] == OPERATOR) & matching(events["name"], lambda name: (
            name.startswith("aten::") and not NO_WORK.match(name)))])
    return records_of(str(path), events, found, matching(events["name"], lambda name: "#" not in name))[0]


def _leaves(operators: pd.DataFrame) -> pd.DataFrame:
    """The operators within which, on the same thread, no other one begins."""
    thread, start, end = (operators[column].to_numpy() for column in ("tid", "start", "end"))
    _, parent, _ = enclosing(thread, start, end, thread[:0], start[:0])
    return operators[~np.isin(np.arange(len(operators)), parent)]


def records_of(path: str, events: pd.DataFrame, work: pd.DataFrame,
               ranges: np.ndarray | bool = True) -> tuple[Records, np.ndarray]:
    """Records of a trace, and of each operation "External id" of the call that launched it, else its own.

    Args:
        events: of a Trace.
        work: those of them that are its operations; a CPU's operators are launched by themselves.
        ranges: which of them may be its ranges.
    """
    work = work.sort_values("start", kind="stable")
    calls = events[events["cat"].isin(LAUNCHES) & (events["correlation"] >= 0)]
    if (work["cat"] == OPERATOR).any():
        calls = work = work.assign(correlation=np.arange(len(work)))
    name = work["name"].cat.remove_unused_categories()
    operations = pd.DataFrame({
        "kind": pd.Categorical(work["cat"].map(lambda cat: WORK.get(cat, "kernel")), KINDS),
        "name": name, "family": families(name.array),
        "start_ns": work["start"], "duration_ns": work["end"] - work["start"], "device": work["device"],
        "stream": work["stream"], "correlation_id": work["correlation"], "row": np.arange(len(work)),
        "bytes": work["bytes"]}).reset_index(drop=True)
    launches = np.stack([_key(calls), *(calls[column].to_numpy() for column in (
        "correlation", "start", "end"))])
    process = np.full(len(work), PROCESS_KEY)
    launch = find_launches(process, operations["correlation_id"].to_numpy(), launches)
    of_call = np.append(calls["external"].to_numpy(), -1)[launch]
    own = ranges_of(events[(events["cat"] == RANGE) & ranges])
    records = Records(path, operations, process, launches, own)
    return records, np.where(of_call >= 0, of_call, work["external"])


def ranges_of(events: pd.DataFrame) -> pd.DataFrame:
    """The ranges of Records that these events are."""
    rows = events.assign(key=_key(events)).sort_values(["key", "start", "end"], ignore_index=True,
                                                       ascending=[True, True, False])
    return pd.DataFrame({"name": rows["name"].cat.remove_unused_categories(), "start_ns": rows["start"],
                         "end_ns": rows["end"], **thread_columns(rows["key"].to_numpy())})


def _key(events: pd.DataFrame) -> np.ndarray:
    return PROCESS_KEY | (events["tid"].to_numpy() + 1)


@dataclass
class Trace:
    """A trace's complete events: a row an event with :data:`COLUMNS` (cat and name are categorical; tid is a
    number of its own for each thread; times in ns; -1: none). operators: by external id the name,
    "Input Dims" and "Input type" of those whose shapes tell their work. header: what the trace says of its
    devices and ranks."""

    events: pd.DataFrame
    operators: dict[int, tuple[str, Any, Any]]
    header: dict[str, Any]


class _Reader:
    """Keeps the numbers of a trace's events, each as soon as it is parsed."""

    def __init__(self, path: Path, shaped: re.Pattern | None):
        self.path, self.shaped = path, shaped
        self.values = array("q")
        self.names: dict[str, int] = {}
        self.threads: dict[str, int] = {}
        self.operators: dict[int, tuple[str, Any, Any]] = {}

    def take(self, found: dict[str, Any]) -> dict[str, Any] | None:
        """What the parser puts in the place of an object: nothing in that of an event."""
        if "ph" not in found:
            return found
        code = CODES.get(str(found.get("cat"))) if found["ph"] == "X" else None
        if code is None:
            return None
        args = found.get("args")
        args = args if type(args) is dict else {}
        try:
            start, duration = round(found["ts"] * 1000), round(found["dur"] * 1000)
            correlation, external = _id(args.get("correlation", -1)), _id(args.get("External id", -1))
            device, stream, size = 0, 0, -1
            if code < len(WORK):
                device, stream = _id(args.get("device", 0)), _id(args.get("stream", 0))
                size = args.get("bytes", -1)
            if not (duration >= 0 and -LATEST < start < LATEST - duration
                    and -1 <= correlation < CORRELATIONS and 0 <= device < CORRELATIONS
                    and -1 <= stream < LATEST and -1 <= external < LATEST):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise TraceError(_complaint(self.path, found, args)) from None
        size = size if type(size) is int and 0 <= size < LATEST else -1
        name = str(found.get("name"))
        places = (self.names.setdefault(name, len(self.names)),
                  self.threads.setdefault(str(found.get("tid")), len(self.threads)))
        self.values.extend((code, *places, start, start + duration, correlation, device, stream, size,
                            external))
        if (self.shaped and code == CODES[OPERATOR] and external >= 0 and "Input Dims" in args
                and self.shaped.search(name)):
            self.operators[external] = name, args["Input Dims"], args.get("Input type")
        return None


def read_trace(path: Path, shaped: re.Pattern | None = None) -> Trace:
    """Read a trace, of which memory holds the text and numbers, and no objects.

    Args:
        shaped: the operators whose shapes are kept.

    Raises:
        TraceError: the file is no such trace, or is cut off; an event has no times or ids that can be used.
    """
    reader = _Reader(path, shaped)
    with opened(path) as file:
        text = file.read().decode("utf-8-sig", "replace")
    try:
        header = json.loads(text, object_hook=reader.take)
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: the file is cut off or no JSON ({error}), {EXPECTED}") from None
    if isinstance(header, list):  # Chrome's other form
        header = {"traceEvents": header}
    if not isinstance(header, dict) or not isinstance(header.get("traceEvents"), list):
        raise TraceError(f"{path}: has no list traceEvents, {EXPECTED}")
    numbers = np.frombuffer(reader.values, np.int64).reshape(-1, len(COLUMNS))
    events = pd.DataFrame(numbers, columns=COLUMNS)
    texts = {"cat": CATEGORIES, "name": [*reader.names]}
    return Trace(events.assign(**{column: pd.Categorical.from_codes(events[column], values)
                                  for column, values in texts.items()}), reader.operators, header)


def _id(value: Any) -> int:
    """An id, which ROCm writes as "0x0"; none is -1."""
    if type(value) is int:
        return value
    return -1 if value is None else int(value, 0)


def _complaint(path: Path, event: dict, args: dict) -> str:
    said = {key: f"{event.get(key)!r:.40}" for key in ("ts", "dur")} | {
        key: f"{args[key]!r:.40}" for key in ("correlation", "device", "stream", "External id")
        if key in args}
    found = ", ".join(f"{key} {value}" for key, value in said.items())
    return (f"{path}: the event {str(event.get('name'))[:80]!r} has {found},"
            " expected times in microseconds, no negative duration, and whole numbers as ids")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A capture's bytes, unzipped where they are zipped; what is wrong with the file is a TraceError."""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        opener: Any = gzip.open if zipped else open
        with opener(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be read ({said}), expected a whole capture") from None
