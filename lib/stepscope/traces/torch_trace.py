"""torch.profiler's traces (JSON, also gzipped), in the shape of nsys's records.

On a GPU kernels come from CUPTI, as nsys's do, or from ROCm's tracer. Of this project's own traces of a CPU,
which has no kernels, the operators that do work stand in their place, each for its self time and launched
by itself.
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
    SHORT_NS,
    Records,
    TraceError,
    attribute,
    enclosing,
    find_launches,
    matching,
    thread_columns,
)
from stepscope.traces.families import families

# Operators that allocate, or look at the same numbers in another shape: their time is their caller's.
NO_WORK = re.compile(
    r"aten::(resolve_|as_strided|view|_unsafe_view|_reshape_alias|empty|result_type|promote_types|expand|t$"
    r"|transpose|lift_fresh|detach|to$|unsqueeze|select$|slice$|set_$|_local_scalar_dense|unflatten|flatten"
    r"|reshape$|chunk$|split|item$)"
)
PROCESS_KEY = 1 << 48 | 7 << 24
# The categories of events that are read.
WORK = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LAUNCHES, OPERATOR, RANGE = ("cuda_runtime", "cuda_driver"), "cpu_op", "user_annotation"
FRAME = "python_function"  # with_stack=True; those that last are kept
CATEGORIES = [*WORK, *LAUNCHES, OPERATOR, RANGE, FRAME]
CODES = {category: code for code, category in enumerate(CATEGORIES)}
COLUMNS = (
    "cat",
    "name",
    "tid",
    "start",
    "end",
    "correlation",
    "device",
    "stream",
    "bytes",
    "external",
    "sequence",
)
# What a host event is to who looks for why a GPU waits, by its category.
HOST_KINDS = {
    "cuda_runtime": "call",
    "cuda_driver": "call",
    OPERATOR: "operator",
    RANGE: "range",
    FRAME: "frame",
}
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
        found = own_times(
            events[
                (events["cat"] == OPERATOR)
                & matching(events["name"], lambda name: name.startswith("aten::") and not NO_WORK.match(name))
            ]
        )
    return records_of(str(path), events, found, matching(events["name"], lambda name: "#" not in name))[0]


def own_times(operators: pd.DataFrame) -> pd.DataFrame:
    """The operators with their self times for times: an operator's time less that of those which begin within
    it on its thread. In the span of the outermost each one's self time is laid before those of its children,
    so that no two overlap, and together they last as long as the outermost."""
    thread, start, end = (operators[column].to_numpy() for column in ("tid", "start", "end"))
    _, parent, _ = enclosing(thread, start, end, thread[:0], start[:0])
    lasts, inner = end - start, parent >= 0
    within = np.zeros(len(lasts), np.int64)
    np.add.at(within, parent[inner], lasts[inner])
    own = np.maximum(lasts - within, 0)
    begins, free = start.copy(), start + own  # free: where an operator's next child is laid
    for place in np.lexsort((-np.maximum(end, start + 1), start, thread)):  # parents before their children
        if inner[place]:
            begins[place] = free[parent[place]]
            free[parent[place]] += lasts[place]
            free[place] = begins[place] + own[place]
    return operators.assign(start=begins, end=begins + own)


def records_of(
    path: str, events: pd.DataFrame, work: pd.DataFrame, ranges: np.ndarray | bool = True
) -> tuple[Records, np.ndarray]:
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
    operations = pd.DataFrame(
        {
            "kind": pd.Categorical(work["cat"].map(lambda cat: WORK.get(cat, "kernel")), KINDS),
            "name": name,
            "family": families(name.array),
            "start_ns": work["start"],
            "duration_ns": work["end"] - work["start"],
            "device": work["device"],
            "stream": work["stream"],
            "correlation_id": work["correlation"],
            "row": np.arange(len(work)),
            "bytes": work["bytes"],
        }
    ).reset_index(drop=True)
    launches = np.stack(
        [_key(calls), *(calls[column].to_numpy() for column in ("correlation", "start", "end"))]
    )
    process = np.full(len(work), PROCESS_KEY)
    launch = find_launches(process, operations["correlation_id"].to_numpy(), launches)
    of_call = np.append(calls["external"].to_numpy(), -1)[launch]
    own = ranges_of(events[(events["cat"] == RANGE) & ranges])
    records = Records(path, operations, process, launches, own)
    return records, np.where(of_call >= 0, of_call, work["external"])


def ranges_of(events: pd.DataFrame) -> pd.DataFrame:
    """The ranges of Records that these events are."""
    rows = events.assign(key=_key(events)).sort_values(
        ["key", "start", "end"], ignore_index=True, ascending=[True, True, False]
    )
    return pd.DataFrame(
        {
            "name": rows["name"].cat.remove_unused_categories(),
            "start_ns": rows["start"],
            "end_ns": rows["end"],
            "sequence": rows["sequence"],
            **thread_columns(rows["key"].to_numpy()),
        }
    )


def host_of(events: pd.DataFrame) -> pd.DataFrame:
    """The events of the host that last (kind, name, key of the thread, start_ns, end_ns): calls of the
    driver, operators, ranges and Python frames."""
    rows = events[events["cat"].isin(HOST_KINDS) & (events["end"] - events["start"] >= SHORT_NS)]
    return pd.DataFrame(
        {
            "kind": rows["cat"].map(HOST_KINDS).astype("category"),
            "name": rows["name"],
            "key": _key(rows),
            "start_ns": rows["start"],
            "end_ns": rows["end"],
        }
    )


def _key(events: pd.DataFrame) -> np.ndarray:
    return PROCESS_KEY | (events["tid"].to_numpy() + 1)


@dataclass
class Trace:
    """A trace's complete events: a row an event with :data:`COLUMNS` (cat and name are categorical; tid is a
    number of its own for each thread; times in ns; -1: none). operators: by external id the name,
    "Input Dims" and "Input type" of those whose shapes tell their work. header: what the trace says of its
    devices and ranks. shapes: whether they were recorded."""

    events: pd.DataFrame
    operators: dict[int, tuple[str, Any, Any]]
    header: dict[str, Any]
    shapes: bool


_OPERATOR, _FRAME = CODES[OPERATOR], CODES[FRAME]


class _Reader:
    """Keeps the numbers of a trace's events, each as soon as it is parsed."""

    def __init__(self, path: Path, shaped: re.Pattern | None, strict: bool = False):
        self.path, self.shaped, self.strict = path, shaped, strict
        self.values = array("q")
        self.names: dict[str, int] = {}
        self.threads: dict[str, int] = {}
        self.operators: dict[int, tuple[str, Any, Any]] = {}
        self.shapes = False

    def take(self, found: dict[str, Any]) -> dict[str, Any] | None:
        """What the parser puts in the place of an object: nothing in that of an event. A trace has millions
        of them: each looks only for what its category has, and whether numbers fit is asked of all at once
        (``fits``)."""
        if "ph" not in found:
            return found
        if found["ph"] != "X" or (code := CODES.get(str(found.get("cat")))) is None:
            return None
        args = found.get("args")
        args = args if type(args) is dict else {}
        correlation = external = sequence = size = -1
        device = stream = 0
        try:
            start, duration = round(found["ts"] * 1000), round(found["dur"] * 1000)
            if code < _OPERATOR:
                correlation, external = args.get("correlation", -1), args.get("External id", -1)
                if code < len(WORK):
                    device, stream, size = args.get("device", 0), args.get("stream", 0), args.get("bytes", -1)
                    size = size if type(size) is int and 0 <= size < LATEST else -1
            elif code == _OPERATOR:
                external, sequence = args.get("External id", -1), args.get("Sequence number", -1)
            elif code == _FRAME and 0 <= duration < SHORT_NS:
                return None
            name = found["name"] if type(found.get("name")) is str else str(found.get("name"))
            names, threads = self.names, self.threads
            row = (
                code,
                names.setdefault(name, len(names)),
                threads.setdefault(str(found.get("tid")), len(threads)),
                start,
                start + duration,
                correlation,
                device,
                stream,
                size,
                external,
                sequence,
            )
            try:
                self.values.extend(row)
            except TypeError:  # a part of it is in the array by now
                del self.values[len(self.values) // len(COLUMNS) * len(COLUMNS) :]
                self.values.extend(map(_id, row))
            if self.strict and not fits(np.array([row[:5] + tuple(map(_id, row[5:]))])).all():
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise TraceError(_complaint(self.path, found, args)) from None
        if code == _OPERATOR and "Input Dims" in args:
            self.shapes = True
            if self.shaped and self.shaped.search(name) and (key := _id(external)) >= 0:
                self.operators[key] = name, args["Input Dims"], args.get("Input type")
        return None


def fits(numbers: np.ndarray) -> np.ndarray:
    """Which rows of COLUMNS have times and ids that can be used."""
    _, _, _, start, end, correlation, device, stream, _, external, sequence = numbers.T
    least = np.minimum(np.minimum(correlation, stream), external)
    return (
        (start <= end)
        & (start > -LATEST)
        & (end < LATEST)
        & (least >= -1)
        & (device >= 0)
        & (np.maximum(correlation, device) < CORRELATIONS)
        & (np.maximum(stream, external) < LATEST)
        & (abs(sequence) < LATEST)
    )


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
        numbers = np.frombuffer(reader.values, np.int64).reshape(-1, len(COLUMNS))
        if not fits(numbers).all():
            json.loads(text, object_hook=_Reader(path, shaped, strict=True).take)  # says which one does not
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: the file is cut off or no JSON ({error}), {EXPECTED}") from None
    if isinstance(header, list):  # Chrome's other form
        header = {"traceEvents": header}
    if not isinstance(header, dict) or not isinstance(header.get("traceEvents"), list):
        raise TraceError(f"{path}: has no list traceEvents, {EXPECTED}")
    events = pd.DataFrame(numbers, columns=COLUMNS)
    texts = {"cat": CATEGORIES, "name": [*reader.names]}
    named = {column: pd.Categorical.from_codes(events[column], values) for column, values in texts.items()}
    return Trace(events.assign(**named), reader.operators, header, reader.shapes)


def _id(value: Any) -> int:
    """An id, which ROCm writes as "0x0"; none is -1."""
    if type(value) is int:
        return value
    return -1 if value is None else int(value, 0)


def _complaint(path: Path, event: dict, args: dict) -> str:
    said = {key: f"{event.get(key)!r:.40}" for key in ("ts", "dur")} | {
        key: f"{args[key]!r:.40}" for key in ("correlation", "device", "stream", "External id") if key in args
    }
    found = ", ".join(f"{key} {value}" for key, value in said.items())
    return (
        f"{path}: the event {str(event.get('name'))[:80]!r} has {found},"
        " expected times in microseconds, no negative duration, and whole numbers as ids"
    )


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
