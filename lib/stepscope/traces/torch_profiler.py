"""torch.profiler's trace in the shape of an nsys export, so that one accounting (trace.py) reads both.

On a GPU its kernels come from CUPTI, as nsys's do. On a CPU there are none: the operators that do work and call no other
that does stand in their place, each launched by itself.
"""
import json
import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, textId INTEGER,
    domainId INTEGER);
"""
# Operators that allocate, or look at the same numbers in another shape: they call for no work and hide what does it.
NO_WORK = re.compile(r"aten::(resolve_|as_strided|view|_unsafe_view|_reshape_alias|empty|result_type|promote_types|expand|t$|"
                     r"transpose|lift_fresh|detach|to$|unsqueeze|select$|slice$|set_$|_local_scalar_dense|item$)")
PROCESS_ID = 1 << 48 | 7 << 24


def write_export(path: Path | str, **tables: Iterable[tuple]) -> None:
    """An export with the tables of SCHEMA, which hold the rows given by table name, in the schema's columns."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
        for table, rows in tables.items():
            columns = len(connection.execute(f"PRAGMA table_info({table})").fetchall())
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", rows)
        connection.commit()


def convert(trace: Path, export: Path) -> None:
    """Write the Chrome trace that torch.profiler exported as an event-level export."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]

    def times(event: dict) -> tuple[int, int]:
        start = round(event["ts"] * 1e3)  # microseconds, with decimals
        return start, start + round(event["dur"] * 1e3)

    threads = {tid: PROCESS_ID | number for number, tid in enumerate(sorted({str(e["tid"]) for e in events}), start=1)}
    of = lambda *kinds: [e for e in events if e.get("cat") in kinds]
    work = of("kernel", "gpu_memcpy", "gpu_memset")
    if work:
        launches = [(*times(e), threads[str(e["tid"])], e["args"]["correlation"]) for e in of("cuda_runtime", "cuda_driver")
                    if "correlation" in e["args"]]
        correlation = [e["args"]["correlation"] for e in work]
    else:
        work = _leaves([e for e in of("cpu_op") if e["name"].startswith("aten::") and not NO_WORK.match(e["name"])])
        correlation = range(1, len(work) + 1)
        launches = [(*times(e), threads[str(e["tid"])], i) for i, e in zip(correlation, work)]
    names = {name: number for number, name in enumerate(dict.fromkeys(e["name"] for e in work))}
    write_export(
        export,
        StringIds=((number, name) for name, number in names.items()),
        CUPTI_ACTIVITY_KIND_KERNEL=((*times(e), 0, e["args"].get("stream", 0), i, PROCESS_ID, names[e["name"]])
                                    for i, e in zip(correlation, work)),
        CUPTI_ACTIVITY_KIND_RUNTIME=launches,
        NVTX_EVENTS=((*times(e), 59, e["name"], threads[str(e["tid"])], None, 0) for e in of("user_annotation")
                     if "#" not in e["name"]))  # torch's own, such as Optimizer.step#AdamW.step


def _leaves(operators: list[dict]) -> list[dict]:
    """The operators within which, on the same thread, no other one begins."""
    ordered = sorted(operators, key=lambda e: (str(e["tid"]), e["ts"], -e["dur"]))
    return [e for e, after in zip(ordered, [*ordered[1:], None])
            if after is None or after["tid"] != e["tid"] or after["ts"] >= e["ts"] + e["dur"]]
