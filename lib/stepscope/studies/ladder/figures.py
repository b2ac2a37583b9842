"""The ladder's pictures."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepscope.say.formats import number
from stepscope.say.style import PALETTE, WIDTH_IN, as_text, ink_on, use_style
from stepscope.studies.ladder import facts
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.facts import (
    OTHER_ARITHMETIC,
    by_shape,
    climbed,
    off_fp32,
    smoothed,
    surely_less,
    surely_more,
    timed,
    trained,
)
from stepscope.studies.ladder.names import name_of
from stepscope.studies.ladder.tables import SHAPE

LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # over lines of the grid
CELLS = 13.5  # points, of a table of numbers
LARGE = 16  # points: to be read when the picture is 400 pixels wide
NEAR = 1.3  # times the fastest rung's: bars that are hard to tell apart beside the first rung's
NAMES_SHORT = {"fp8": "FP8"}


def hero(rungs: pd.DataFrame, where: str) -> Figure | None:
    """Rungs from top to bottom as bars. Those that are near the fastest have a scale of their own, on which a
    bar is what is left above the floor, and Hugging Face's step a mark."""
    found = facts.ladder(rungs)
    if found is None or len(rows := climbed(found["rows"])) < 2:
        return None
    use_style()
    near = last_rungs(rows)
    far, heights = rows.iloc[: len(rows) - len(near)], [len(rows) - len(near) + 0.6, len(near) + 1.9]
    figure, axes = plt.subplots(
        2 if len(far) else 1,
        figsize=(WIDTH_IN, 1.4 + 0.5 * sum(heights)),
        squeeze=False,
        height_ratios=heights if len(far) else None,
    )
    first, floor = rows["median_ms"].iloc[0], found["floor_ms"]
    if len(far):
        widest = far["median_ms"].max()
        _bars(axes[0, 0], far, 0.0, widest, first)
        axes[0, 0].axvline(floor, color="black", linestyle="--", linewidth=2)
        axes[0, 0].text(floor, -0.75, " floor", fontsize=LARGE, va="center")
        axes[0, 0].set_ylim(len(far) - 0.5, -1.1)
    axis, beside = axes[-1, 0], found["beside"]
    last = [*near["median_ms"], *([beside["median_ms"]] if beside else [])]
    left, widest = min(floor, *last), max(last)
    left = left if len(far) else 0.0
    _bars(axis, near, floor if len(far) else left, widest - left, first)
    axis.axvline(floor, color="black", linestyle="--", linewidth=2)
    axis.spines["left"].set_visible(False)
    words = f" floor {number(floor)} ms"
    if len(far):
        larger = number(far["median_ms"].max() / (widest - left), 2)
        words = f" left above the floor, {number(floor)} ms ({larger}x enlarged)"
    axis.text(floor, -1.0, words, fontsize=LARGE, va="center")
    if beside:
        axis.plot(beside["median_ms"], len(near), marker="D", color=PALETTE[5], markersize=13, clip_on=False)
        words = f"Hugging Face, compiled: {number(beside['median_ms'])} ms"
        axis.text(
            beside["median_ms"] + (widest - left) / 10,
            len(near),
            words,
            va="center",
            fontsize=LARGE,
            color=as_text(PALETTE[5]),
        )
    axis.set_ylim(len(near) + (0.5 if beside else -0.5), -1.4)
    faster = f"{number(found['faster'])}x faster"
    title = f"{number(first)} to {number(found['best_ms'])} ms: the same step, {faster}"
    if not found["gains"]:
        title = f"No change makes the step of {number(first)} ms surely faster"
    shape = f"{found['size']}, context {found['context']}, batch {found['batch']}, {where}"
    figure.suptitle(f"{title}\n{shape}", fontsize=LARGE + 1, fontweight="bold", x=0.01, ha="left")
    return figure


def last_rungs(rows: pd.DataFrame) -> pd.DataFrame:
    """The rungs from which on all are near the fastest; all, where that is one or the first."""
    near = rows["median_ms"] < NEAR * rows["median_ms"].min()
    last = rows[near[::-1].cumprod()[::-1].astype(bool)]
    return last if 1 < len(last) < len(rows) else rows


