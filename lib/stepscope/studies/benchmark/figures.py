"""Figures of the benchmarking study; None where there is nothing to draw."""
import numpy as np
from matplotlib.ticker import FuncFormatter, PercentFormatter

from stepscope.report.style import (
    BLUE,
    MUTED,
    ORANGE,
    PAPER,
    PHASE_COLORS,
    SIZE_COLORS,
    Picture,
    figure,
    label_ends,
)
from stepscope.report.tables import number
from stepscope.step.clocks import WHOLE
from stepscope.step.stats import LAUNCH_BOUND
from stepscope.studies.benchmark.tables import (
    PLAIN,
    Tables,
    besides_matmuls,
    chosen,
    context,
    low_precision,
    low_steps,
    phase_times,
    repeated,
)

NARROW = 0.09  # of the widest bar: a part that is narrower has no number


def phases(tables: Tables) -> Picture | None:
    """Each size's full fp32 step in GPU time, a part a phase, as shares."""
    try:
        times = phase_times(tables)
    except LookupError:
        return None
    share = times.div(times.sum(axis=1), axis=0)
    forward_backward = share[["forward", "backward"]].sum(axis=1)
    ends = dict.fromkeys(number(share, "%") for share in (forward_backward.min(), forward_backward.max()))
    drawn, axes = figure(
        f"Forward and backward are {' to '.join(ends)} of an fp32 step; AdamW is the rest", 3.0)
    left = np.zeros(len(share))
    for phase, color in PHASE_COLORS.items():
        axes.barh(share.index, share[phase], left=left, color=color, height=0.66, label=phase)
        for place, (begin, width, size) in enumerate(zip(left, share[phase], share.index)):
            if width > NARROW:
                axes.text(begin + width / 2, place, number(times.loc[size, phase], "ms"), ha="center",
                          va="center", color=PAPER)
        left += share[phase].to_numpy()
    axes.invert_yaxis()
    axes.grid(False)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    drawn.legend(loc="outside lower center", ncols=4)
    return drawn


def busy(tables: Tables) -> Picture | None:
    """Busy share of the full step over the context, a line a size."""
    try:
        precision = low_precision(tables)
        rows = low_steps(tables).dropna(subset=["busy"])
    except LookupError:
        return None
    waits = (rows["busy"] < LAUNCH_BOUND).groupby(rows["context_length"]).sum()
    if len(waits) < 2:
        return None
    drawn, axes = figure(f"In {precision}, {waits.iloc[0]} of {rows['size'].nunique()} sizes are launch-bound"
                         f" at context {waits.index[0]:,}, and {waits.iloc[-1]} at {waits.index[-1]:,}", 3.4)
    ends = {}
    for size, own in rows.sort_values("context_length").groupby("size", sort=False):
        axes.plot(own["context_length"], own["busy"].clip(upper=1), marker="o",
                  color=SIZE_COLORS.get(size, BLUE))
        ends[size] = (own["context_length"].iloc[-1], min(own["busy"].iloc[-1], 1))
    axes.axhline(LAUNCH_BOUND, color=MUTED, linewidth=1, linestyle="--")
    axes.annotate("launch-bound below", (waits.index[0], LAUNCH_BOUND), xytext=(0, 3),
                  textcoords="offset points", color=MUTED, va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_xticks(waits.index, [f"{length:,}" for length in waits.index])
    axes.set_xlabel("context")
    axes.set_ylabel("GPU busy")
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    label_ends(axes, dict(sorted(ends.items(), key=lambda end: end[1][1])), SIZE_COLORS)
    return drawn


def first_steps(tables: Tables) -> Picture | None:
    """The first steps of a cold process over the median of its warm ones, a line a size."""
    rows = tables.get("benchmark.samples")
    if rows is None:
        return None
    try:
        rows = chosen(rows, **PLAIN, precision="fp32", mode="step", phase=WHOLE,
                      context_length=context(tables))
    except LookupError:
        return None
    if rows.empty:
        return None
    warm = rows[~rows["warmup"]].groupby("size", sort=False)["wall_ms"].median()
    over = rows.assign(over=rows["wall_ms"] / rows["size"].map(warm))
    first = over[over["step"] == 0]["over"]
    ends = dict.fromkeys(number(ratio, "x") for ratio in (first.min(), first.max()))
    drawn, axes = figure(f"The first step of a process takes {' to '.join(ends)} a warm one's time", 3.2)
    for size, own in over.groupby("size", sort=False):
        axes.plot(own["step"] + 1, own["over"], marker="o", color=SIZE_COLORS.get(size, BLUE), label=size)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}x"))
    axes.set_xlabel("step of the process")
    axes.legend()
    return drawn


def compile_kernels(tables: Tables) -> Picture | None:
    """What is no matmul in forward and backward, before and after compiling blocks: GPU time by size."""
    try:
        rows = besides_matmuls(tables, "blocks")
    except LookupError:
        return None
    if rows.empty:
        return None
    last = rows.iloc[-1]
    drawn, axes = figure(f"Compiling turns {number(last['count_eager'], 'n')} kernels of {last.name} that are"
                         f" no matmuls into {number(last['count'], 'n')}", 3.4)
    places = np.arange(len(rows))
    top = rows["gpu_ms_eager"].max()
    for offset, column, color, words in ((-0.2, "_eager", ORANGE, "eager"),
                                         (0.2, "", BLUE, "blocks compiled")):
        axes.barh(places + offset, rows[f"gpu_ms{column}"], height=0.36, color=color, label=words)
        for place, (ms, count) in enumerate(zip(rows[f"gpu_ms{column}"], rows[f"count{column}"])):
            axes.annotate(f"{number(ms, 'ms')}, {number(count, 'n')} kernels", (ms, place + offset),
                          xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, rows.index)
    axes.invert_yaxis()
    axes.set_xlim(0, top * 1.45)
    axes.grid(False)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.legend(loc="upper right")
    return drawn


def repeat_clocks(tables: Tables) -> Picture | None:
    """How far several processes are apart, a shape a row, by either clock."""
    try:
        rows = repeated(tables)
    except LookupError:
        return None
    drawn, axes = figure(f"GPU time repeats within {number(rows['gpu'].max() - 1, '%')}, wall time within"
                         f" {number(rows['wall'].max() - 1, '%')}", 0.32 * len(rows) + 1.6)
    labels = [f"{row.size}, {row.context_length:,}, {row.precision}" for row in rows.itertuples()]
    for column, color, words in (("wall", ORANGE, "wall time"), ("gpu", BLUE, "GPU time")):
        axes.plot(rows[column] - 1, range(len(rows)), "o", color=color, label=words, markersize=8)
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("slowest process over the quickest, less 1")
    drawn.legend(loc="outside lower center", ncols=2)
    return drawn
