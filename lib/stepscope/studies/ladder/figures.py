"""The ladder's pictures."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from stepscope.say.formats import number
from stepscope.say.style import PALETTE, WIDTH_IN, use_style
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.facts import OTHER_ARITHMETIC, by_shape, climbed, of_rung, reference, smoothed
from stepscope.studies.ladder.names import name_of
from stepscope.studies.ladder.tables import SHAPE


def hero(times: pd.DataFrame, where: str) -> Figure | None:
    """Rungs from top to bottom as bars, the floor as a line, Hugging Face's step as a mark."""
    own = reference(times)
    if own is None or len(rows := climbed(own)) < 2:
        return None
    use_style()
    first = rows["median_ms"].iloc[0]
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 1.5 + 0.5 * len(rows)))
    colors = [PALETTE[1] if rung == OTHER_ARITHMETIC else PALETTE[0] for rung in rows["rung"]]
    axis.barh(range(len(rows)), rows["median_ms"], color=colors, height=0.72)
    for y, row in enumerate(rows.itertuples()):
        axis.text(
            row.median_ms,
            y,
            f"  {number(row.median_ms)} ms · {number(first / row.median_ms)}×"
            f" · {row.tokens_per_s / 1e3:,.1f}k tok/s",
            va="center",
            fontsize=14,
            fontweight="bold",
        )
    floor = rows["floor_ms"].median()
    axis.axvline(floor, color="black", linestyle="--", linewidth=2)
    axis.text(floor, -0.75, f"floor {number(floor)} ms", fontsize=14, ha="left", va="center")
    if beside := of_rung(own, "hugging_face"):
        y = int((rows["median_ms"] - beside["median_ms"]).abs().to_numpy().argmin())
        axis.plot(beside["median_ms"], y + 0.5, marker="D", color=PALETTE[5], markersize=12, clip_on=False)
        axis.text(
            beside["median_ms"],
            y + 0.5,
            f"   Hugging Face, compiled: {number(beside['median_ms'])} ms",
            va="center",
            fontsize=13,
            color=PALETTE[5],
        )
    names = [name_of(rung) + (" *" if rung == OTHER_ARITHMETIC else "") for rung in rows["rung"]]
    axis.set_yticks(range(len(rows)), names, fontsize=14)
    axis.set_ylim(len(rows) - 0.2, -1.2)
    axis.set_xlim(0, rows["median_ms"].max() * 1.85)
    axis.set_xticks([])
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)
    shape = rows.iloc[0]
    title = f"A training step: {shape['size']}, context {shape['context_length']}, batch {shape['batch']:.0f}"
    axis.set_title(f"{title}\n({where})", fontsize=16)
    return figure


def gains(times: pd.DataFrame, where: str) -> Figure | None:
    """Sizes across, rungs down: how many times as fast each makes what was before it."""
    rows = pd.concat([climbed(own) for own in by_shape(times)] or [pd.DataFrame()], ignore_index=True)
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
    axis.set_title(f"What each rung makes of the one before it ({where})", pad=12)
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
    axis.set(
        xlabel="training, in means of ten steps",
        ylabel="loss less fp32's mean (nats)",
        title=f"Is it the same training? ({where})",
    )
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure
