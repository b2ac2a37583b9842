"""torch.profiler's traces (JSON, also gzipped): read event by event, in the shape of nsys's records.

On a GPU kernels come from CUPTI, as nsys's do, or from ROCm's tracer. Of this project's own traces of a CPU,
which has no kernels, the operators that do work and call no other that does stand in their place, each
launched by itself.
"""
import gzip
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.traces.attribution import (
    CORRELATIONS,
    KINDS,
    LATEST,
    STEP,
    Records,
    TraceError,
    attribute,
    find_launches,
    thread_columns,
    with_roles,
)
from stepscope.traces.families import FAMILIES, families

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
COLUMNS = ("cat", "name", "tid", "start", "end", "correlation", "device", "stream", "bytes", "external")
CHUNK = 1 << 22  # characters
_SPACE = re.compile(r"[ \t\r\n]*")
_SCAN = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def load_torch_trace(path: Path | str, phases: Sequence[str] = PHASE_NAMES,
                     step: str = STEP) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """All operations of a trace of this process, its ranges, and what check_conservation compares with.

    Returns:
        operations, ranges: as ``export.load_trace`` of nsys's capture. torch's own ranges, which have a "#"
            in their names, are left out.
        totals: operations and duration_ns by kind, added up event by event.

    Raises:
        TraceError: the file is no such trace, or an event has no times or ids that can be used.
        ConservationError: two phases, or two steps, overlap.
    """
    trace = read_trace(Path(path))
    events = _as_dicts(trace)
    found = work(events)
    totals = dict.fromkeys(KINDS, (0, 0))
    for event in found:
        kind = WORK.get(event["cat"], "kernel")
        totals[kind] = totals[kind][0] + 1, totals[kind][1] + event["end"] - event["start"]
    own = [event["row"] for event in events if event["cat"] == RANGE and "#" not in event["name"]]
    rows = (np.array(each, np.int64) for each in ([event["row"] for event in found], own))
    records, _ = records_of(str(path), trace, *rows)
    operations, ranges = attribute(with_roles(records, tuple(phases), step), tuple(phases))
    return operations, ranges, pd.DataFrame.from_dict(totals, orient="index",
                                                      columns=["operations", "duration_ns"])


def records_of(path: str, events: "Events", work: np.ndarray,
               opened: np.ndarray) -> tuple[Records, np.ndarray]:
    """Records of a trace, and of each operation "External id" of the call that launched it, else its own.

    Args:
        work: the rows of events that are its operations; a CPU's operators are launched by themselves.
        opened: the rows that are its ranges.
    """
    cat, start, end, correlation, external = (
        events.column(name) for name in ("cat", "start", "end", "correlation", "external"))
    work = work[np.argsort(start[work], kind="stable")]
    key = PROCESS_KEY | (events.column("tid") + 1)
    if (cat[work] < len(WORK)).all():
        launching = np.isin(cat, [CATEGORIES.index(category) for category in LAUNCHES])
        calls = np.flatnonzero(launching & (correlation >= 0))
    else:
        calls, correlation = work, correlation.copy()
        correlation[work] = np.arange(len(work))
    kinds = np.array([KINDS.index(WORK.get(category, "kernel")) for category in CATEGORIES])
    names, codes = _named(events, work)
    operations = pd.DataFrame({
        "kind": pd.Categorical.from_codes(kinds[cat[work]], KINDS),
        "name": pd.Categorical.from_codes(codes, names),
        "family": pd.Categorical.from_codes(families(names).codes[codes], FAMILIES),
        "start_ns": start[work], "duration_ns": end[work] - start[work],
        "device": events.column("device")[work], "stream": events.column("stream")[work],
        "correlation_id": correlation[work], "row": np.arange(len(work)),
        "bytes": events.column("bytes")[work]})
    launches = np.stack([key[calls], correlation[calls], start[calls], end[calls]])
    process = np.full(len(work), PROCESS_KEY)
    of_call = np.append(external[calls], -1)[find_launches(process, correlation[work], launches)]
    records = Records(path, operations, process, launches, ranges_of(events, opened))
    return records, np.where(of_call >= 0, of_call, external[work])


def ranges_of(events: "Events", rows: np.ndarray) -> pd.DataFrame:
    """The ranges of Records that these rows are."""
    start, end = events.column("start"), events.column("end")
    key = PROCESS_KEY | (events.column("tid") + 1)
    rows = rows[np.lexsort((-end[rows], start[rows], key[rows]))]
    names, codes = _named(events, rows)
    return pd.DataFrame({"name": pd.Categorical.from_codes(codes, names), "start_ns": start[rows],
                         "end_ns": end[rows], **thread_columns(key[rows])})


