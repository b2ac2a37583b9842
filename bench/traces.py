"""How long load_trace takes, and how much memory, on a made-up capture of any size.

    python -m bench.traces [kernels [ranges]]
"""

import json
import multiprocessing
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from stepscope.traces.conservation import check_conservation, phase_clocks
from stepscope.traces.export import activity_totals, load_trace
from stepscope.traces.torch_profiler import PROCESS_ID, write_export

MAIN, AUTOGRAD = PROCESS_ID | 7, PROCESS_ID | 8  # globalTids


def make_capture(path: Path | str, kernels: int, ranges: int, steps: int = 100) -> None:
    """A capture of about that many ranges, and exactly that many kernels, launched evenly over its steps.

    A step is a forward and a backward, which are made of blocks of four regions each; backward's blocks and
    launches are on a second thread. Names of ranges are registered strings; there are 50 kernels of two
    families.
    """
    # in each phase: a block and its four regions are five ranges
    blocks = max(1, round((ranges / steps - 3) / 2 / 5))
    unit = 10_000  # ns in one region
    phase_time = (4 * blocks + 2) * unit
    names = ["step", "forward", "backward", "block", "a", "b", "c", "d"]

    def range_rows() -> Iterable[tuple]:
        def event(name: str, start: int, end: int, thread: int) -> tuple:
            return start, end, 59, None, thread, names.index(name), 0
        for step in range(steps):
            at = step * 2 * phase_time
            yield event("step", at, at + 2 * phase_time, MAIN)
            for phase, thread in (("forward", MAIN), ("backward", AUTOGRAD)):
                yield event(phase, at, at + phase_time, MAIN)
                for block in range(blocks):
                    inside = at + (1 + 4 * block) * unit
                    yield event("block", inside, inside + 4 * unit, thread)
                    for i in range(4):
                        yield event(names[4 + i], inside + i * unit, inside + (i + 1) * unit, thread)
                at += phase_time

    launched = np.linspace(0, steps * 2 * phase_time - 1, kernels).astype(int)
    thread = np.where(launched // phase_time % 2, AUTOGRAD, MAIN).tolist()
    index, launched = range(1, kernels + 1), launched.tolist()
    kernel_names = [f"void at::native::elementwise_kernel<{i}>" if i % 2 else f"sm80_xmma_gemm_{i}"
                    for i in range(50)]
    write_export(
        path,
        StringIds=enumerate(names + kernel_names),
        NVTX_EVENTS=range_rows(),
        CUPTI_ACTIVITY_KIND_RUNTIME=((t, t + 3000, tid, i) for t, tid, i in zip(launched, thread, index)),
        CUPTI_ACTIVITY_KIND_KERNEL=((t + 5000, t + 9000 + i % 5000, 0, 7, i, PROCESS_ID, len(names) + i % 50)
                                    for t, i in zip(launched, index)),
    )


def add_short_names(path: Path) -> None:
    """Give the kernels of an export the column that nsys's own have and other programs read."""
    with closing(sqlite3.connect(path)) as connection:
        table = "CUPTI_ACTIVITY_KIND_KERNEL"
        if "shortName" not in [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN shortName INTEGER")
            connection.execute(f"UPDATE {table} SET shortName = demangledName")
            connection.commit()


def write_chrome_trace(export: Path, path: Path) -> None:
    """The operations, launches and ranges of an export as torch.profiler would have written them.

    In whole microseconds, since Holistic Trace Analysis rounds, and then what is shorter ends before it
    begins. The phases are also there as the GPU sees them (``gpu_user_annotation``): from the first to the
    last of their operations.
    """
    operations, ranges = load_trace(export)
    operations = operations[operations["launch_start_ns"].notna()]

    def events(category: str, names, process, thread, start_ns, duration_ns, **args) -> Iterator[dict]:
        for name, pid, tid, start, duration, *values in zip(names, process, thread, start_ns, duration_ns,
                                                            *args.values()):
            yield {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start // 1000,
                   "dur": duration // 1000 + 1,
                   "args": dict(zip(args, values))}

    work = operations.assign(end_ns=operations["start_ns"] + operations["duration_ns"]).groupby(["phase_range", "device", "stream"])
    phases = work.agg(start_ns=("start_ns", "min"), end_ns=("end_ns", "max"),
                      name=("phase", "first")).reset_index()
    phases = phases[phases["phase_range"] >= 0]
    correlation, stream, device = (operations[c].tolist() for c in ("correlation_id", "stream", "device"))
    calls = ["cudaLaunchKernel"] * len(operations)
    trace = [*events("cuda_runtime", calls, operations["process"].tolist(), operations["thread"].tolist(),
                     operations["launch_start_ns"].tolist(), operations["launch_duration_ns"].tolist(),
                     correlation=correlation),
             *events("kernel", operations["name"].tolist(), device, stream, operations["start_ns"].tolist(),
                     operations["duration_ns"].tolist(), correlation=correlation, stream=stream,
                     device=device),
             *events("user_annotation", ranges["name"].tolist(), ranges["process"].tolist(),
                     ranges["thread"].tolist(),
                     ranges["start_ns"].tolist(), (ranges["end_ns"] - ranges["start_ns"]).tolist()),
             *events("gpu_user_annotation", phases["name"].tolist(), phases["device"].tolist(),
                     phases["stream"].tolist(),
                     phases["start_ns"].tolist(), (phases["end_ns"] - phases["start_ns"]).tolist())]
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 0}, "deviceProperties": [],
                                "traceEvents": trace}))


def peak_mib() -> float:
    """The most memory that this process has had; on Linux."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def _measure(path: str) -> dict[str, float]:
    begin = time.perf_counter()
    operations, ranges = load_trace(path)
    loaded = time.perf_counter()
    check_conservation(operations, activity_totals(path))
    clocks = phase_clocks(operations, ranges)
    operations.groupby(["phase", "region", "family"], observed=True)["duration_ns"].sum()
    accounted = time.perf_counter()
    return {"kernels": len(operations), "ranges": len(ranges), "load_s": loaded - begin,
                "account_s": accounted - loaded, "peak_mib": peak_mib(),
                "in_phases": int(clocks["operations"].sum())}


def bench_trace(kernels: int = 1_000_000, ranges: int = 1_000_000) -> dict[str, float]:
    """Load a made-up capture in a process of its own; print and return what it took.

    Returns:
        kernels, ranges (in the capture), load_s, account_s (conservation, clocks and a summary), peak_mib (of
        the whole
        process: interpreter, pandas and results; Linux only), in_phases (operations in the table of clocks).
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "capture.sqlite")
        make_capture(path, kernels, ranges)
        # A fresh process, so that making the capture is not in its peak.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            result = pool.submit(_measure, str(path)).result()
    for key, value in result.items():
        print(key, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}", end="  ")
    print()
    return result


if __name__ == "__main__":
    bench_trace(*map(int, sys.argv[1:]))
