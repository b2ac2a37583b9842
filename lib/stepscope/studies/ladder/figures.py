"""The ladder's figures."""
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from stepscope.report import style
from stepscope.report.schemas import Tables
from stepscope.report.style import BLUE, GRID, INK, MUTED, ORANGE, SIZE_COLORS, figure, label_ends, lines
from stepscope.report.tables import number
from stepscope.studies.ladder.config import BASELINES, RUNGS
from stepscope.studies.ladder.rows import (
    LAST,
    bounds,
    by_batch,
    largest_ladder,
    loss_shift,
    pays_from,
    timed,
    trained,
)
from stepscope.studies.ladder.tables import NAMES


@style.look()
def ladder(tables: Tables) -> Figure | None:
    """Each rung's step and the best baseline's on a logarithmic axis; as a line what FLOPs and bytes take at
    bursts' rates, and as a thin one, for reference, with matmuls at the rate that one keeps up."""
    shape, rows = largest_ladder(tables)
    own = bounds(tables, timed(rows))
    baseline = timed(rows, BASELINES).nsmallest(1, "wall_ms")
    walls, last = pd.concat([own, baseline])["wall_ms"], own.iloc[-1]
    first, end = walls.iloc[0], last["wall_ms"]
    drawn, axes = figure(f"{shape.size}: {number(first, 'ms')} become {number(end, 'ms')},"
                         f" {number(first / end, 'x')} faster", height=1.5 + 0.3 * len(walls))
    places = range(len(walls))
    axes.set(xscale="log", xlim=(last["bound_ms"] * 0.8, walls.max() * 1.9), ylim=(len(walls) - 0.4, -2.4),
             xlabel="milliseconds a step, logarithmic")
    axes.hlines(places, axes.get_xlim()[0], walls, color=GRID, linewidth=1.2, zorder=1)
    axes.scatter(walls, places, color=[ORANGE if rung in BASELINES else BLUE for rung in walls.index], s=36,
                 zorder=3)
    for place, wall in zip(places, walls):
        axes.annotate(number(wall, "ms"), (wall, place), xytext=(7, 0), textcoords="offset points",
                      va="center")
    axes.set_yticks(places, [NAMES[rung] for rung in walls.index])
    axes.grid(False, axis="y")
    for at, top, width, color, words in (
            (last["bound_ms"], -2.2, 1.2, INK, "the last's FLOPs and bytes alone"),
            (last["reference_ms"], -1.2, 0.6, MUTED, "reference: kept-up rate")):
        if pd.notna(at):
            axes.vlines(at, top, len(walls), color=color, linewidth=width, linestyle="--", zorder=1)
            axes.annotate(f"{words} {number(at, 'ms')}", (at, top + 0.3), xytext=(4, 0), color=color,
                          textcoords="offset points", va="center")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return drawn


@style.look()
def fp8(tables: Tables) -> Figure | None:
    """What FP8 gains by the tokens of a step, a line a size."""
    found = by_batch(tables)
    if found["tokens"].nunique() < 2:
        return None
    tokens, places = pays_from(found), sorted(found["tokens"].unique())
    drawn, axes = figure(f"FP8 matmuls clearly pay from {tokens:,} tokens a step on" if tokens
                         else "FP8 matmuls gain nothing clear at these batches")
    ends = lines(axes, found, "tokens", "gain", "size", SIZE_COLORS)
    axes.axhline(1, color=MUTED, linewidth=1)
    axes.set(xscale="log", xlabel="tokens a step", ylabel="times faster than bf16, GPU time",
             ylim=(min(0.97, found["gain"].min() - 0.02), found["gain"].max() + 0.03))
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.2f}x"))
    label_ends(axes, ends, SIZE_COLORS)
    return drawn


@style.look()
def ladder_training(tables: Tables) -> Figure | None:
    """Each rung's loss minus fp32's of the same weights; grey: fp32's of another seed."""
    _, shifts = trained(tables)
    distance, seeds = loss_shift(shifts)
    rungs = [rung for rung in RUNGS if rung in distance.index]
    within = distance[rungs].max() < seeds
    drawn, axes = figure("On average every change moves the loss less than another seed does" if within
                         else "How far each change moves the loss")
    first, *others = shifts["fp32"].columns
    axes.plot(shifts["fp32"][others], color=style.FILL, linewidth=3, zorder=1)
    axes.plot(shifts[[(rung, first) for rung in rungs]], color=BLUE, linewidth=1)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xlabel="step (means of ten)", ylabel="loss minus fp32's, nats")
    ends = {"other seeds": shifts["fp32"][others].iloc[-1].max(),
            "every change": shifts[LAST, first].iloc[-1]}
    label_ends(axes, {name: (shifts.index[-1], at) for name, at in ends.items()},
               {"other seeds": MUTED, "every change": BLUE})
    return drawn
