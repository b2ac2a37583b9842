"""Figures of the attention study; None where there is nothing to draw."""
from matplotlib.figure import Figure

from stepscope.report.style import AMBER, BLUE, GREEN, INK, ORANGE, PINK, RED, figure, label_ends
from stepscope.report.tables import number, ratio
from stepscope.studies.attention.config import IMPLEMENTATIONS
from stepscope.studies.attention.memory import SQUARES
from stepscope.studies.attention.tables import GRID_ENDS, LABELS, Tables, chosen, where

COLORS = dict(zip(IMPLEMENTATIONS, (INK, ORANGE, BLUE, GREEN, RED, PINK, AMBER)))


def attention_time(tables: Tables) -> Figure | None:
    """GPU time of forward and backward over the sequence, a line an implementation."""
    rows = chosen(tables["attention.passes"])
    rows = rows[rows["gpu_ms"].notna() & (rows["sequence"] <= GRID_ENDS)]
    times = rows.pivot(index="sequence", columns="implementation", values="gpu_ms")
    if times.empty or "naive" not in times:
        return None
    last = times.iloc[-1]
    best = last.idxmin()
    gain = number(ratio(last["naive"], last[best]), "x")
    message = "A kernel that stores T x T is as fast as any here" if best in SQUARES else (
        f"Never store T x T: at {times.index[-1]:,} positions {LABELS[best]} is {gain} faster than naive")
    drawn, axes = figure(message, height=4)
    for name in times:
        axes.plot(times.index, times[name], marker="o", color=COLORS[name])
    axes.set(xscale="log", yscale="log", xlabel=f"sequence ({where(rows)})", ylabel="GPU time, ms")
    axes.set_xticks(times.index, [f"{sequence:,}" for sequence in times.index])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ends = {LABELS[name]: (times.index[-1], last[name]) for name in times if last[name] == last[name]}
    label_ends(axes, ends, {LABELS[name]: COLORS[name] for name in times})
    return drawn
