"""Measure capture readers: their run time, their peak memory, and the GPU time that they account for.

Run each reader in a new process, because :func:`peak_mib` covers the entire lifetime of the process.
"""

import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from timeit import default_timer

ABSENT = "not installed (pip install '.[bench]')"
Found = dict[str, float | str]


def peak_mib() -> float:
    """Return this process's peak resident memory in MiB (Linux only)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def ours(path: str) -> Found:
    """Measure load_capture, which finds the phase, step, category and launch of each kernel, copy and fill."""
    from stepscope.captures.capture import load_capture

    started = default_timer()
    capture = load_capture(path)
    loaded = default_timer() - started
    return {
        "s": loaded,
        "operations": len(capture.operations) + len(capture.excluded),
        "gpu_ms": (capture.operations["duration_ns"].sum() + capture.excluded["duration_ns"].sum()) / 1e6,
        "peak_mib": peak_mib(),
    }


def ours_whole(path: str) -> Found:
    """Measure the complete ``stepscope profile``, from reading the file to the rendered text."""
    from stepscope.captures.lines import rendered
    from stepscope.captures.summary import profile

    started = default_timer()
    rendered(profile(path))
    return {"s": default_timer() - started, "peak_mib": peak_mib()}


def nsys_ai(path: str) -> Found:
    """Measure nsys-ai's mapping of kernels to ranges, which omits copies, fills and kernels outside ranges."""
    try:
        from nsys_ai.nvtx_attribution import attribute_kernels_to_nvtx
    except ImportError:
        return {"s": ABSENT}
    with closing(sqlite3.connect(path)) as connection:
        started = default_timer()
        rows = attribute_kernels_to_nvtx(connection, path)
        seconds = default_timer() - started
    time_ns = sum(
        row.get("k_end", row.get("end", 0)) - row.get("k_start", row.get("start", 0)) for row in rows
    )
    return {"s": seconds, "operations": len(rows), "gpu_ms": time_ns / 1e6, "peak_mib": peak_mib()}


def hta(path: str) -> Found:
    """Measure Holistic Trace Analysis's breakdown of a rank's time."""
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError:
        return {"s": ABSENT}
    logging.disable(logging.WARNING)  # hides HTA's progress messages
    started = default_timer()
    analysis = TraceAnalysis(trace_files={0: path}, trace_dir=str(Path(path).parent))
    whole = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    seconds = default_timer() - started
    kernels = analysis.t.get_trace(0)
    kernels = kernels[kernels["stream"] >= 0]
    return {
        "s": seconds,
        "operations": len(kernels),
        "gpu_ms": float(kernels["dur"].sum()) / 1e3,
        "idle": f"idle {whole['idle_time_pctg']:.1f}%",
        "peak_mib": peak_mib(),
    }


PROGRAMS: dict[str, list[Callable[[str], Found]]] = {
    "sqlite": [ours, ours_whole, nsys_ai],
    "json": [ours, ours_whole, hta],
}
