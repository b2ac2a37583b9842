"""Figures of the memory study; None where there is nothing to draw."""
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepscope.report.style import (
    AMBER, BLUE, FILL, GREEN, INK, MUTED, ORANGE, PALETTE, PAPER, RED, SKY, figure, label_ends,
)
from stepscope.report.tables import number, ratio
from stepscope.studies.memory.history import LIVE, column
from stepscope.studies.memory.tables import Tables, of_largest, usual, where

COLORS = {"weights": BLUE, "optimizer state": GREEN, "gradients": AMBER, "saved for backward": SKY,
          "bf16 copies": ORANGE, "temporaries": RED, "workspaces": MUTED, "other": FILL}
POINTS = 300   # of a drawn timeline: an SVG holds each
THICK = 0.1    # of the height: what is thinner has no name in the picture
GROWTH = ("none", "square root", "every block", "halved", "from the start")


def memory_timeline(tables: Tables) -> Figure | None:
    """Live memory over the allocations and frees of forward alone and of a full step, stacked by kind."""
    if tables["memory.timeline"].empty:
        return None
    rows = usual(tables["memory.timeline"])
    modes = [mode for mode in ("forward", "forward_backward", "step") if (rows["mode"] == mode).any()]
    own = where(tables["memory.peaks"], mode=modes[-1], phase="whole", size=rows["size"].iloc[0], precision="fp32",
                context_length=rows["context_length"].iloc[0])
    drawn, axes = figure(_message(own.iloc[0]), 3.6, 1, len(modes), sharey=True, squeeze=False,
                         width_ratios=[0.6, 1.4][-len(modes):] if len(modes) < 3 else None)
    for axis, mode in zip(axes[0], modes):
        _live(axis, rows[rows["mode"] == mode], "forward alone" if mode == "forward" else "a full step")
    axes[0, 0].set_ylabel("GiB")
    axes[0, 0].set_ylim(0, rows[[column(kind) for kind in LIVE]].sum(axis=1).max() * 1.14)
    return drawn


def _message(whole: pd.Series) -> str:
    """Where the peak is, as a sentence."""
    begins = whole["peak_in"] == "backward" and (pd.isna(whole["layer"]) or whole["region"] == "head")
    place = "where backward begins" if begins else f"in {whole['peak_in']}"
    return f"The peak is {place}: {number(whole['peak_gib'], 'GiB')}"


def _live(axis: Axes, rows: pd.DataFrame, name: str) -> None:
    """One mode's kinds stacked and named where they are thickest, its phases marked, its peak labelled."""
    rows = _fewer(rows)
    kinds = [kind for kind in COLORS if rows[column(kind)].max() > 0]
    live = rows[[column(kind) for kind in kinds]].to_numpy().T
    x, height, total = np.arange(len(rows)), live.cumsum(axis=0), live.sum(axis=0)
    axis.stackplot(x, live, colors=[COLORS[kind] for kind in kinds], step="post", linewidth=0)
    for row, kind in enumerate(kinds):
        at = int(live[row].argmax()) if live[row].min() < 0.9 * live[row].max() else len(x) // 2
        wide = (live[row] > 0.5 * live[row].max()).sum() > 0.08 * len(x)
        if live[row].max() > THICK * total.max() and wide:
            side = "left" if at < 0.3 * len(x) else "right" if at > 0.7 * len(x) else "center"
            axis.text(at, height[row, at] - live[row, at] / 2, kind, ha=side, va="center", color=PAPER)
    starts = rows["phase"].ne(rows["phase"].shift()).to_numpy().nonzero()[0]
    for begin, after in zip(starts, [*starts[1:], len(rows)]):
        if len(starts) > 1 and after - begin > 0.08 * len(rows):
            axis.axvline(begin, color=MUTED, linewidth=0.8, linestyle=":")
            axis.text(begin, 1.0, f" {rows['phase'].iloc[begin]}", transform=axis.get_xaxis_transform(), va="bottom")
    if len(starts) == 1:
        axis.set_title(name)
    top = int(total.argmax())
    axis.plot([top], [total[top]], "v", color=INK)
    axis.annotate(number(total[top], ""), (top, total[top]), xytext=(7, 2), textcoords="offset points", color=INK)
    axis.set_xlabel("allocations and frees")
    axis.set_xticks([])
    axis.margins(x=0)
    axis.grid(visible=False)


