"""Draw the ladder study's figures."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from stepscope.report import style
from stepscope.report.style import BLUE, FILL, GRID, INK, MUTED, ORANGE, SIZE_COLORS, Picture
from stepscope.report.tables import digits, number

FULLY_OPTIMIZED = "bf16_moments"
OFFSET = "offset points"


@style.look()
def ladder(title: str, rows: pd.DataFrame) -> Picture:
    """Draw each configuration's wall time on a logarithmic axis, with Hugging Face's configurations in orange.

    Lines show two reference times for each of our steps: the time that its FLOPs and its memory traffic take at
    burst rates, and the time if matmuls run at the sustained rate instead.

    Args:
        rows: rows of the view ``steps``, for one case, with our configurations in order. Circles show the times in
            the column ``wall_ms_there``, if there is one.
    """
    is_peer = rows.optimization.str.startswith("hugging_face")
    left = rows[["reference_ms", "wall_ms"]].min(axis=None)
    drawn, axes = style.figure(title, height=1.6 + 0.25 * len(rows))
    axes.set(
        xscale="log",
        xlim=(left * 0.8, rows.wall_ms.max() * 1.9),
        ylim=(len(rows) - 0.4, -2.4 if rows.reference_ms.notna().any() else -0.6),  # labels need space
        xlabel="milliseconds per step (log scale)",
    )
    heights = range(len(rows))
    axes.hlines(heights, *axes.get_xlim(), color=GRID, linewidth=0.8, zorder=1)
    if "wall_ms_there" in rows:
        axes.scatter(rows.wall_ms_there, heights, facecolors="none", edgecolors=MUTED, s=90, zorder=2)
    colors = is_peer.map({True: ORANGE, False: BLUE})
    axes.scatter(rows.wall_ms, heights, color=colors, s=36, zorder=3)
    for height, wall_ms in zip(heights, rows.wall_ms):
        text = number(wall_ms, "ms")
        axes.annotate(text, (wall_ms, height), xytext=(8, 0), textcoords=OFFSET, va="center")
    axes.set_yticks(heights, [*rows.name])
    axes.grid(False, axis="y")
    _reference(axes, rows.reference_ms.mask(is_peer), -2.2, INK, "FLOPs and bytes:")
    _reference(axes, rows.sustained_reference_ms.mask(is_peer), -1.2, MUTED, "at sustained rate:")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return drawn


def _reference(axes: Axes, times_ms: pd.Series, top: float, color: str, label: str) -> None:
    """Draw each row's time in ms as a vertical line that begins at ``top``; label the longest and the shortest."""
    known = times_ms.reset_index(drop=True).dropna()
    if known.empty:
        return
    width = 1.2 if color == INK else 0.6
    edges = [edge for place in known.index for edge in (place - 0.5, place + 0.5)]
    axes.plot(known.repeat(2), [top, *edges[1:]], color=color, linewidth=width, zorder=1)
    ends = dict.fromkeys((digits(known.max()), digits(known.min())))
    axes.annotate(
        f"{label} {' to '.join(ends)} ms",
        (known.iloc[0], top + 0.3),
        xytext=(4, 0),
        color=color,
        textcoords=OFFSET,
        va="center",
    )


@style.look()
def last_step_parts(title: str, parts: pd.DataFrame) -> Picture:
    """Draw a waterfall chart from a step's wall time down to its reference time.

    Each bar is the time by which one part of the step exceeds its reference time.

    Args:
        parts: rows of the view ``parts``, for one step.
    """
    total = parts[parts.part == "the step"].iloc[0]
    rows = parts[parts.part != "the step"].sort_values("over_ms", ascending=False, kind="stable")
    drawn, axes = style.figure(title, height=3.1)
    heights = range(len(rows))
    lefts = total.ms - rows.over_ms.cumsum()
    colors = [FILL if part == "between kernels" else BLUE for part in rows.part]
    axes.barh(heights, rows.over_ms, left=lefts, height=0.6, color=colors)
    for height, left, over, reference in zip(heights, lefts, rows.over_ms, rows.reference_ms):
        text = f"{digits(over)} over {digits(reference)} ms" if reference else number(over, "ms")
        begin, end = sorted((left, left + over))  # a part can take less than its reference time
        is_left = begin - total.reference_ms > total.ms - end  # the left side has more room
        axes.annotate(
            text,
            (begin if is_left else end, height),
            xytext=(-5 if is_left else 5, 0),
            va="center",
            textcoords=OFFSET,
            ha="right" if is_left else "left",
        )
    axes.set(
        xlim=(total.reference_ms - 0.05 * total.over_ms, total.ms + 0.02 * total.over_ms),
        ylim=(len(rows) - 0.4, -1.6),
        xlabel="milliseconds per step (the axis does not begin at 0)",
    )
    axes.set_yticks(heights, [*rows.part])
    axes.grid(False, axis="y")
    limits = ((total.ms, "right", "the step"), (total.reference_ms, "left", "reference line"))
    for ms, side, label in limits:
        axes.vlines(ms, -0.9, len(rows) - 0.5, color=INK, linewidth=1.2, linestyle="--", zorder=1)
        axes.annotate(f"{label} {number(ms, 'ms')}", (ms, -1.2), color=INK, va="center", ha=side)
    return drawn


