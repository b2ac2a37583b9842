"""What a capture shows of its kernels: by phase, by category, by name, and how fast they are."""

import numpy as np
import pandas as pd

from stepscope.captures.account import COMMUNICATION, Device, covered
from stepscope.captures.advice import SHOWN, WORTH
from stepscope.captures.lines import Line, clean, count_text, counted, listed, short
from stepscope.report.tables import digits, number
from stepscope.traces.attribution import OUTSIDE
from stepscope.traces.families import MATMUL, families
from stepscope.traces.kernel_names import short_names

TOP = 5  # kernels that are named
MAX_NAMED = 4  # ranges and phases that are named
MIN_SHARE_SHOWN = 0.0005  # of all of it: less is not mentioned
MOST_WORK = 0.9  # of all of it: a range that holds so much is no phase
RATE_BYTES = 1e8  # moved by generated kernels: of less a rate says nothing, it fits into caches


def phases_line(one: Device) -> Line:
    rows = one.operations
    found = one.summed(rows, "phase").sort_index()
    least = WORTH * found.sum()
    phases = found.drop(OUTSIDE, errors="ignore")
    text = listed(phases, " | ") or "none found"
    if len(phases):
        overlap = found.sum() - one.a_step(covered(one.running))
        if overlap > MIN_SHARE_SHOWN * found.sum():
            text += f" (kernel sums; {number(overlap, 'ms')} overlap)"
        text += ", from autograd's ranges" * one.capture.autograd
        if found.get(OUTSIDE, 0.0) > least:
            text += f"; outside {number(found[OUTSIDE], 'ms')}"
    if hints := _ranges(one, least):
        text += f"; in other ranges (--phase forward=NAME assigns one): {hints}"
    return Line("phase", text, {f"{name}_ms": value for name, value in found.items()})


def _ranges(one: Device, least: float) -> str:
    """List the ranges of no phase that hold work, not only communication: outer ones, or, where one of them holds
    nearly all of it, the ones within."""
    rows = one.operations[(one.operations["phase"] == OUTSIDE) & (one.operations["part"] != COMMUNICATION)]
    for column in ("range", "inner_range"):
        found = one.summed(rows[rows[column] != ""], column)
        found = found[found >= least]
        if found.max() < MOST_WORK * one.a_step(rows["duration_ns"].sum()):
            break
    else:
        return ""
    return listed(found.head(MAX_NAMED).rename(index=lambda name: f"{name[: SHOWN - 2]!r}"))


def categories_line(one: Device) -> Line:
    found = one.summed(one.operations, "family").rename(index=str).rename({MATMUL: "matmul"})
    values = {f"{name}_ms": value for name, value in found.items()}
    if len(found) > 5:
        found = pd.concat([found.head(5), pd.Series({"rest": found.iloc[5:].sum()})])
    return Line("category", listed(found, " | "), values)


def kernel_lines(kernels: pd.DataFrame) -> list[Line]:
    """List the kernels (and copies) with the most time, a line each: count, ms, share of all operations' time, and
    how long one takes."""
    top = kernels.head(TOP)
    shown = short_names([str(name) for name in top.index], SHOWN)
    lines = []
    for place, (name, row) in enumerate(top.iterrows()):
        times = f"{count_text(row['count'])} x {clean(shown[str(name)])}: {number(row['ms'], 'ms')}"
        values = {"kernel": str(name), **row.to_dict()}
        text = f"{times} ({number(row['share'], '%')}){_each(row)}"
        lines.append(Line("" if place else "kernels", text, values))
    return lines


def _each(row: pd.Series) -> str:
    """Describe how long one of a kernel's operations takes: the median, the shortest and the longest; "" for one
    operation a step, or where the times are not known."""
    shortest, longest = row.get("shortest_ms", np.nan), row.get("longest_ms", np.nan)
    if row["count"] <= 1 or not np.isfinite(longest):
        return ""
    median = digits(row["median_ms"], "ms")
    if digits(shortest, "ms") == digits(longest, "ms"):
        return f", each {median} ms"
    return f", each {median} ms ({digits(shortest, 'ms')} to {digits(longest, 'ms')})"


def leading_lines(one: Device) -> list[Line]:
    """Name the kernel with the most time in each phase, or range: how often it is launched there, and where else
    it leads."""
    leading = one.leading_kernels
    if len(leading) < 2:
        return []
    leading = leading[leading["part_ms"] >= WORTH * leading["part_ms"].sum()]
    leading = leading[leading["part_ms"].rank(ascending=False, method="first") <= MAX_NAMED]
    lines = []
    for row in leading.to_dict("records"):
        also = [part for part in leading.loc[leading["name"] == row["name"], "part"] if part != row["part"]]
        times = f"{count_text(row['count'])} x {short(row['name'])}: {number(row['ms'], 'ms')}"
        text = f"{clean(row['part'])}: {times} ({number(row['share'], '%')} of its kernels)"
        text += f", leads in {clean(' and '.join(also))} too" * bool(also)
        lines.append(Line("" if lines else "leading", text, {**row, "also": also}))
    return lines


def matmul_line(one: Device) -> Line:
    rated = []
    for dtype, row in one.matmuls[one.matmuls["ms"] >= WORTH * one.matmuls["ms"].sum()].iterrows():
        most = one.sheet.get(str(dtype), one.sheet.get("bf16") if dtype == "fp16" else None)
        of = f" ({number(row.tflops / most, '%')} of {most:,.0f})" if most else ""
        rated.append(f"{clean(str(dtype))} {number(row.tflops, 'TFLOP/s')}{of}")
    rates = {f"{dtype}_tflops": row.tflops for dtype, row in one.matmuls.iterrows()}
    return Line("matmul", ", ".join(rated), rates)


def generated_line(one: Device) -> Line:
    made = one.generated.sum()
    if made["bytes"] < RATE_BYTES:
        return Line("generated", "")
    rate, most = made["bytes"] / made["duration_ns"] / 1e3, one.sheet.get("tb_s")
    of = f" ({number(rate / most, '%')} of {most})" if most else ""
    return Line("generated", f"{number(rate, 'TB/s')} by argument sizes{of}", {"tb_s": rate})


def lines_of_sums(table: pd.DataFrame) -> list[Line]:
    """Summarize nsys's sums of kernels."""
    name = table["name"].astype("category")
    total = table["total_time_ns"].sum()
    kernels = pd.DataFrame(
        {
            "count": table["instances"],
            "ms": table["total_time_ns"] / 1e6,
            "share": table["total_time_ns"] / max(1, total),
        }
    ).set_index(name)
    family = (table["total_time_ns"] / 1e6).groupby(families(name.array)).sum().sort_values(ascending=False)
    found = family.rename(index=str)[family > 0].rename({MATMUL: "matmul"})
    text = (
        f"sums of {counted(table, 'kernel')}, all of the capture; {table['instances'].sum():,} launches"
        f" of {number(total / 1e6, 'ms')}"
    )
    return [
        Line(
            "capture",
            text,
            {"kernels": len(table), "launches": int(table["instances"].sum()), "kernel_ms": total / 1e6},
        ),
        Line("category", listed(found, " | "), {f"{name}_ms": ms for name, ms in found.items()}),
        *kernel_lines(kernels.sort_values("ms", ascending=False)),
        Line(
            "not available",
            "steps, phases, idle time, copies, exposed communication: nsys's report cuda_gpu_trace or its"
            " export has them",
        ),
    ]