def _fewer(rows: pd.DataFrame) -> pd.DataFrame:
    """At most :data:`POINTS` rows of a timeline: of each stretch the highest."""
    total = rows[[column(kind) for kind in LIVE]].sum(axis=1).to_numpy()
    stretch = -(-len(rows) // POINTS)
    return rows.iloc[[first + int(total[first:first + stretch].argmax()) for first in range(0, len(rows), stretch)]]


def memory_checkpoints(tables: Tables) -> Figure | None:
    """Peak and GPU time over blocks a checkpoint; dashed: without checkpoints."""
    rows = tables["memory.checkpoints"]
    rows = rows[rows["blocks_per_checkpoint"].notna() & (rows["mode"] == "forward_backward")]
    if rows.empty:
        return None
    rows = of_largest(rows[rows["size"] != "10B"])
    rows = rows[rows["context_length"] == rows["context_length"].min()].sort_values("blocks_per_checkpoint")
    none, some = rows[rows["blocks_per_checkpoint"] == 0], rows[rows["blocks_per_checkpoint"] > 0]
    some = some[some["status"] == "ok"]
    peak = "peak_gib" if some["peak_gib"].notna().any() else "predicted_gib"
    drawn, axes = figure(_saved(some, none, peak), 3.0, 1, 2)
    for axis, name, title, color in ((axes[0], peak, "peak, GiB", BLUE), (axes[1], "gpu_ms", "GPU time, ms", ORANGE)):
        axis.plot(some["blocks_per_checkpoint"], some[name], "o-", color=color)
        if len(none) and none["status"].iloc[0] == "ok":
            axis.axhline(none[name].iloc[0], color=MUTED, linestyle="--")
            axis.annotate("no checkpoints", (some["blocks_per_checkpoint"].max(), none[name].iloc[0]), ha="right",
                          xytext=(0, 3), textcoords="offset points", color=MUTED)
        axis.set(title=title, xlabel="blocks a checkpoint", xscale="log")
        axis.set_ylim(0, axis.get_ylim()[1] * 1.06)
        axis.set_xticks(some["blocks_per_checkpoint"], [f"{blocks:.0f}" for blocks in some["blocks_per_checkpoint"]])
        axis.minorticks_off()
    return drawn


def _saved(some: pd.DataFrame, none: pd.DataFrame, peak: str) -> str:
    """What the setting that needs least saves, and what that costs."""
    least = some.loc[some[peak].idxmin()]
    blocks = int(least["blocks_per_checkpoint"])
    words = "A checkpoint around each block" if blocks == 1 else f"A checkpoint around {blocks} blocks"
    if none.empty or none["status"].iloc[0] != "ok":
        return f"{words} needs least: {number(least[peak], 'GiB')}"
    off, longer = (ratio(least[name], none[name].iloc[0], unit) - 1 for name, unit in ((peak, "GiB"), ("gpu_ms", "ms")))
    return f"{words} takes {number(-off, '%')} off the peak for {number(longer, '%')} more GPU time"


def memory_nested(tables: Tables) -> Figure | None:
    """Memory beyond weights and gradients over the number of blocks, a line an arrangement of checkpoints."""
    rows = tables["memory.checkpoints"]
    rows = rows[rows["expected_kept_gib"].notna() & (rows["status"] == "ok")]
    if rows["blocks"].nunique() < 2:
        return None
    on_gpu = rows["peak_gib"].notna().any()
    rows = rows.assign(beyond=rows["peak_gib"] - rows["state_gib"] if on_gpu else rows["expected_kept_gib"])
    wide = rows.pivot(index="blocks", columns="arrangement", values="beyond")[list(GROWTH)]
    last, first = wide.iloc[-1], wide.iloc[0]
    drawn, axis = figure(f"From {wide.index[0]} to {wide.index[-1]} blocks memory grows "
                         f"{number(last['none'] / first['none'], 'x')}, with a checkpoint a block "
                         f"{number(last['every block'] / first['every block'], 'x')}, from the start "
                         f"{number(last['from the start'] / first['from the start'], 'x')}", 3.4)
    colors = dict(zip(GROWTH, PALETTE))
    for name in GROWTH:
        axis.plot(wide.index, wide[name], "o-", color=colors[name])
    axis.set(xscale="log", xlabel="blocks", ylabel="GiB beyond weights and gradients" if on_gpu else "GiB kept")
    axis.set_ylim(0)
    axis.set_xticks(wide.index, wide.index)
    axis.minorticks_off()
    label_ends(axis, {name: (wide.index[-1], last[name]) for name in GROWTH}, colors)
    return drawn