@style.look()
def ladder_roofline(
    title: str, points: pd.DataFrame, rates: pd.DataFrame, launched: pd.DataFrame, launching: pd.DataFrame
) -> Picture:
    """Draw the parts of the fp32 step and of the fully optimized step in a roofline plot.

    Args:
        points: rows of the view ``roofline``.
        rates: one row of the view ``rates``; the rates of its large matmuls and its copy are the roofs.
        launched: one row of the view ``steps``. The dashed line shows this step's FLOPs divided by the time
            that it takes to launch its kernels.
        launching: rows of the view ``steps``; the minimum of their ``launch_us`` is the time to launch a kernel.
    """
    rate, step = rates.iloc[0], launched.iloc[0]
    launch_s = launching.launch_us.min() * step.operations / 1e6
    launch_tflops = step.step_flops / launch_s / 1e12
    drawn, axes = style.figure(title, height=4.2)
    left, right = points.intensity.min() / 4, points.intensity.max() * 6
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        ylim=(points.tflops.min() / 2.5, rate.bf16_tflops * 2.5),
        xlabel="FLOPs per byte, by formula",
        ylabel="TFLOP/s",
    )
    _roofs(axes, rate, left, right)
    axes.hlines(launch_tflops, left, right, color=MUTED, linewidth=1, linestyle="--")
    axes.annotate(
        f"{step['size']}, one launch at a time\n{number(launch_tflops, 'TFLOP/s')}",
        (left, launch_tflops),
        xytext=(4, 4),
        color=MUTED,
        textcoords=OFFSET,
        va="bottom",
    )
    for optimization, color in (("fp32", ORANGE), (FULLY_OPTIMIZED, BLUE)):
        _points(axes, points[points.optimization == optimization], color)
    legend = (("fp32 step", ORANGE), ("fully optimized step", BLUE))
    for line, (label, color) in enumerate(legend):
        corner = (0.98, 0.04 + 0.07 * line)
        axes.annotate(label, corner, xycoords="axes fraction", ha="right", color=color)
    return drawn


def _roofs(axes: Axes, rate: pd.Series, left: float, right: float) -> None:
    """Draw the roofs: the rate of a copy and, to the right of the ridge points, the rates of large matmuls."""
    copy, bf16, fp32 = rate.copy_tb_per_s, rate.bf16_tflops, rate.fp32_tflops
    ridge = bf16 / copy
    axes.plot([left, ridge], [left * copy, bf16], color=INK, linewidth=1)
    axes.hlines(bf16, ridge, right, color=INK, linewidth=1)
    axes.hlines(fp32, fp32 / copy, right, color=INK, linewidth=1)
    axes.annotate(
        f"bf16 {number(bf16, 'TFLOP/s')}",
        (right, bf16),
        xytext=(-2, 4),
        textcoords=OFFSET,
        ha="right",
        va="bottom",
    )
    axes.annotate(
        f"fp32 {number(fp32, 'TFLOP/s')}",
        (1.1 * fp32 / copy, fp32),
        xytext=(2, -4),
        textcoords=OFFSET,
        ha="left",
        va="top",
    )
    axes.annotate(f"copy {number(copy, 'TB/s')}", (5, 5 * copy), xytext=(8, -2), textcoords=OFFSET, va="top")


def _points(axes: Axes, points: pd.DataFrame, color: str) -> None:
    """Draw a step's parts as labeled points."""
    axes.scatter(points.intensity, points.tflops, s=36, color=color, zorder=3)
    for x, y, part in zip(points.intensity, points.tflops, points.part):
        is_above = part in ("AdamW", "attention")
        is_left = part == "AdamW" and color == BLUE  # on the right side, the label would cross the roof
        axes.annotate(
            part,
            (x, y),
            xytext=(-5 if is_left else 7, 3 if is_above else -3),
            color=color,
            textcoords=OFFSET,
            ha="right" if is_left else "left",
            va="bottom" if is_above else "top",
        )


@style.look()
def fp8(title: str, rows: pd.DataFrame) -> Picture:
    """Plot FP8's speedup in GPU time against the tokens per step, with one line per size (view ``fp8``)."""
    tokens = sorted(rows.tokens.unique())
    drawn, axes = style.figure(title)
    ends = style.lines(axes, rows, "tokens", "gpu_speedup", "size", SIZE_COLORS)
    axes.axhline(1, color=MUTED, linewidth=1)
    lowest, highest = rows.gpu_speedup.min(), rows.gpu_speedup.max()
    axes.set(
        xscale="log",
        xlabel="tokens per step",
        ylabel="speedup in GPU time",
        ylim=(min(0.97, lowest - 0.02), highest + 0.03),
    )
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.2f}x"))
    style.label_ends(axes, ends, SIZE_COLORS)
    return drawn


@style.look()
def ladder_training(title: str, curves: pd.DataFrame) -> Picture:
    """Draw each optimization's training loss minus the loss of the baseline.

    Blue curves start from the same weights as the baseline. Gray curves show the baseline with different seeds.

    Args:
        curves: rows of the view ``loss_curves``, for one case.
    """
    shifts = curves.pivot(index="step", columns=["optimization", "seed"], values="shift_nats")
    baseline, first = curves.baseline.iloc[0], curves.seed.min()
    others = shifts[baseline].drop(columns=first)
    optimized = shifts.xs(first, axis="columns", level="seed").drop(columns=baseline)
    drawn, axes = style.figure(title)
    axes.plot(others, color=FILL, linewidth=3, zorder=1)
    axes.plot(optimized, color=BLUE, linewidth=1)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xlabel="step (means of ten)", ylabel=f"loss minus {baseline}'s, nats")
    end = shifts.index[-1]
    ends = {
        "other seeds": (end, others.iloc[-1].max()),
        "every optimization": (end, optimized.iloc[-1].median()),
    }
    style.label_ends(axes, ends, {"other seeds": MUTED, "every optimization": BLUE})
    return drawn
