"""Draw the attention study's figures."""

import pandas as pd
import seaborn as sns
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgba

from stepscope.report import style
from stepscope.report.tables import digits
from stepscope.studies.attention.figures import LINE_COLORS, spaced_lengths


@style.look()
def attention_time(title: str, rows: pd.DataFrame) -> style.Picture:
    """Plot the forward and backward GPU time against the context length, with one line per implementation.

    Args:
        rows: rows of the view ``attention``, for one head dimension and precision.
    """
    rows = rows.dropna(subset="gpu_ms")
    drawn, axes = style.figure(title, height=4)
    style.lines(axes, rows, "context_length", "gpu_ms", "name", LINE_COLORS)
    axes.set(xscale="log", yscale="log", xlabel="context length", ylabel="GPU time, ms")
    lengths = sorted(rows["context_length"].unique())
    ticks = spaced_lengths(lengths)
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # Labels are at the right edge. If a line ends earlier, its label also names its last context length.
    last = rows.sort_values("context_length").groupby("name")[["context_length", "gpu_ms"]].last()
    ends, colors = {}, {}
    for name, length, ms in last.itertuples():
        label = name if length == lengths[-1] else f"{name}, up to {length:,}"
        ends[label] = lengths[-1], ms
        colors[label] = LINE_COLORS[name]
    style.label_ends(axes, ends, colors)
    return drawn


@style.look()
def attention_heatmap(title: str, rows: pd.DataFrame) -> style.Picture:
    """Draw a heatmap of one implementation's GPU time by head dimension and context length.

    The time covers forward and backward together.

    Args:
        rows: rows of the view ``attention``, one per head dimension and context length.
    """
    times, status = (
        rows.pivot(index="d_model", columns="context_length", values=name) for name in ("gpu_ms", "status")
    )
    drawn, axes = style.figure(title, 2.9)
    # one color with varying opacity, which is readable on light and dark backgrounds
    shades = LinearSegmentedColormap.from_list("blue", [to_rgba(style.BLUE, 0.08), to_rgba(style.BLUE, 0.55)])
    sns.heatmap(
        times,
        annot=times.map(lambda ms: digits(ms, "ms")),
        fmt="",
        norm=LogNorm(),
        cmap=shades,
        cbar=False,
        linewidths=1,
        linecolor=style.PAPER,
        annot_kws={"color": style.INK},
        ax=axes,
    )
    for row, column in zip(*(status == "oom").to_numpy().nonzero()):
        axes.text(column + 0.5, row + 0.5, "out of\nmemory", ha="center", va="center", color=style.RED)
    axes.grid(False)
    axes.set(xlabel="context length", ylabel="head dimension")
    axes.tick_params(left=False, bottom=False, labelrotation=0)
    axes.set_title("GPU time of forward and backward, ms; blank: not run", loc="left")
    axes.set_xticklabels([f"{length:,}" for length in times])
    return drawn