def _thousands(value: float) -> str:
    return f"{value / 1e3:,.1f}k" if value >= 1e3 else number(value)


def _bars(axis: Axes, rows: pd.DataFrame, left: float, span: float, first: float) -> None:
    """A bar a rung from ``left`` to its time, with its ms, how many times faster than the first, and tokens a
    second beside it; ``span`` of the axis is for bars, in ms."""
    colors = [PALETTE[1] if rung == OTHER_ARITHMETIC else PALETTE[0] for rung in rows["rung"]]
    times = rows["median_ms"]
    axis.barh(range(len(rows)), times - left, left=left, color=colors, height=0.72)
    # As everywhere: of times within a process, where these were taken.
    ratios = rows["times_as_fast"].fillna(first / times)
    for y, (row, ratio) in enumerate(zip(rows.itertuples(), ratios)):
        axis.text(
            max(row.median_ms, left) + span / 40,
            y,
            f"{number(row.median_ms)} ms · {number(ratio)}x"
            f" · {_thousands(row.tokens_per_s)} tok/s",
            va="center",
            fontsize=LARGE,
            fontweight="bold",
        )
    other = " (other arithmetic)"
    names = [
        NAMES_SHORT.get(rung, name_of(rung)) + other * (rung == OTHER_ARITHMETIC) for rung in rows["rung"]
    ]
    axis.set_yticks(range(len(rows)), names, fontsize=LARGE)
    low = min(left, *times)
    axis.set_xlim(low, low + span * 2.65)
    axis.set_xticks([])
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)


