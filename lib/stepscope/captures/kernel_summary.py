"""Summarize the kernels in a capture: their time by phase, category and name, and their rates."""

import numpy as np
import pandas as pd

from stepscope.captures.advice import MAX_NAME_CHARS, MIN_ADVICE_SHARE
from stepscope.captures.lines import Line, clean, count_text, counted, listed, short
from stepscope.captures.step_breakdown import COMMUNICATION, Device, busy_ns
from stepscope.report.tables import digits, number
from stepscope.traces.attribution import OUTSIDE
from stepscope.traces.kernel_categories import MATMUL, kernel_categories
from stepscope.traces.kernel_names import short_names

MAX_KERNELS = 5
MAX_NAMED = 4  # maximum number of ranges or phases in one line
MIN_SHARE_SHOWN = 0.0005  # share of all kernel time; smaller overlaps are omitted
MAX_PHASE_SHARE = 0.9  # share of all kernel time; a range with a larger share isn't a phase
MIN_RATED_BYTES = 1e8  # with fewer bytes, the data fits into caches, so the rate isn't limited by memory


def phases_line(gpu: Device) -> Line:
    rows = gpu.operations
    phase_ms = gpu.total_ms_by(rows, "phase").sort_index()
    min_ms = MIN_ADVICE_SHARE * phase_ms.sum()
    phases = phase_ms.drop(OUTSIDE, errors="ignore")
    text = listed(phases, " | ") or "none found"
    if len(phases):
        overlap = phase_ms.sum() - gpu.ms_per_step(busy_ns(gpu.running_ops))
        if overlap > MIN_SHARE_SHOWN * phase_ms.sum():
            text += f" (sums of kernel times; {number(overlap, 'ms')} overlap)"
        if gpu.capture.autograd:
            text += ", from autograd's ranges"
        if phase_ms.get(OUTSIDE, 0.0) > min_ms:
            text += f"; outside {number(phase_ms[OUTSIDE], 'ms')}"
    if hints := _ranges_text(gpu, min_ms):
        text += f"; in other ranges (--phase forward=NAME assigns one): {hints}"
    return Line("phase", text, {f"{name}_ms": value for name, value in phase_ms.items()})


def _ranges_text(gpu: Device, min_ms: float) -> str:
    """List the ranges outside all phases with their times, except ranges that launch only communication.

    If a single outer range accounts for nearly all of the time, list the inner ranges instead of the outer ones.
    """
    rows = gpu.operations[(gpu.operations["phase"] == OUTSIDE) & (gpu.operations["part"] != COMMUNICATION)]
    for column in ("range", "inner_range"):
        range_ms = gpu.total_ms_by(rows[rows[column] != ""], column)
        range_ms = range_ms[range_ms >= min_ms]
        if range_ms.max() < MAX_PHASE_SHARE * gpu.ms_per_step(rows["duration_ns"].sum()):
            break
    else:
        return ""
    return listed(range_ms.head(MAX_NAMED).rename(index=lambda name: f"{name[: MAX_NAME_CHARS - 2]!r}"))


def categories_line(gpu: Device) -> Line:
    category_ms = (
        gpu.total_ms_by(gpu.operations, "kernel_category").rename(index=str).rename({MATMUL: "matmul"})
    )
    values = {f"{name}_ms": value for name, value in category_ms.items()}
    if len(category_ms) > 5:
        category_ms = pd.concat([category_ms.head(5), pd.Series({"rest": category_ms.iloc[5:].sum()})])
    return Line("category", listed(category_ms, " | "), values)


def kernel_lines(kernels: pd.DataFrame) -> list[Line]:
    """List the kernels and copies that take the most time, one per line.

    Each line gives the count, the time in ms, the share of the total and the duration per launch.
    """
    top = kernels.head(MAX_KERNELS)
    names = short_names([str(name) for name in top.index], MAX_NAME_CHARS)
    lines = []
    for rank, (name, row) in enumerate(top.iterrows()):
        times = f"{count_text(row['count'])} x {clean(names[str(name)])}: {number(row['ms'], 'ms')}"
        values = {"kernel": str(name), **row.to_dict()}
        text = f"{times} ({number(row['share'], '%')}){_duration_text(row)}"
        lines.append(Line("" if rank else "kernels", text, values))
    return lines


def _duration_text(row: pd.Series) -> str:
    """Describe the median, minimum and maximum duration of a kernel's launches.

    The text is "" if the kernel is launched at most once per step, or if the durations are unknown.
    """
    shortest, longest = row.get("shortest_ms", np.nan), row.get("longest_ms", np.nan)
    if row["count"] <= 1 or not np.isfinite(longest):
        return ""
    median = digits(row["median_ms"], "ms")
    if digits(shortest, "ms") == digits(longest, "ms"):
        return f", each {median} ms"
    return f", each {median} ms ({digits(shortest, 'ms')} to {digits(longest, 'ms')})"


def leading_lines(gpu: Device) -> list[Line]:
    """Name the kernel that takes the most time in each phase or range, one phase or range per line.

    Each line also gives the kernel's count and time, and any other phases or ranges in which this kernel takes the
    most time.
    """
    leading = gpu.leading_kernels
    if len(leading) < 2:
        return []
    leading = leading[leading["part_ms"] >= MIN_ADVICE_SHARE * leading["part_ms"].sum()]
    leading = leading[leading["part_ms"].rank(ascending=False, method="first") <= MAX_NAMED]
    lines = []
    for row in leading.to_dict("records"):
        also = [part for part in leading.loc[leading["name"] == row["name"], "part"] if part != row["part"]]
        times = f"{count_text(row['count'])} x {short(row['name'])}: {number(row['ms'], 'ms')}"
        text = f"{clean(row['part'])}: {times} ({number(row['share'], '%')} of its kernels)"
        if also:
            text += f", also leads in {clean(' and '.join(also))}"
        lines.append(Line("" if lines else "leading", text, {**row, "also": also}))
    return lines


def matmul_line(gpu: Device) -> Line:
    texts = []
    for dtype, row in gpu.matmuls[gpu.matmuls["ms"] >= MIN_ADVICE_SHARE * gpu.matmuls["ms"].sum()].iterrows():
        peak = gpu.sheet.get(str(dtype), gpu.sheet.get("bf16") if dtype == "fp16" else None)
        share_text = f" ({number(row.tflops / peak, '%')} of {peak:,.0f})" if peak else ""
        texts.append(f"{clean(str(dtype))} {number(row.tflops, 'TFLOP/s')}{share_text}")
    rates = {f"{dtype}_tflops": row.tflops for dtype, row in gpu.matmuls.iterrows()}
    return Line("matmul", ", ".join(texts), rates)


def generated_line(gpu: Device) -> Line:
    total = gpu.generated.sum()
    if total["bytes"] < MIN_RATED_BYTES:
        return Line("generated", "")
    rate, peak = total["bytes"] / total["duration_ns"] / 1e3, gpu.sheet.get("tb_s")
    share_text = f" ({number(rate / peak, '%')} of {peak})" if peak else ""
    return Line(
        "generated", f"{number(rate, 'TB/s')} based on the sizes of arguments{share_text}", {"tb_s": rate}
    )


def summarize_kernel_sums(table: pd.DataFrame) -> list[Line]:
    """Summarize nsys's report cuda_gpu_kern_sum, which contains only the total time of each kernel."""
    name = table["name"].astype("category")
    total = table["total_time_ns"].sum()
    kernels = pd.DataFrame(
        {
            "count": table["instances"],
            "ms": table["total_time_ns"] / 1e6,
            "share": table["total_time_ns"] / max(1, total),
        }
    ).set_index(name)
    family_ms = (
        (table["total_time_ns"] / 1e6)
        .groupby(kernel_categories(name.array))
        .sum()
        .sort_values(ascending=False)
    )
    category_ms = family_ms.rename(index=str)[family_ms > 0].rename({MATMUL: "matmul"})
    text = (
        f"totals of {counted(table, 'kernel')} over the entire capture; {table['instances'].sum():,} launches,"
        f" {number(total / 1e6, 'ms')}"
    )
    return [
        Line(
            "capture",
            text,
            {"kernels": len(table), "launches": int(table["instances"].sum()), "kernel_ms": total / 1e6},
        ),
        Line("category", listed(category_ms, " | "), {f"{name}_ms": ms for name, ms in category_ms.items()}),
        *kernel_lines(kernels.sort_values("ms", ascending=False)),
        Line(
            "not available",
            "steps, phases, idle time, copies, exposed communication (use nsys's report cuda_gpu_trace, or the"
            " capture's SQLite export)",
        ),
    ]
