"""Create synthetic captures of any size, as nsys exports or torch.profiler traces."""

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

PROCESS_KEY = 1 << 48 | 7 << 24  # globalPid of process 7
MAIN, AUTOGRAD = PROCESS_KEY | 7, PROCESS_KEY | 8  # globalTids
SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
    correlationId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER,
    textId INTEGER, domainId INTEGER);
"""
KERNELS = [f"void at::native::elementwise_kernel<{i}>" if i % 2 else f"sm80_xmma_gemm_{i}" for i in range(50)]
REGIONS = ("a", "b", "c", "d")
UNIT = 10_000  # length of a region in ns


def write_export(path: Path | str, **tables: Iterable[tuple]) -> None:
    """Write an nsys export with the tables in SCHEMA; ``tables`` maps each table's name to its rows."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
        for table, rows in tables.items():
            columns = len(connection.execute(f"PRAGMA table_info({table})").fetchall())
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", rows)
        connection.commit()


def ranges_of(ranges: int, steps: int) -> tuple[list[tuple[str, int, int, int]], int]:
    """Return about ``ranges`` ranges as (name, start, end, thread), and the length of a phase; times are in ns.

    A step consists of a forward and a backward phase. Each phase consists of blocks of four regions.
    The backward phase's blocks are on the autograd thread.
    """
    blocks = max(1, round((ranges / steps - 3) / 2 / 5))  # a block and its four regions are five ranges
    phase_ns, rows = (4 * blocks + 2) * UNIT, []
    for step in range(steps):
        at = step * 2 * phase_ns
        rows.append(("step", at, at + 2 * phase_ns, MAIN))
        for phase, thread in (("forward", MAIN), ("backward", AUTOGRAD)):
            rows.append((phase, at, at + phase_ns, MAIN))
            for inside in range(at + UNIT, at + UNIT + 4 * UNIT * blocks, 4 * UNIT):
                rows.append(("block", inside, inside + 4 * UNIT, thread))
                rows += [
                    (name, inside + i * UNIT, inside + (i + 1) * UNIT, thread)
                    for i, name in enumerate(REGIONS)
                ]
            at += phase_ns
    return rows, phase_ns


def make_capture(path: Path | str, kernels: int, ranges: int, steps: int = 100) -> None:
    """Write an nsys export of ``kernels`` kernels, spread evenly over the steps, with about ``ranges`` ranges."""
    rows, phase_ns = ranges_of(ranges, steps)
    names = ["step", "forward", "backward", "block", *REGIONS]
    launched = np.linspace(0, steps * 2 * phase_ns - 1, kernels).astype(int)
    thread = np.where(launched // phase_ns % 2, AUTOGRAD, MAIN).tolist()
    launches = list(zip(launched.tolist(), thread, range(1, kernels + 1)))
    write_export(
        path,
        StringIds=enumerate(names + KERNELS),
        NVTX_EVENTS=((start, end, 59, None, tid, names.index(name), 0) for name, start, end, tid in rows),
        CUPTI_ACTIVITY_KIND_RUNTIME=((t, t + 3000, tid, i) for t, tid, i in launches),
        CUPTI_ACTIVITY_KIND_KERNEL=(
            (t + 5000, t + 9000 + i % 5000, 0, 7, i, PROCESS_KEY, len(names) + i % 50)
            for t, tid, i in launches
        ),
    )


def make_trace(path: Path | str, kernels: int, ranges: int, steps: int = 100) -> None:
    """Write the same capture as :func:`make_capture`, but in torch.profiler's trace format.

    Times are integer microseconds, because Holistic Trace Analysis rounds them. Each phase also gets a GPU
    annotation, which lasts from the phase's first operation to its last.
    """
    rows, phase_ns = ranges_of(ranges, steps)
    launched = np.linspace(0, steps * 2 * phase_ns - 1, kernels).astype(int)

    def event(cat: str, name: str, pid: int, tid: int, start: int, end: int, **args: int) -> str:
        return json.dumps(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": start // 1000,
                "dur": max(1, (end - start) // 1000),
                "args": args,
            }
        )

    def events() -> Iterable[str]:
        for name, start, end, tid in rows:
            yield event(
                "user_annotation",
                f"ProfilerStep#{start // (2 * phase_ns)}" if name == "step" else name,
                7,
                tid & 0xFFFFFF,
                start,
                end,
            )
            if name in ("forward", "backward"):
                yield event("gpu_user_annotation", name, 0, 7, start + 5000, end + 5000)
        for i, t in enumerate(launched.tolist(), start=1):
            tid = (AUTOGRAD if t // phase_ns % 2 else MAIN) & 0xFFFFFF
            yield event("cuda_runtime", "cudaLaunchKernel", 7, tid, t, t + 3000, correlation=i, cbid=211)
            yield event(
                "kernel",
                KERNELS[i % 50],
                0,
                7,
                t + 5000,
                t + 9000 + i % 5000,
                correlation=i,
                stream=7,
                device=0,
            )

    with Path(path).open("w") as file:
        file.write('{"schemaVersion": 1, "distributedInfo": {"rank": 0}, "deviceProperties": [],\n')
        file.write('"traceEvents": [\n')
        for place, text in enumerate(events()):
            file.write((",\n" if place else "") + text)
        file.write("\n]}\n")


def add_short_names(path: Path) -> None:
    """Add the column shortName to an export's kernel table, because real exports have it and nsys-ai reads it."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN shortName INTEGER")
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET shortName = demangledName")
        connection.commit()
