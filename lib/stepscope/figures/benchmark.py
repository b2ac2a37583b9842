"""Draw the benchmark study's figures."""

import numpy as np
import pandas as pd
from matplotlib.ticker import PercentFormatter

from stepscope.report import style
from stepscope.report.tables import number
from stepscope.stats import LAUNCH_BOUND


@style.look()
def phases(title: str, rows: pd.DataFrame) -> style.Picture:
    """Draw each phase's share of the full step's GPU time, for each size.

    Args:
        rows: rows of the view ``phases``, one per size.
    """
    names = [*style.PHASE_COLORS]
    by_size = rows.set_index("size")
    shares = by_size[[f"{phase}_share" for phase in names]].set_axis(names, axis="columns")
    drawn, axes = style.figure(title, 1.4 + 0.34 * len(rows))
    style.stacked_bars(
        axes,
        shares,
        style.PHASE_COLORS,
        lambda phase, row: number(by_size[f"{phase}_ms"].iloc[row], "ms"),
    )
    style.without_axis(axes)
    axes.set_xlabel("GPU time of each phase; widths are shares of the step")
    drawn.legend(loc="outside lower center", ncols=4)
    return drawn


@style.look()
def busy(title: str, rows: pd.DataFrame) -> style.Picture:
    """Plot the GPU's busy time, as a share of wall time, against the context length.

    There is one line per size. Hollow points mark GPU-bound steps.

    Args:
        rows: rows of the view ``times``, one per size and context length.
    """
    drawn, axes = style.figure(title, 3.4)
    ends = style.lines(axes, rows, "context_length", "busy", "size", style.SIZE_COLORS)
    hollow = rows[~rows["launch_bound"]]
    axes.scatter(hollow["context_length"], hollow["busy"], color=style.PAPER, s=9, zorder=4)
    lengths = sorted(rows["context_length"].unique())
    axes.annotate(
        "hollow: GPU-bound",
        (lengths[0], LAUNCH_BOUND),
        xytext=(0, 3),
        textcoords="offset points",
        color=style.MUTED,
        va="bottom",
    )
    axes.hlines(LAUNCH_BOUND, lengths[0], lengths[-1], color=style.MUTED, linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yticks(np.arange(0, 1.01, 0.2))
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set(xlabel="context length", ylabel="GPU time over wall time", ylim=(0, 1.22))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    style.label_ends(axes, ends, style.SIZE_COLORS)
    return drawn


@style.look()
def compile_kernels(title: str, rows: pd.DataFrame) -> style.Picture:
    """Draw the GPU time of non-matmul kernels, with two bars per size: eager and compiled.

    Args:
        rows: rows of the view ``compiled``, one per size.
    """
    drawn, axes = style.figure(title, 1.0 + 0.7 * len(rows))
    labels, values, texts = [], [], []
    for _, row in rows.iterrows():
        for program, prefix in (("eager", "eager_other"), ("compiled", "other")):
            gpu_ms, count = row[f"{prefix}_gpu_ms"], row[f"{prefix}_count"]
            labels.append(f"{row['size']}, {program}")
            values.append(gpu_ms)
            texts.append(f"{number(gpu_ms, 'ms')}, {number(count, 'n')} kernels")
    style.bars(axes, labels, values, texts, [style.ORANGE, style.BLUE] * len(rows))
    axes.set_xlim(0, max(values) * 1.75)
    axes.set_xlabel("GPU time without matmuls")
    return drawn
