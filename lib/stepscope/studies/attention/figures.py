"""Figures of the attention study; None where there is nothing to draw."""

import seaborn as sns
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgba
from matplotlib.figure import Figure

from stepscope.report import style
from stepscope.report.schemas import Tables
from stepscope.report.shapes import most_common, select
from stepscope.report.tables import digits, number
from stepscope.studies.attention.config import IMPLEMENTATIONS
from stepscope.studies.attention.memory import SQUARES
from stepscope.studies.attention.tables import GRID_ENDS, LABELS, USUAL, setting

COLORS = dict(
    zip(
        IMPLEMENTATIONS,
        (style.INK, style.ORANGE, style.BLUE, style.GREEN, style.RED, style.PINK, style.AMBER),
    )
)


@style.look()
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
    message = (
        "A kernel that stores T x T is as fast as any here"
        if best in SQUARES
        else (
            f"At {at:,} positions (d {d}) {LABELS[best]}, which stores no T x T, is {gain} faster than naive"
        )
    )
    drawn, axes = style.figure(message, height=4)
    style.lines(axes, rows, "sequence", "gpu_ms", "implementation", COLORS)
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
    style.label_ends(axes, ends, {LABELS[name]: COLORS[name] for name in times})
    return drawn


@style.look()
def attention_heatmap(tables: Tables) -> Figure | None:
    """GPU time of naive attention in fp32 over d and sequence: a longer sequence costs far more than a larger
    d. None where it is not so at every point that is drawn."""
    rows = select(
        tables["attention.passes"],
        implementation="naive",
        precision="fp32",
        status=["ok", "oom"],
        batch_size=most_common,
    )
    times, status = (
        rows.pivot(index="d_model", columns="sequence", values=name) for name in ("gpu_ms", "status")
    )
    grid = times.dropna(axis="columns")
    if min(grid.shape) < 2:
        return None
    slower, longer = grid.iloc[-1] / grid.iloc[0], grid.iloc[:, -1] / grid.iloc[:, -2]
    if slower.max() >= longer.min():
        return None
    (low, high), (short, long) = grid.index[[0, -1]], grid.columns[-2:]
    drawn, axes = style.figure(
        f"Naive attention in fp32 takes at least {number(longer.min(), 'x')} the time from {short:,} to"
        f" {long:,} positions, at most {number(slower.max(), 'x')} from d {low} to {high}",
        2.9,
    )
    # One colour, more or less opaque: what it is on light and dark paper, and its text is read on both.
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
    axes.set(xlabel=f"sequence (batch {rows['batch_size'].iloc[0]}, causal)", ylabel="d")
    axes.tick_params(left=False, bottom=False, labelrotation=0)
    axes.set_title("GPU time of forward and backward, ms; blank: not run", loc="left")
    axes.set_xticklabels([f"{sequence:,}" for sequence in times])
    return drawn
