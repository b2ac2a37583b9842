"""Figures of the benchmarking study."""

import numpy as np
import pandas as pd
from matplotlib.ticker import PercentFormatter

from stepscope.report import style
from stepscope.report.schemas import Tables
from stepscope.report.tables import number
from stepscope.stats import LAUNCH_BOUND, launch_bound_rows
from stepscope.studies.benchmark.tables import (
    compiled_with_eager,
    context,
    low_precision,
    low_steps,
    other_than_matmuls,
    phase_times,
    waiting,
)


@style.look()
def phases(tables: Tables) -> style.Picture:
    """Each size's full fp32 step in GPU time, a part a phase, as shares."""
    times = phase_times(tables)
    share = times.div(times.sum(axis=1), axis=0)

    def ends(part: pd.Series) -> str:
        return " to ".join(dict.fromkeys(number(share, "%") for share in (part.min(), part.max())))

    drawn, axes = style.figure(
        f"Forward and backward are {ends(share['forward'] + share['backward'])} of an"
        f" fp32 step's GPU time, AdamW is {ends(share['optimizer'])}",
        3.1,
    )
    style.stacked_bars(
        axes,
        share[[*style.PHASE_COLORS]],
        style.PHASE_COLORS,
        lambda phase, place: number(times[phase].iloc[place], "ms"),
    )
    style.without_axis(axes)
    axes.set_xlabel(f"share of the step's GPU time, context {context(tables):,}")
    drawn.legend(loc="outside lower center", ncols=4)
    return drawn


@style.look()
def busy(tables: Tables) -> style.Picture:
    """Busy share of the full step over the context, a line a size; steps that are not launch-bound hollow."""
    waits, rows = waiting(tables), low_steps(tables).dropna(subset=["busy"])
    (short, short_count), (long, long_count) = waits.sum().items()
    counted = f"{short_count} of {len(waits)} sizes are launch-bound at context {short:,}, and {long_count}"
    counted += f" at {long:,}"
    one = waits.replace({True: "launch-bound", False: "GPU-bound"}).iloc[0]
    alone = f"{waits.index[0]} is {one[short]} at context {short:,}, and {one[long]} at {long:,}"
    drawn, axes = style.figure(f"In {low_precision(tables)}, {counted if len(waits) > 1 else alone}", 3.4)
    last = style.lines(axes, rows, "context_length", "busy", "size", style.SIZE_COLORS)
    hollow = rows[~launch_bound_rows(rows)]
    axes.scatter(hollow["context_length"], hollow["busy"], color=style.PAPER, s=9, zorder=4)
    axes.annotate(
        "hollow: GPU-bound",
        (short, LAUNCH_BOUND),
        xytext=(0, 3),
        textcoords="offset points",
        color=style.MUTED,
        va="bottom",
    )
    contexts = sorted(rows["context_length"].unique())
    axes.hlines(LAUNCH_BOUND, contexts[0], contexts[-1], color=style.MUTED, linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yticks(np.arange(0, 1.01, 0.2))
    axes.set_xticks(contexts, [f"{length:,}" for length in contexts])
    axes.set(xlabel="context, tokens", ylabel="GPU time over wall time", ylim=(0, 1.22))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    style.label_ends(axes, last, style.SIZE_COLORS)
    return drawn


@style.look()
def compile_kernels(tables: Tables) -> style.Picture:
    """What is no matmul in forward and backward, before and after compiling blocks: GPU time by size."""
    rows, precision = other_than_matmuls(tables), compiled_with_eager(tables, "blocks")["precision"].iloc[0]
    last = rows.iloc[-1]
    drawn, axes = style.figure(
        f"Compiling takes {last.name}'s kernels that are no matmuls from"
        f" {number(last['gpu_ms_eager'], 'ms')} to {number(last['gpu_ms'], 'ms')}",
        1.0 + 0.7 * len(rows),
    )
    labels, values, texts = [], [], []
    for size, row in rows.iterrows():
        for words, which in (("eager", "_eager"), ("compiled", "")):
            labels.append(f"{size}, {words}")
            values.append(row[f"gpu_ms{which}"])
            texts.append(f"{number(values[-1], 'ms')}, {number(row[f'count{which}'], 'n')} kernels")
    style.bars(axes, labels, values, texts, [style.ORANGE, style.BLUE] * len(rows))
    axes.set_xlim(0, max(values) * 1.75)
    axes.set_xlabel(f"GPU time, forward + backward, {precision}, context {context(tables):,}")
    return drawn