def _named(events: "Events", rows: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The distinct names of these rows, and the place of each row's among them."""
    used, codes = np.unique(events.column("name")[rows], return_inverse=True)
    return [events.names[place] for place in used], codes


def read_events(path: Path) -> list[dict[str, Any]]:
    """The complete events of a trace: cat, name, tid (text), start and end in ns, correlation (None: none),
    device, stream, row.

    Raises:
        TraceError: as load_torch_trace.
    """
    return _as_dicts(read_trace(path))


def _as_dicts(events: "Events") -> list[dict[str, Any]]:
    columns = {name: events.column(name).tolist() for name in COLUMNS[:8]}
    columns |= {"cat": [CATEGORIES[code] for code in columns["cat"]],
                "name": [events.names[code] for code in columns["name"]],
                "tid": [events.threads[code] for code in columns["tid"]],
                "correlation": [None if value < 0 else value for value in columns["correlation"]],
                "row": [*range(len(columns["cat"]))]}
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def work(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels, copies and fills among events; where there are none, the operators that do work."""
    found = [e for e in events if e["cat"] in WORK]
    return found or _leaves([e for e in events if e["cat"] == OPERATOR and e["name"].startswith("aten::")
                             and not NO_WORK.match(e["name"])])


def _leaves(operators: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operators within which, on the same thread, no other one begins."""
    ordered = sorted(operators, key=lambda e: (e["tid"], e["start"], -e["end"]))
    return [e for e, after in zip(ordered, [*ordered[1:], None])
            if after is None or after["tid"] != e["tid"] or after["start"] >= e["end"]]


@dataclass
class Events:
    """A trace's complete events by column (:data:`COLUMNS`; times in ns, -1: none); cat, name and tid are
    places in CATEGORIES, names and threads. operators: by external id the name, "Input Dims" and "Input type"
    of those whose shapes tell their work. header: what the trace says of its devices and ranks."""

    columns: list[array] = field(default_factory=lambda: [array("q") for _ in COLUMNS])
    names: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    operators: dict[int, tuple[str, Any, Any]] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)

    def column(self, name: str) -> np.ndarray:
        return np.frombuffer(self.columns[COLUMNS.index(name)], np.int64)


def read_trace(path: Path, shaped: re.Pattern | None = None) -> Events:
    """Read a trace event by event, so that memory holds numbers and no JSON.

    Args:
        shaped: the operators whose shapes are kept.

    Raises:
        TraceError: the file is no such trace, or is cut off; an event has no times or ids that can be used.
    """
    events = Events()
    add = _adder(path, events, shaped)
    with _opened(path) as file:
        stream = _Stream(path, file)

        def read_list() -> None:
            for _ in stream.entries("[]"):
                add(stream.value())
        if stream.peek() == "[":  # Chrome's other form: a list of events
            read_list()
            return events
        for _ in stream.entries("{}"):
            key = str(stream.value())
            stream.take(":")
            if key == "traceEvents":
                read_list()
            events.header[key] = True if key == "traceEvents" else stream.value()
    if "traceEvents" not in events.header:
        raise TraceError(f"{path}: has no traceEvents, expected torch.profiler's trace: JSON with that list")
    return events


def _adder(path: Path, events: Events, shaped: re.Pattern | None) -> Any:
    """What appends one raw event to the columns."""
    categories = {name: code for code, name in enumerate(CATEGORIES)}
    names: dict[str, int] = {}
    threads: dict[str, int] = {}
    appends = [column.append for column in events.columns]
    gpu, of_operators = len(WORK), categories[OPERATOR]

    def add(event: Any) -> None:
        complete = type(event) is dict and event.get("ph") == "X"
        code = categories.get(str(event.get("cat"))) if complete else None
        if code is None:
            return
        args = event.get("args")
        args = args if type(args) is dict else {}
        name, tid = str(event.get("name")), str(event.get("tid"))
        try:
            start, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
            correlation, external = _id(args.get("correlation", -1)), _id(args.get("External id", -1))
            device, stream, size = 0, 0, -1
            if code < gpu:
                device, stream = _id(args.get("device", 0)), _id(args.get("stream", 0))
                size = args.get("bytes", -1)
            if not (duration >= 0 and -LATEST < start < LATEST - duration
                    and -1 <= correlation < CORRELATIONS and 0 <= device < CORRELATIONS
                    and -1 <= stream < LATEST and -1 <= external < LATEST):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise TraceError(_complaint(path, event, args)) from None
        size = size if type(size) is int and 0 <= size < LATEST else -1
        places = names.setdefault(name, len(names)), threads.setdefault(tid, len(threads))
        values = code, *places, start, start + duration, correlation, device, stream, size, external
        for append, value in zip(appends, values):
            append(value)
        if len(names) > len(events.names):
            events.names.append(name)
        if len(threads) > len(events.threads):
            events.threads.append(tid)
        if shaped and code == of_operators and external >= 0 and "Input Dims" in args and shaped.search(name):
            events.operators[external] = name, args["Input Dims"], args.get("Input type")
    return add


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
def _opened(path: Path) -> Iterator[TextIO]:
    """The trace's text; what is wrong with the file is a TraceError."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with (gzip.open if zipped else open)(path, "rt", encoding="utf-8-sig", errors="replace") as text:
            yield text
    except (OSError, EOFError) as error:  # gzip's errors are these
        said = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be read ({said}), expected torch.profiler's trace") from None


class _Stream:
    """JSON read a chunk at a time."""

    def __init__(self, path: Path, file: TextIO):
        self.path, self.file = path, file
        self.text, self.at, self.gone = "", 0, 0  # gone: characters that were read and let go

    def more(self) -> bool:
        chunk = self.file.read(CHUNK)
        self.gone += self.at
        self.text, self.at = self.text[self.at:] + chunk, 0
        return bool(chunk)

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def take(self, allowed: str) -> str:
        found = self.peek()
        if not found or found not in allowed:
            self.wrong(f"found {found!r}" if found else "the file ends")
        self.at += 1
        return found

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = _SCAN(self.text, self.at)
                if end < len(self.text) or not self.more():
                    self.at = min(end, len(self.text))
                    return value
            except (StopIteration, ValueError):
                if not self.more():
                    self.wrong("the file is cut off or no JSON")
            except RecursionError:
                self.wrong("brackets are nested too deep")

    def entries(self, brackets: str) -> Iterator[None]:
        """Stands before each entry of a list or an object in turn; who is told so takes it."""
        self.take(brackets[0])
        if self.peek() == brackets[1]:
            self.at += 1
            return
        while True:
            yield
            if self.take("," + brackets[1]) == brackets[1]:
                return

    def wrong(self, what: str) -> None:
        raise TraceError(f"{self.path}: {what} at character {self.gone + self.at:,}, expected"
                         " torch.profiler's trace: JSON with a list traceEvents of events")
