"""The ladder's figures."""

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
    """Draw each step's wall time on a logarithmic axis, from rows of ``steps``, our model's in their order.

    Hugging Face's are orange. Dashed lines are the references of our last step: what its FLOPs and bytes would
    take at the rates of bursts, and with matmuls at the sustained rate.
    """
    is_peer = rows.optimization.str.startswith("hugging_face")
    ours = rows[~is_peer].tail(1)
    reference_ms = ours.reference_ms.max()
    sustained_ms = ours.sustained_reference_ms.max()
    shortest = rows.wall_ms.min()
    left = shortest if pd.isna(reference_ms) else min(reference_ms, shortest)
    drawn, axes = style.figure(title, height=1.6 + 0.25 * len(rows))
    axes.set(
        xscale="log",
        xlim=(left * 0.8, rows.wall_ms.max() * 1.9),
        ylim=(len(rows) - 0.4, -2.4),
        xlabel="milliseconds a step, logarithmic",
    )
    places = range(len(rows))
    axes.hlines(places, axes.get_xlim()[0], rows.wall_ms, color=GRID, linewidth=1.2, zorder=1)
    colors = is_peer.map({True: ORANGE, False: BLUE})
    axes.scatter(rows.wall_ms, places, color=colors, s=36, zorder=3)
    for place, wall in zip(places, rows.wall_ms):
        axes.annotate(number(wall, "ms"), (wall, place), xytext=(7, 0), textcoords=OFFSET, va="center")
    axes.set_yticks(places, [*rows.name])
    axes.grid(False, axis="y")
    bottom = len(rows)
    _reference(axes, reference_ms, (-2.2, bottom), INK, "FLOPs and bytes alone")
    _reference(axes, sustained_ms, (-1.2, bottom), MUTED, "at the sustained rate")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return drawn


def _reference(axes: Axes, at: float, span: tuple[float, float], color: str, words: str) -> None:
    """Draw a dashed line at a time, if it is known, with its words at the upper end."""
    if pd.isna(at):
        return
    width = 1.2 if color == INK else 0.6
    axes.vlines(at, *span, color=color, linewidth=width, linestyle="--", zorder=1)
    axes.annotate(
        f"{words} {number(at, 'ms')}",
        (at, span[0] + 0.3),
        xytext=(4, 0),
        color=color,
        textcoords=OFFSET,
        va="center",
    )


@style.look()
def last_step_parts(title: str, parts: pd.DataFrame) -> Picture:
    """Draw a waterfall from a step's wall time down to its reference: what each part takes over its own."""
    total = parts[parts.part == "the step"].iloc[0]
    rows = parts[parts.part != "the step"].sort_values("over_ms", ascending=False, kind="stable")
    drawn, axes = style.figure(title, height=3.1)
    places = range(len(rows))
    ends = total.ms - rows.over_ms.cumsum()
    colors = [FILL if part == "between kernels" else BLUE for part in rows.part]
    axes.barh(places, rows.over_ms, left=ends, height=0.6, color=colors)
    for place, end, over, reference in zip(places, ends, rows.over_ms, rows.reference_ms):
        words = f"{digits(over)} over {digits(reference)} ms" if reference else number(over, "ms")
        begin = end + over
        is_left = end - total.reference_ms > total.ms - begin  # there is more room
        axes.annotate(
            words,
            (end if is_left else begin, place),
            xytext=(-5 if is_left else 5, 0),
            va="center",
            textcoords=OFFSET,
            ha="right" if is_left else "left",
        )
    axes.set(
        xlim=(total.reference_ms - 0.05 * total.over_ms, total.ms + 0.02 * total.over_ms),
        ylim=(len(rows) - 0.4, -1.6),
        xlabel="milliseconds of a step (the axis does not begin at 0)",
    )
    axes.set_yticks(places, [*rows.part])
    axes.grid(False, axis="y")
    ends_of = ((total.ms, "right", "the step"), (total.reference_ms, "left", "FLOPs and bytes alone"))
    for at, side, words in ends_of:
        axes.vlines(at, -0.9, len(rows) - 0.5, color=INK, linewidth=1.2, linestyle="--", zorder=1)
        axes.annotate(f"{words} {number(at, 'ms')}", (at, -1.2), color=INK, va="center", ha=side)
    return drawn


@style.look()
def ladder_roofline(
    title: str, points: pd.DataFrame, rates: pd.DataFrame, launched: pd.DataFrame, launching: pd.DataFrame
) -> Picture:
    """Draw the parts of an fp32 step and of the fully optimized one by FLOPs per byte and TFLOP/s.

    Args:
        points: rows of ``roofline``.
        rates: the row of ``rates`` whose large matmuls and copy are the roofs.
        launched: one step, whose FLOPs over the time of its launches are the dashed line.
        launching: steps with ``launch_us``, of which the least counts.
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
        xlabel="FLOPs a byte, by formula",
        ylabel="TFLOP/s",
    )
    _roofs(axes, rate, left, right)
    axes.hlines(launch_tflops, left, right, color=MUTED, linewidth=1, linestyle="--")
    axes.annotate(
        f"{step['size']}, a launch at a time\n{number(launch_tflops, 'TFLOP/s')}",
        (left, launch_tflops),
        xytext=(4, 4),
        color=MUTED,
        textcoords=OFFSET,
        va="bottom",
    )
    for optimization, color in (("fp32", ORANGE), (FULLY_OPTIMIZED, BLUE)):
        _points(axes, points[points.optimization == optimization], color)
    legend = (("fp32 step", ORANGE), ("fully optimized step", BLUE))
    for place, (words, color) in enumerate(legend):
        at = (0.98, 0.04 + 0.07 * place)
        axes.annotate(words, at, xycoords="axes fraction", ha="right", color=color)
    return drawn


def _roofs(axes: Axes, rate: pd.Series, left: float, right: float) -> None:
    """Draw the rates of a copy and of large matmuls, each from its ridge on."""
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
    """Draw a step's parts, each with its name beside it."""
    axes.scatter(points.intensity, points.tflops, s=36, color=color, zorder=3)
    for x, y, part in zip(points.intensity, points.tflops, points.part):
        is_above = part in ("AdamW", "attention")
        is_left = part == "AdamW" and color == BLUE  # beside the roof
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
    """Draw what FP8 gains in GPU time by the tokens of a step, a line per size, from rows of ``fp8``."""
    places = sorted(rows.tokens.unique())
    drawn, axes = style.figure(title)
    ends = style.lines(axes, rows, "tokens", "gpu_speedup", "size", SIZE_COLORS)
    axes.axhline(1, color=MUTED, linewidth=1)
    lowest, highest = rows.gpu_speedup.min(), rows.gpu_speedup.max()
    axes.set(
        xscale="log",
        xlabel="tokens a step",
        ylabel="speedup in GPU time",
        ylim=(min(0.97, lowest - 0.02), highest + 0.03),
    )
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.2f}x"))
    style.label_ends(axes, ends, SIZE_COLORS)
    return drawn


@style.look()
def ladder_training(title: str, curves: pd.DataFrame) -> Picture:
    """Draw each optimization's loss minus the baseline's, from the ``loss_curves`` of one case.

    Blue: of the same weights; grey: the baseline's of other seeds.
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
