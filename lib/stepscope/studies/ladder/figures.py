"""The ladder's pictures."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from stepscope.say.formats import number
from stepscope.say.style import PALETTE, WIDTH_IN, use_style
from stepscope.studies.ladder import facts
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.facts import OTHER_ARITHMETIC, beyond_band, by_shape, climbed, smoothed
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
            f"{number(row.median_ms)} ms · {number(first / row.median_ms, 2)}×"
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
    axis.set_xlim(0, widest * 2.15)
    axis.set_xticks([])
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)
    faster = f"{number(found['faster'], 2)}× faster"
    title = f"{number(first)} to {number(found['best_ms'])} ms: the same step, {faster}"
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
    several = rows["vocab_size"].nunique() > 1
    rows["shape"] = [
        f"{size}\n{context}" + (f"\nV {vocabulary:,}" if several else "")
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
                f"{value:.2f}×",
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
    title = f"Most gained by {name_of(most.idxmax())} for {most.name.splitlines()[0]}"
    if least.notna().any() and least.idxmax() != most.idxmax():
        title += f", by {name_of(least.idxmax())} for {least.name.splitlines()[0]}"
    axis.set_title(f"{title}\neach rung against the one before it; {where}", pad=12)
    figure.colorbar(drawn, ax=axis, ticks=[-1, 0, 1]).ax.set_yticklabels(["0.5×", "1×", "2×"])
    return figure


def curves(curves: pd.DataFrame, where: str) -> Figure | None:
    """Loss against fp32's band: each rung's distance from the mean of fp32's seeds."""
    if curves.empty or curves.loc[curves["rung"] == "fp32", "seed"].nunique() < 2:
        return None
    use_style()
    windows = smoothed(curves)
    windows = windows[(windows[SHAPE] == windows[SHAPE].iloc[0]).all(axis=1)]
    band = windows[windows["rung"] == "fp32"].groupby("window")["loss"].agg(["min", "max", "mean"])
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 3.8))
    axis.fill_between(
        band.index,
        band["min"] - band["mean"],
        band["max"] - band["mean"],
        color="0.85",
        label="fp32, three seeds",
    )
    others = [rung for rung in RUNGS if rung in set(windows["rung"]) and rung != "fp32"]
    for index, rung in enumerate(others):
        own = windows[windows["rung"] == rung].groupby("window")["loss"].mean()
        axis.plot(
            own.index,
            own - band["mean"],
            color=PALETTE[index % len(PALETTE)],
            linewidth=1.4,
            linestyle="-" if index < len(PALETTE) else "--",
            label=name_of(rung),
        )
    inside = int((beyond_band(windows)["beyond"] == 0).sum())
    title = f"{inside} of {len(others)} rungs train within the band of fp32's seeds throughout"
    axis.set(
        xlabel="training, in means of ten steps",
        ylabel="loss less fp32's mean (nats)",
        title=f"{title}\nsize {windows['size'].iloc[0]}, {where}",
    )
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure
