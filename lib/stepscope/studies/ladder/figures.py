"""The ladder's figures."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from stepscope.report import style
from stepscope.report.schemas import Tables
from stepscope.report.style import (
    BLUE,
    FILL,
    GRID,
    INK,
    MUTED,
    ORANGE,
    SIZE_COLORS,
    figure,
    label_ends,
    lines,
)
from stepscope.report.tables import digits, listed, number
from stepscope.studies.ladder.config import AS_IT_COMES, FAIR, RUNGS
from stepscope.studies.ladder.parts import (
    ADAMW,
    ATTENTION,
    GAPS,
    MATMULS,
    last_step,
    launch_wall,
    roofline,
)
from stepscope.studies.ladder.rows import (
    LAST,
    bounds,
    largest_ladder,
    loss_shift,
    roofs,
    timed,
    trained,
)
from stepscope.studies.ladder.rows_fp8 import by_batch, pays_at
from stepscope.studies.ladder.tables import NAMES


@style.look()
def ladder(tables: Tables) -> Figure | None:
    """Each rung's step and the best baseline's on a logarithmic axis; as a line what FLOPs and bytes take at
    bursts' rates, and as a thin one, for reference, with matmuls at the rate that one keeps up."""
    shape, rows = largest_ladder(tables)
    own = bounds(tables, timed(rows))
    peers = (*AS_IT_COMES, *FAIR)
    baseline = timed(rows, peers).nsmallest(1, "wall_ms")
    walls, last = pd.concat([own, baseline])["wall_ms"], own.iloc[-1]
    first, end = walls.iloc[0], last["wall_ms"]
    drawn, axes = figure(
        f"{shape.size}: {number(first, 'ms')} become {number(end, 'ms')}, {number(first / end, 'x')} faster",
        height=1.6 + 0.25 * len(walls),
    )
    places = range(len(walls))
    axes.set(
        xscale="log",
        xlim=(last["bound_ms"] * 0.8, walls.max() * 1.9),
        ylim=(len(walls) - 0.4, -2.4),
        xlabel="milliseconds a step, logarithmic",
    )
    axes.hlines(places, axes.get_xlim()[0], walls, color=GRID, linewidth=1.2, zorder=1)
    axes.scatter(
        walls, places, color=[ORANGE if rung in peers else BLUE for rung in walls.index], s=36, zorder=3
    )
    for place, wall in zip(places, walls):
        axes.annotate(
            number(wall, "ms"), (wall, place), xytext=(7, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(places, [NAMES[rung] for rung in walls.index])
    axes.grid(False, axis="y")
    for at, top, width, color, words in (
        (last["bound_ms"], -2.2, 1.2, INK, "FLOPs and bytes alone"),
        (last["reference_ms"], -1.2, 0.6, MUTED, "at the kept-up rate"),
    ):
        if pd.notna(at):
            axes.vlines(at, top, len(walls), color=color, linewidth=width, linestyle="--", zorder=1)
            axes.annotate(
                f"{words} {number(at, 'ms')}",
                (at, top + 0.3),
                xytext=(4, 0),
                color=color,
                textcoords="offset points",
                va="center",
            )
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return drawn


@style.look()
def last_step_parts(tables: Tables) -> Figure:
    """A waterfall from the largest size's last step, by the wall clock, down to its lower bound: what each
    part takes over its FLOPs or bytes at bursts' rates."""
    shape, parts, _ = last_step(tables)
    parts = parts.sort_values("over", ascending=False, kind="stable")
    wall, bound, over = parts["ms"].sum(), parts["bound_ms"].sum(), parts["over"]
    drawn, axes = figure(
        f"{shape.size}: {number(wall - bound, 'ms')} of the last step's"
        f" {number(wall, 'ms')} are more than its FLOPs and bytes need",
        height=3.1,
    )
    places, ends = range(len(parts)), wall - over.cumsum()
    colors = [FILL if part == GAPS else BLUE for part in parts.index]
    axes.barh(places, over, left=ends, height=0.6, color=colors)
    for place, part, end in zip(places, parts.index, ends):
        least, begin = parts.loc[part, "bound_ms"], end + over[part]
        words = f"{digits(over[part])} over {digits(least)} ms" if least else number(over[part], "ms")
        left = end - bound > wall - begin  # there is more room
        axes.annotate(
            words,
            (end if left else begin, place),
            xytext=(-5 if left else 5, 0),
            va="center",
            textcoords="offset points",
            ha="right" if left else "left",
        )
    width = wall - bound
    axes.set(
        xlim=(bound - 0.05 * width, wall + 0.02 * width),
        ylim=(len(parts) - 0.4, -1.6),
        xlabel="milliseconds of a step (the axis does not begin at 0)",
    )
    axes.set_yticks(places, list(parts.index))
    axes.grid(False, axis="y")
    for at, side, words in ((wall, "right", "the step"), (bound, "left", "FLOPs and bytes alone")):
        axes.vlines(at, -0.9, len(parts) - 0.5, color=INK, linewidth=1.2, linestyle="--", zorder=1)
        axes.annotate(f"{words} {number(at, 'ms')}", (at, -1.2), color=INK, va="center", ha=side)
    return drawn


@style.look()
def ladder_roofline(tables: Tables) -> Figure:
    """Parts of the largest size's fp32 step and of its last by FLOPs a byte and TFLOP/s, under the rates of
    large matmuls and a copy; and, as a wall, what a step of the smallest size can reach whose kernels are
    launched one by one: its FLOPs a launch, times the launches that this host makes."""
    shape, points = roofline(tables)
    rates, (small, _, _, wall) = roofs(tables), launch_wall(tables)
    matmuls = points[points["part"] == MATMULS].set_index("step")["tflops"]
    drawn, axes = figure(
        f"{shape.size}: matmuls reach {number(matmuls['fp32'], 'TFLOP/s')} in the fp32 step,"
        f" {number(matmuls[LAST], 'TFLOP/s')} in the last",
        height=4.2,
    )
    left, right = points["intensity"].min() / 4, points["intensity"].max() * 6
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        xlabel="FLOPs a byte, by formula",
        ylabel="TFLOP/s",
        ylim=(points["tflops"].min() / 2.5, rates["matmul_bf16"] * 2.5),
    )
    top = rates["matmul_bf16"] / rates["copy"]
    axes.plot([left, top], [left * rates["copy"], rates["matmul_bf16"]], color=INK, linewidth=1)
    ridge = rates["matmul_fp32"] / rates["copy"]
    for name, at, side in (("matmul_bf16", right, "right"), ("matmul_fp32", 1.1 * ridge, "left")):
        axes.hlines(rates[name], rates[name] / rates["copy"], right, color=INK, linewidth=1)
        above = side == "right"
        axes.annotate(
            f"{name.removeprefix('matmul_')} {number(rates[name], 'TFLOP/s')}",
            (at, rates[name]),
            xytext=(-2, 4) if above else (2, -4),
            textcoords="offset points",
            ha=side,
            va="bottom" if above else "top",
        )
    axes.annotate(
        f"copy {number(rates['copy'], 'TB/s')}",
        (5, 5 * rates["copy"]),
        xytext=(8, -2),
        textcoords="offset points",
        va="top",
    )
    axes.hlines(wall, left, right, color=MUTED, linewidth=1, linestyle="--")
    axes.annotate(
        f"{small}, a launch at a time\n{number(wall, 'TFLOP/s')}",
        (left, wall),
        xytext=(4, 4),
        color=MUTED,
        textcoords="offset points",
        va="bottom",
    )
    for step, color in (("fp32", ORANGE), (LAST, BLUE)):
        own = points[points["step"] == step]
        axes.scatter(own["intensity"], own["tflops"], s=36, color=color, zorder=3)
        for x, y, part in zip(own["intensity"], own["tflops"], own["part"]):
            above = part in (ADAMW, ATTENTION)
            left = part == ADAMW and step == LAST  # beside the roof
            axes.annotate(
                part,
                (x, y),
                xytext=(-5 if left else 7, 3 if above else -3),
                color=color,
                textcoords="offset points",
                ha="right" if left else "left",
                va="bottom" if above else "top",
            )
    for place, (words, color) in enumerate((("fp32 step", ORANGE), ("last step", BLUE))):
        axes.annotate(words, (0.98, 0.04 + 0.07 * place), xycoords="axes fraction", ha="right", color=color)
    return drawn


@style.look()
def fp8(tables: Tables) -> Figure | None:
    """What FP8 gains by the tokens of a step, a line a size."""
    found = by_batch(tables)
    if found["tokens"].nunique() < 2:
        return None
    sizes, places = pays_at(found), sorted(found["tokens"].unique())
    drawn, axes = figure(
        f"FP8 matmuls clearly pay for {listed(sizes)}"
        if sizes
        else "FP8 matmuls clearly pay for no size at every batch"
    )
    ends = lines(axes, found, "tokens", "gain", "size", SIZE_COLORS)
    axes.axhline(1, color=MUTED, linewidth=1)
    axes.set(
        xscale="log",
        xlabel="tokens a step",
        ylabel="speedup in GPU time",
        ylim=(min(0.97, found["gain"].min() - 0.02), found["gain"].max() + 0.03),
    )
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
    drawn, axes = figure(
        "On average every change moves the loss less than another seed does"
        if within
        else "How far each change moves the loss"
    )
    first, *others = shifts["fp32"].columns
    axes.plot(shifts["fp32"][others], color=style.FILL, linewidth=3, zorder=1)
    axes.plot(shifts[[(rung, first) for rung in rungs]], color=BLUE, linewidth=1)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xlabel="step (means of ten)", ylabel="loss minus fp32's, nats")
    ends = {
        "other seeds": shifts["fp32"][others].iloc[-1].max(),
        "every change": shifts[LAST, first].iloc[-1],
    }
    label_ends(
        axes,
        {name: (shifts.index[-1], at) for name, at in ends.items()},
        {"other seeds": MUTED, "every change": BLUE},
    )
    return drawn
