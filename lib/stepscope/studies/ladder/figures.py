"""The ladder's pictures."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from stepscope.say.formats import number
from stepscope.say.style import PALETTE, WIDTH_IN, use_style
from stepscope.studies.ladder import facts
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.facts import (
    OTHER_ARITHMETIC,
    by_shape,
    climbed,
    off_fp32,
    smoothed,
    trained,
)
from stepscope.studies.ladder.names import name_of
from stepscope.studies.ladder.tables import SHAPE

LARGE = 16  # points: to be read when the picture is 400 pixels wide


def hero(rungs: pd.DataFrame, where: str) -> Figure | None:
    """Rungs from top to bottom as bars, the floor as a line, Hugging Face's step as a mark."""
    found = facts.ladder(rungs)
    if found is None or len(rows := climbed(found["rows"])) < 2:
        return None
    use_style()
    first, widest = rows["median_ms"].iloc[0], rows["median_ms"].max()
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 2.2 + 0.55 * len(rows)))
    colors = [PALETTE[1] if rung == OTHER_ARITHMETIC else PALETTE[0] for rung in rows["rung"]]
    axis.barh(range(len(rows)), rows["median_ms"], color=colors, height=0.72)
    for y, row in enumerate(rows.itertuples()):
        axis.text(
            row.median_ms + widest / 60,
            y,
            f"{number(row.median_ms)} ms · {first / row.median_ms:.1f}×"
            f" · {row.tokens_per_s / 1e3:,.1f}k tok/s",
            va="center",
            fontsize=LARGE,
            fontweight="bold",
        )
    axis.axvline(found["floor_ms"], color="black", linestyle="--", linewidth=2)
    beside_line, floor = widest / 60, found["floor_ms"]
    axis.text(floor + beside_line, -0.85, f"floor {number(floor)} ms", fontsize=LARGE, va="center")
    if found["beside"]:
        beside_ms = found["beside"]["median_ms"]
        axis.plot(beside_ms, len(rows), marker="D", color=PALETTE[5], markersize=13, clip_on=False)
        axis.text(
            beside_ms + widest / 25,
            len(rows),
            f"Hugging Face, compiled: {number(beside_ms)} ms",
            va="center",
            fontsize=LARGE,
            color=PALETTE[5],
        )
    names = [name_of(rung) + (" *" if rung == OTHER_ARITHMETIC else "") for rung in rows["rung"]]
    axis.set_yticks(range(len(rows)), names, fontsize=LARGE)
    axis.set_ylim(len(rows) + 0.5, -1.4)
    axis.set_xlim(0, widest * 2.35)
    axis.set_xticks([])
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)
    title = f"{number(first)} to {number(found['best_ms'])} ms: the same step, {found['faster']:.1f}× faster"
    if not found["gains"]:
        title = f"{number(first)} ms: no rung is surely faster here"
    shape = f"{found['size']}, context {found['context']}, batch {found['batch']}, {where}"
    figure.suptitle(f"{title}\n{shape}", fontsize=LARGE + 1, fontweight="bold", x=0.01, ha="left")
    return figure


def gains(rungs: pd.DataFrame, where: str) -> Figure | None:
    """Sizes across, rungs down: how many times as fast each makes what was before it."""
    rows = pd.concat([climbed(own) for own in by_shape(rungs)] or [pd.DataFrame()], ignore_index=True)
    rows = rows[rows["gain"].notna()] if len(rows) else rows
    if rows.empty:
        return None
    use_style()
    usual = rows["vocab_size"].mode().iloc[0]
    rows["shape"] = [
        f"{size}\n{context}" + (f"\nV {vocabulary:,}" if vocabulary != usual else "")
        for size, context, vocabulary in zip(rows["size"], rows["context_length"], rows["vocab_size"])
    ]
    table = rows.pivot(index="rung", columns="shape", values="gain").reindex(columns=rows["shape"].unique())
    table = table.reindex([rung for rung in RUNGS if rung in table.index])
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 1.4 + 0.42 * len(table)))
    drawn = axis.imshow(np.log2(table.to_numpy(dtype=float)), cmap="PuOr_r", vmin=-1, vmax=1, aspect="auto")
    for (y, x), value in np.ndenumerate(table.to_numpy(dtype=float)):
        if np.isfinite(value):
            axis.text(
                x,
                y,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=11,
                color="white" if abs(np.log2(value)) > 0.7 else "black",
            )
    axis.set_yticks(range(len(table)), [name_of(rung) for rung in table.index])
    axis.set_xticks(range(table.shape[1]), table.columns)
    axis.xaxis.tick_top()
    axis.grid(visible=False)
    least, most = (table[shape] for shape in table.columns[[0, -1]])
    title = f"{most.name.splitlines()[0]} gains most by {name_of(most.idxmax())}"
    if least.notna().any() and least.idxmax() != most.idxmax():
        title += f",\n{least.name.splitlines()[0]} by {name_of(least.idxmax())}"
    axis.set_title(f"{title}\ntimes as fast as the rung before; {where}", pad=12)
    figure.colorbar(drawn, ax=axis, ticks=[-1, 0, 1]).ax.set_yticklabels(["0.5×", "1×", "2×"])
    return figure


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
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 3.8))
    axis.fill_between(steps, -apart, apart, color="0.88", label=f"{found['seeds']} seeds of fp32")
    for index, rung in enumerate(rung for rung in RUNGS if rung in set(rows["rung"])):
        own = rows[rows["rung"] == rung].groupby("window")["off"].mean()
        style = "-" if index < len(PALETTE) else "--"
        color = PALETTE[index % len(PALETTE)]
        axis.plot(steps[own.index], own, color=color, linewidth=1.4, linestyle=style, label=name_of(rung))
    compared = f"{found['inside']} of {found['compared']} rungs"
    title = f"{compared} train nearer to fp32 than its seeds are to one another"
    axis.set(
        xlabel=f"steps of training (means of {found['smoothed']})",
        ylabel="loss less fp32's (nats)",
        ylim=(-limit, limit),
        title=f"{title}\nsize {windows['size'].iloc[0]}, {where}",
    )
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure
