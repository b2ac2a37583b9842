"""torch.profiler's traces (JSON, also gzipped): read event by event, in the shape of nsys's records.

On a GPU kernels come from CUPTI, as nsys's do, or from ROCm's tracer. Of this project's own traces of a CPU,
which has no kernels, the operators that do work and call no other that does stand in their place, each
launched by itself.
"""
import gzip
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
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
    thread_columns,
    with_roles,
)
from stepscope.traces.families import families

# Operators that allocate, or look at the same numbers in another shape: they call for no work and hide what
# does it.
NO_WORK = re.compile(
    r"aten::(resolve_|as_strided|view|_unsafe_view|_reshape_alias|empty|result_type|promote_types"
    r"|expand|t$|transpose|lift_fresh|detach|to$|unsqueeze|select$|slice$|set_$|_local_scalar_dense"
    r"|unflatten|flatten|reshape$|chunk$|split"
    r"|item$)"
)
PROCESS_KEY = 1 << 48 | 7 << 24
# The categories of events that are read.
WORK = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LAUNCHES, OPERATOR, RANGE = ("cuda_runtime", "cuda_driver"), "cpu_op", "user_annotation"
CATEGORIES = [*WORK, *LAUNCHES, OPERATOR, RANGE]
COLUMNS = ("cat", "name", "tid", "start", "end", "correlation", "device", "stream", "bytes", "external")
HEADER = ("deviceProperties", "distributedInfo")
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
    events = [event for event in read_events(Path(path)) if "#" not in event["name"] or event["cat"] != RANGE]
    totals = dict.fromkeys(KINDS, (0, 0))
    for event in work(events):
        kind = WORK.get(event["cat"], "kernel")
        totals[kind] = totals[kind][0] + 1, totals[kind][1] + event["end"] - event["start"]
    operations, ranges = attribute(with_roles(_records(str(path), events), tuple(phases), step),
                                   tuple(phases))
    return operations, ranges, pd.DataFrame.from_dict(totals, orient="index",
                                                      columns=["operations", "duration_ns"])


def _records(path: str, events: list[dict[str, Any]]) -> Records:
    key = {tid: PROCESS_KEY | number for number, tid in enumerate(sorted({e["tid"] for e in events}),
                                                                  start=1)}
    found = work(events)
    if any(e["cat"] in WORK for e in found):
        launches = [e for e in events if e["cat"] in LAUNCHES and e["correlation"] is not None]
    else:
        launches = found = [e | {"correlation": i} for i, e in enumerate(found, start=1)]
    found = sorted(found, key=lambda e: e["start"])
    names, kinds = [e["name"] for e in found], [WORK.get(e["cat"], "kernel") for e in found]
    start = _integers(e["start"] for e in found)
    operations = pd.DataFrame({
        "kind": pd.Categorical(kinds, KINDS), "name": pd.Categorical(names), "family": families(names),
        "start_ns": start, "duration_ns": _integers(e["end"] for e in found) - start,
        "device": _integers(e["device"] for e in found), "stream": _integers(e["stream"] for e in found),
        "correlation_id": _integers(-1 if e["correlation"] is None else e["correlation"] for e in found),
        "row": np.arange(len(found))})
    opened = sorted((e for e in events if e["cat"] == RANGE),
                    key=lambda e: (key[e["tid"]], e["start"], -e["end"]))
    ranges = pd.DataFrame({
        "name": pd.Categorical([e["name"] for e in opened]),
        "start_ns": _integers(e["start"] for e in opened), "end_ns": _integers(e["end"] for e in opened),
        **thread_columns(_integers(key[e["tid"]] for e in opened))})
    calls = [_integers(values) for values in zip(*((key[e["tid"]], e["correlation"], e["start"], e["end"])
                                                   for e in launches))]
    return Records(path, operations, np.full(len(found), PROCESS_KEY),
                   np.stack(calls) if calls else np.zeros((4, 0), np.int64), ranges)


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The complete events of a trace: cat, name, tid (text), start and end in ns, correlation (None: none),
    device, stream.

    Raises:
        TraceError: as load_torch_trace.
    """
    events = read_trace(path)
    columns = {name: events.column(name).tolist() for name in COLUMNS[:8]}
    columns |= {"cat": [CATEGORIES[code] for code in columns["cat"]],
                "name": [events.names[code] for code in columns["name"]],
                "tid": [events.threads[code] for code in columns["tid"]],
                "correlation": [None if value < 0 else value for value in columns["correlation"]]}
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
        if stream.peek() == "[":  # Chrome's other form: a list of events
            for event in stream.items():
                add(event)
            return events
        for key in stream.fields():
            if key == "traceEvents":
                for event in stream.items():
                    add(event)
            elif key in HEADER:
                events.header[key] = stream.value()
            else:
                stream.value()
            if key == "traceEvents":
                events.header[key] = True
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
            device, stream = (_id(args.get("device", 0)), _id(args.get("stream", 0))) if code < gpu else (0,
                0)
            size = args.get("bytes", -1) if code < gpu else -1
            if (duration < 0 or not -LATEST < start < LATEST - duration or not
                -1 <= correlation < CORRELATIONS
                    or not 0 <= device < CORRELATIONS or not -1 <= stream < LATEST or not
                    -1 <= external < LATEST):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise TraceError(_complaint(path, event, args)) from None
        size = size if type(size) is int and 0 <= size < LATEST else -1
        for append, value in zip(appends, (code, names.setdefault(name, len(names)),
                                           threads.setdefault(tid, len(threads)), start, start + duration,
                                           correlation, device, stream, size, external)):
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

    def items(self) -> Iterator[Any]:
        self.take("[")
        if self.peek() == "]":
            self.at += 1
            return
        while True:
            yield self.value()
            if self.take(",]") == "]":
                return

    def fields(self) -> Iterator[str]:
        """The keys of an object; whoever is given one takes its value."""
        self.take("{")
        if self.peek() == "}":
            self.at += 1
            return
        while True:
            key = self.value()
            self.take(":")
            yield key
            if self.take(",}") == "}":
                return

    def wrong(self, what: str) -> None:
        raise TraceError(f"{self.path}: {what} at character {self.gone + self.at:,}, expected"
                         " torch.profiler's trace: JSON with a list traceEvents of events")
