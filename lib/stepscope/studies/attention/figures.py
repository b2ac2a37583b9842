"""Draw the attention notebook's figure, which shows time and memory by context length."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from stepscope.report import style
from stepscope.report.tables import number
from stepscope.studies.attention.tables import LABELS

COLORS = (style.INK, style.ORANGE, style.BLUE, style.GREEN, style.RED, style.PINK, style.AMBER)
LINE_COLORS = dict(zip(LABELS.values(), COLORS))
MAX_DECADES = 2.5  # axes that span more decades are labeled only at powers of 10, not at 2 and 5 times them
MIN_TICK_RATIO = 4  # minimum ratio of neighboring labeled context lengths; closer labels would overlap
CROSS_STEP = 0.06  # distance between two crosses, as a share of the height of the axes
METRICS = {"gpu_ms": "GPU time, ms", "wall_ms": "wall time, ms"}


@style.look()
def time_and_memory(
    passes: pd.DataFrame,
    metric: str,
) -> style.Picture | None:
    """Plot time and saved memory against the context length, with a line for each implementation.

    Return None if nothing ran.

    Args:
        passes: one row per case, for forward and backward together. Cases that ran out of memory are drawn as
            crosses.
        metric: gpu_ms or wall_ms.
    """
    names = passes["implementation"].map(LABELS)
    rows = passes.assign(name=names).sort_values("context_length")
    timed = rows.dropna(subset=metric)
    if timed.empty:
        return None
    drawn, axes = style.figure(_message(timed, metric), 5.6, rows=2, sharex=True)
    lengths = sorted(rows["context_length"].unique())
    limits = lengths[0] / 1.1, lengths[-1] * 1.1
    labels = {metric: METRICS[metric], "saved_mib": "saved for backward, MiB"}
    for panel, (column, label) in zip(axes, labels.items()):
        positive = timed[timed[column] > 0]
        ends = style.lines(panel, positive, "context_length", column, "name", LINE_COLORS)
        panel.set(xscale="log", yscale="log", xlim=limits, ylabel=label)
        if column == metric:
            out_of_memory = rows[rows["status"] == "oom"]
            _crosses(panel, out_of_memory)
        label_log_axis(panel)
        right_edge = limits[1]
        at_edge = {name: (right_edge, value) for name, (_, value) in ends.items()}
        style.label_ends(panel, at_edge, LINE_COLORS)
    labeled = spaced_lengths(lengths)
    axes[1].set_xticks(labeled, [f"{length:,}" for length in labeled])
    axes[1].set_xticks([], minor=True)
    axes[1].set(xlabel="sequence length, tokens")
    return drawn


def _message(timed: pd.DataFrame, metric: str) -> str:
    """Return a title that compares the slowest implementation with the fastest.

    They are compared at the longest context length that at least two implementations ran.
    """
    counts = timed.groupby("context_length")["name"].nunique()
    counts = counts.clip(upper=2)
    length = counts.index[counts == counts.max()].max()
    rows = timed[timed["context_length"] == length]
    rows = rows.sort_values(metric)
    fastest = rows.iloc[0]
    slowest = rows.iloc[-1]
    fastest_name = fastest["name"]
    fastest_ms = fastest[metric]
    if len(rows) == 1:
        return f"At {length:,} tokens, {fastest_name} takes {number(fastest_ms, 'ms')}"
    slowest_name = slowest["name"]
    ratio = number(slowest[metric] / fastest_ms, "x")
    return f"At {length:,} tokens, {slowest_name} takes {ratio} as long as {fastest_name}"


def label_log_axis(axes: Axes) -> None:
    """Label a logarithmic vertical axis so that values can be read from it, even within one decade."""
    low, high = axes.get_ylim()
    is_short = math.log10(high / low) < MAX_DECADES
    labeled_digits = (1, 2, 5) if is_short else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=labeled_digits))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick_label))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _tick_label(value: float, position: int) -> str:
    if value >= 1:
        return f"{value:,.0f}"
    return f"{value:g}"


def spaced_lengths(lengths: list[int]) -> list[int]:
    """Return the context lengths to label: all but those that are too close to a longer labeled length."""
    labeled = [lengths[-1]]
    for length in reversed(lengths):
        if length * MIN_TICK_RATIO <= labeled[-1]:
            labeled.append(length)
    return labeled


def _crosses(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw a cross above the lines for each case that ran out of memory, in the color of its implementation."""
    if rows.empty:
        return
    low, high = axes.get_ylim()
    room = (high / low) ** 0.35
    axes.set_ylim(low, high * room)
    for place, (name, length) in enumerate(zip(rows["name"], rows["context_length"])):
        height = 1 - CROSS_STEP * place
        axes.plot(
            length,
            height,
            "x",
            color=LINE_COLORS[name],
            markeredgewidth=2,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
