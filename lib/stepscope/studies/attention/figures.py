"""Figures of the attention study; None where there is nothing to draw."""
from matplotlib.figure import Figure

from stepscope.report.schemas import Tables
from stepscope.report.shapes import select
from stepscope.report.style import AMBER, BLUE, GREEN, INK, ORANGE, PINK, RED, figure, label_ends, lines, look
from stepscope.report.tables import number
from stepscope.studies.attention.config import IMPLEMENTATIONS
from stepscope.studies.attention.memory import SQUARES
from stepscope.studies.attention.tables import GRID_ENDS, LABELS, USUAL, setting

COLORS = dict(zip(IMPLEMENTATIONS, (INK, ORANGE, BLUE, GREEN, RED, PINK, AMBER)))


@look()
def attention_time(tables: Tables) -> Figure | None:
    """GPU time of forward and backward over the sequence, a line an implementation."""
    rows = select(tables["attention.passes"], USUAL).dropna(subset="gpu_ms")
    times = rows.pivot(index="sequence", columns="implementation", values="gpu_ms")
    if "naive" not in times:
        return None
    at = times["naive"].loc[:GRID_ENDS].last_valid_index()
    if at is None:
        return None
    best, d = times.loc[at].idxmin(), rows["d_model"].iloc[0]
    gain = number(times.loc[at, "naive"] / times.loc[at, best], "x")
    message = "A kernel that stores T x T is as fast as any here" if best in SQUARES else (
        f"At {at:,} positions (d {d}) {LABELS[best]}, which stores no T x T, is {gain} faster than naive")
    drawn, axes = figure(message, height=4)
    lines(axes, rows, "sequence", "gpu_ms", "implementation", COLORS)
    axes.set(xscale="log", yscale="log", xlabel=f"sequence ({setting(rows)})", ylabel="GPU time, ms")
    named = [times.index[-1]]  # from the longest down, no two closer than their names are wide
    for sequence in times.index[-2::-1]:
        if sequence * 4 <= named[-1]:
            named.append(sequence)
    axes.set_xticks(named, [f"{sequence:,}" for sequence in named])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # Names stand at the right edge, of what ran out of memory before it too, at the height of its last point.
    ends = {LABELS[name]: (times.index[-1], times[name].dropna().iloc[-1]) for name in times}
    label_ends(axes, ends, {LABELS[name]: COLORS[name] for name in times})
    return drawn