def gains(rungs: pd.DataFrame, where: str) -> Figure | None:
    """Shapes across, rungs down: how many times faster each makes what was before it."""
    rows = pd.concat([timed(own) for own in by_shape(rungs)] or [pd.DataFrame()], ignore_index=True)
    rows = rows[rows["gain"].notna()] if len(rows) else rows
    if rows.empty:
        return None
    use_style()
    usual = rows["vocab_size"].mode().iloc[0]
    shapes = list(rows[SHAPE].drop_duplicates().itertuples(index=False, name=None))
    table = rows.pivot(index="rung", columns=SHAPE, values="gain").reindex(columns=shapes)
    table = table.reindex([rung for rung in RUNGS if rung in table.index])
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 2.0 + 0.44 * len(table)))
    drawn = axis.imshow(np.log2(table.to_numpy(dtype=float)), cmap="PuOr_r", vmin=-1, vmax=1, aspect="auto")
    unsure = rows[~(surely_more(rows) | surely_less(rows))].set_index(["rung", *SHAPE]).index
    for (y, x), value in np.ndenumerate(table.to_numpy(dtype=float)):
        if not np.isfinite(value):
            axis.text(x, y, "–", ha="center", va="center", fontsize=CELLS)
            continue
        slower = f"{1 / value:.2f}x\nslower" if f"{value:.2f}" < "1.00" else ""
        axis.text(
            x,
            y,
            (slower or f"{value:.2f}") + ("‡" if (table.index[y], *shapes[x]) in unsure else ""),
            ha="center",
            va="center",
            fontsize=CELLS - 4 if slower else CELLS,
            linespacing=0.95,
            color=ink_on(drawn.cmap(drawn.norm(np.log2(value)))),
        )
    axis.set_yticks(range(len(table)), [name_of(rung) for rung in table.index], fontsize=CELLS)
    _shape_heads(axis, shapes, usual)
    axis.grid(visible=False)
    least, most = (table[shape] for shape in (shapes[0], shapes[-1]))
    title = _gains_most(most)
    if least.notna().any() and least.idxmax() != most.idxmax():
        title += f", {_gains_most(least).replace('gains most ', '')}"
    figure.suptitle(
        f"{title}\n(times faster than the rung before; {where})",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    return figure


def _shape_heads(axis: Axes, shapes: list[tuple], usual: int) -> None:
    """Over the columns their contexts, a vocabulary that is not the usual one, and each size once."""
    axis.xaxis.tick_top()
    axis.set_xticks(
        range(len(shapes)),
        [
            f"{context:,}" + f"\nV {vocabulary / 1000:.0f}k" * bool(vocabulary != usual)
            for _, context, vocabulary in shapes
        ],
        fontsize=CELLS - 1,
        va="top",
    )
    lines = 2 if any(vocabulary != usual for *_, vocabulary in shapes) else 1
    axis.tick_params(axis="x", length=0, pad=6 + CELLS * 1.25 * lines)
    sizes = [size for size, *_ in shapes]
    for size in dict.fromkeys(sizes):
        first, number_of = sizes.index(size), sizes.count(size)
        axis.annotate(
            size,
            (first + (number_of - 1) / 2, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 10 + CELLS * 1.25 * lines),
            textcoords="offset points",
            ha="center",
            fontsize=CELLS,
            fontweight="bold",
            annotation_clip=False,
        )
        if first:
            axis.axvline(first - 0.5, color="white", linewidth=4)


def _gains_most(gained: pd.Series) -> str:
    """Which rung gains most for one shape: "2.7B gains most by TF32"."""
    return f"{gained.name[0]} gains most by {name_of(gained.idxmax()).removesuffix(' products')}"


def curves(curves: pd.DataFrame, where: str) -> Figure | None:
    """Loss less fp32's from the same weights, beside how far apart fp32's seeds are."""
    if curves.empty or curves.loc[curves["rung"] == "fp32", "seed"].nunique() < 2:
        return None
    use_style()
    windows = smoothed(curves)
    windows = windows[(windows[SHAPE] == windows[SHAPE].iloc[0]).all(axis=1)]
    rows, found = off_fp32(windows), trained(curves)
    apart = rows.groupby("window")["range"].first()
    limit = 1.15 * max(
        apart.tail(max(1, len(apart) - 1)).max(), rows["off"].abs().max()
    )  # the start is far up
    steps = (apart.index.to_numpy() + 1) * found["smoothed"]
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 4.2))
    axis.fill_between(steps, -apart, apart, color="0.88")
    words = f"grey: as far as {found['seeds']} seeds of fp32 are apart"
    axis.text(steps[-1], 0.97 * limit, words, ha="right", va="top", bbox=LABEL)
    out = [one["name"] for one in found["out"]]
    for rung in (rung for rung in RUNGS if rung in set(rows["rung"])):
        own = rows[rows["rung"] == rung].groupby("window")["off"].mean()
        if name_of(rung) not in out:
            axis.plot(steps[own.index], own, color=PALETTE[0], linewidth=1.2, alpha=0.8)
            continue
        index = out.index(name_of(rung))
        color = PALETTE[5 if not index else 1 + index % (len(PALETTE) - 1)]
        axis.plot(steps[own.index], own, color=color, linewidth=2.2, linestyle="--")
        far = own.abs().idxmax()
        axis.annotate(
            name_of(rung),
            (steps[far], own[far]),
            xytext=(8, -4 if own[far] < 0 else 4),
            textcoords="offset points",
            va="top" if own[far] < 0 else "bottom",
            color=as_text(color),
            fontweight="bold",
        )
    if found["inside"]:
        words = f"{'all' if not out else 'the other'} {found['inside']}, each a line"
        axis.text(steps[0], -0.12 * limit, words, va="top", color=as_text(PALETTE[0]), fontweight="bold")
    compared = f"{found['inside']} of {found['compared']} rungs"
    title = f"{compared} train nearer to fp32 than its seeds are to one another"
    axis.set(
        xlabel=f"steps of training (means of {found['smoothed']})",
        ylabel="loss less fp32's (nats)",
        ylim=(-limit, limit),
    )
    size = windows["size"].iloc[0]
    figure.suptitle(f"{title}\n(size {size}, {where})", x=0.01, ha="left", fontweight="bold")
    return figure
