"""torch.profiler's trace in the shape of an nsys export, so that one accounting (export.py) reads both.

On a GPU its kernels come from CUPTI, as nsys's do. On a CPU there are none: the operators that do work and
call no other that does stand in their place, each launched by itself.
"""
import json
import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from stepscope.traces.export import CORRELATIONS, LATEST, TraceError

SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
    correlationId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER,
    textId INTEGER, domainId INTEGER);
"""
# Operators that allocate, or look at the same numbers in another shape: they call for no work and hide what
# does it.
NO_WORK = re.compile(
    r"aten::(resolve_|as_strided|view|_unsafe_view|_reshape_alias|empty|result_type|promote_types"
    r"|expand|t$|transpose|lift_fresh|detach|to$|unsqueeze|select$|slice$|set_$|_local_scalar_dense"
    r"|item$)"
)
PROCESS_ID = 1 << 48 | 7 << 24
# The categories of events that are read.
WORK, LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
OPERATOR, RANGE = "cpu_op", "user_annotation"


def write_export(path: Path | str, **tables: Iterable[tuple]) -> None:
    """An export with the tables of SCHEMA, which hold the rows given by table name, in the schema's
    columns.
    """
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
        for table, rows in tables.items():
            columns = len(connection.execute(f"PRAGMA table_info({table})").fetchall())
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", rows)
        connection.commit()


def convert(trace: Path, export: Path) -> None:
    """Write the Chrome trace that torch.profiler exported as an event-level export.

    Raises:
        TraceError: the file is no such trace, or an event has no times or correlation id that can be used.
    """
    events = _read_events(trace)
    threads = {tid: PROCESS_ID | number for number,
               tid in enumerate(sorted({e["tid"] for e in events}), start=1)}
    work = _work(events)
    if any(e["cat"] in WORK for e in work):
        launches = [e for e in events if e["cat"] in LAUNCHES and e["correlation"] is not None]
    else:
        launches = work = [e | {"correlation": i, "stream": 0} for i, e in enumerate(work, start=1)]
    names = {name: number for number, name in enumerate(dict.fromkeys(e["name"] for e in work))}
    write_export(
        export,
        StringIds=((number, name) for name, number in names.items()),
        CUPTI_ACTIVITY_KIND_KERNEL=((e["start"], e["end"], 0, e["stream"], e["correlation"], PROCESS_ID,
                                     names[e["name"]])
                                    for e in work),
        CUPTI_ACTIVITY_KIND_RUNTIME=((e["start"], e["end"], threads[e["tid"]], e["correlation"])
                                     for e in launches),
        NVTX_EVENTS=((e["start"], e["end"], 59, e["name"], threads[e["tid"]], None, 0) for e in events
                     if e["cat"] == RANGE and "#" not in e["name"]))  # torch's own: Optimizer.step#AdamW.step


def operations(trace: Path) -> list[dict[str, Any]]:
    """What ran in a trace: name, start and end in ns of each kernel, copy and fill, or of each operator that
    does work where there are none.

    Raises:
        TraceError: as convert.
    """
    return _work(_read_events(trace))


def _work(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    work = [e for e in events if e["cat"] in WORK]
    return work or _leaves([e for e in events if e["cat"] == OPERATOR and e["name"].startswith("aten::")
                            and not NO_WORK.match(e["name"])])


def _read_events(trace: Path) -> list[dict[str, Any]]:
    """The complete events of a trace: cat, name, tid (text), start and end in ns, correlation (None: none),
    stream.

    Raises:
        TraceError: as convert.
    """
    try:
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        complete = [e for e in events if e.get("ph") == "X"
                    and e.get("cat") in (*WORK, *LAUNCHES, OPERATOR, RANGE)]
    except OSError as error:
        raise TraceError(
            f"{trace}: cannot be read ({error.strerror}), expected torch.profiler's trace"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TraceError(
            f"{trace}: {type(error).__name__} {error}, expected torch.profiler's trace: JSON with a list"
            " traceEvents of events"
        ) from None
    return [_event(e, f"{trace}: the event {str(e.get('name'))[:80]!r}") for e in complete]


def _event(event: dict[str, Any], where: str) -> dict[str, Any]:
    """One of _read_events; `where` begins the error."""
    args = event["args"] if isinstance(event.get("args"), dict) else {}
    start, duration = (_nanoseconds(event.get(key), f"{where} has {key}") for key in ("ts", "dur"))
    if duration < 0:
        raise TraceError(f"{where} lasts {duration} ns, expected no negative time")
    correlation, stream = args.get("correlation"), args.get("stream", 0)
    for key, found, least in (("correlation", correlation, 0), ("stream", stream, -1)):
        if found is not None and not (isinstance(found, int) and least <= found < CORRELATIONS):
            raise TraceError(
                f"{where} has {key} {found!r:.80}, expected a whole number from {least} to {CORRELATIONS}"
            )
    return {"cat": event["cat"], "name": str(event.get("name")), "tid": str(event.get("tid")), "start": start,
            "end": start + duration, "correlation": correlation, "stream": stream}


def _nanoseconds(microseconds: Any, where: str) -> int:
    """A trace's time, which is in microseconds with decimals."""
    if isinstance(microseconds, int | float) and abs(microseconds) < LATEST / 1e3:
        return round(microseconds * 1e3)
    raise TraceError(f"{where} {microseconds!r:.80}, expected a time in microseconds")


def _leaves(operators: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operators within which, on the same thread, no other one begins."""
    ordered = sorted(operators, key=lambda e: (e["tid"], e["start"], -e["end"]))
    return [e for e, after in zip(ordered, [*ordered[1:], None])
            if after is None or after["tid"] != e["tid"] or after["start"] >= e["end"]]
