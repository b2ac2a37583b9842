"""Figures of the memory study; None where there is nothing to draw."""
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepscope.report import style
from stepscope.report.style import BLUE, INK, MUTED, ORANGE, figure, label_ends
from stepscope.report.tables import number, ratio
from stepscope.step.accounting import GIB, peak
from stepscope.studies.memory.history import LIVE, column
from stepscope.studies.memory.tables import (
    CONFIG,
    Tables,
    begins_backward,
    config_of,
    nested,
    one_level,
    usual,
    where,
)

COLORS = {"weights": BLUE, "optimizer state": style.GREEN, "gradients": style.AMBER,
          "saved for backward": style.SKY, "bf16 copies": ORANGE, "temporaries": style.RED,
          "workspaces": MUTED, "other": style.FILL}
POINTS = 160   # of a drawn timeline: an SVG holds each
THICK = 0.08   # of the height: what is thinner has no name in the picture
NAMED = ("small", "medium", "large", "xl", "2.7B")
GROWTH = ("none", "square root", "every block", "halved", "from the start")


def memory_timeline(tables: Tables) -> Figure | None:
    """Live memory over the allocations and frees of forward alone and of a full step, stacked by kind."""
    lines = tables["memory.timeline"]
    if lines.empty:
        return None
    try:
        chosen = usual(lines).iloc[0]
    except LookupError:  # a notebook's own run, of another configuration
        chosen = lines.iloc[0]
    fields = {name: chosen[name] for name in CONFIG}
    rows, own = where(lines, **fields), where(tables["memory.peaks"], phase="whole", **fields)
    modes = [mode for mode in ("forward", "forward_backward", "step") if (rows["mode"] == mode).any()]
    drawn, axes = figure(
        _message(where(own, mode=modes[-1]).iloc[0]), 3.6, 1, len(modes), sharey=True, squeeze=False,
        width_ratios=[0.6, 1.4][-len(modes):] if len(modes) < 3 else None)
    limit = rows[[column(kind) for kind in LIVE]].sum(axis=1).max()
    for axis, mode in zip(axes[0], modes):
        _live(axis, rows[rows["mode"] == mode], limit)
        # what is drawn was asked for; the peak is what was allocated, a little more
        axis.texts[-1].set_text(number(where(own, mode=mode)["peak_gib"].iloc[0], ""))
        axis.set_title("forward alone" if mode == "forward" else "")
    axes[0, 0].set_ylabel("GiB")
    axes[0, 0].set_ylim(0, limit * 1.14)
    return drawn


def _message(whole: pd.Series) -> str:
    """Where the peak is, as a sentence."""
    place = "where backward begins" if begins_backward(whole) else f"in {whole['peak_in']}"
    return f"The peak is {place}: {number(whole['peak_gib'], 'GiB')}"


def _live(axis: Axes, rows: pd.DataFrame, limit: float) -> None:
    """One mode's kinds stacked and named where they are thickest, its phases marked, its peak labelled."""
    rows = _fewer(rows)
    kinds = [kind for kind in COLORS if rows[column(kind)].max() > 0]
    live = rows[[column(kind) for kind in kinds]].to_numpy().T
    x, height, total = np.arange(len(rows)), live.cumsum(axis=0), live.sum(axis=0)
    axis.stackplot(x, live, colors=[COLORS[kind] for kind in kinds], step="post", linewidth=0)
    for row, kind in enumerate(kinds):
        thick, at = (live[row] > 0.5 * live[row].max()).nonzero()[0], int(live[row].argmax())
        if live[row].max() < THICK * limit:
            continue
        if kind == "temporaries":  # spikes: their name is beside the highest
            axis.annotate(kind, (at, height[row, at]), xytext=(8, 22), textcoords="offset points", ha="right",
                          color=COLORS[kind])
        elif len(thick) > 0.08 * len(x):
            side = "left" if thick[0] == 0 and len(thick) < 0.5 * len(x) else "center"
            at = 0 if side == "left" else int(thick.mean())
            axis.text(at, height[row, at] - live[row, at] / 2, kind, ha=side, va="center", color=style.PAPER)
    starts = rows["phase"].ne(rows["phase"].shift()).to_numpy().nonzero()[0]
    for begin, after in zip(starts, [*starts[1:], len(rows)]):
        if len(starts) > 1 and after - begin > 0.08 * len(rows):
            axis.axvline(begin, color=MUTED, linewidth=0.8, linestyle=":")
            axis.text(begin, 1.0, f" {rows['phase'].iloc[begin]}", transform=axis.get_xaxis_transform(),
                      va="bottom")
    top = int(total.argmax())
    axis.plot([top], [total[top]], "v", color=INK)
    axis.annotate("", (top, total[top]), xytext=(7, 2), textcoords="offset points", color=INK)
    axis.set_xlabel("allocations and frees")
    axis.set_xticks([])
    axis.margins(x=0)
    axis.grid(visible=False)


def _fewer(rows: pd.DataFrame) -> pd.DataFrame:
    """At most :data:`POINTS` rows of a timeline: of each stretch the highest."""
    total = rows[[column(kind) for kind in LIVE]].sum(axis=1).to_numpy()
    stretch = -(-len(rows) // POINTS)
    return rows.iloc[[first + int(total[first:first + stretch].argmax())
                      for first in range(0, len(rows), stretch)]]


def memory_peak(tables: Tables) -> Figure | None:
    """The predicted peak of a full fp32 step by what it holds: the sizes at one context, the largest at
    longer."""
    one = usual(where(tables["memory.peaks"], phase="whole")).iloc[0]
    named = one["size"] in NAMED
    context = int(one["context_length"])
    shapes = [(name, context) for name in (NAMED[:NAMED.index(one["size"]) + 1] if named else [one["size"]])]
    shapes += [(one["size"], context * times) for times in (2, 4)]
    tops = [peak(config_of(one.to_dict() | {"size": size, "context_length": length}))
            for size, length in shapes]
    moving = [(top.kinds["saved for backward"] + top.kinds["temporaries"]) / top.allocated for top in tops]
    drawn, axis = figure(f"{one['size']}: {number(moving[-3], '%')} of the peak grows with the context at"
                         f" {context:,}, {number(moving[-1], '%')} at {4 * context:,}", 3.6)
    left = np.zeros(len(tops))
    for kind, color in COLORS.items():
        sizes = np.array([top.kinds[kind] / GIB for top in tops])
        shown = sizes.max() > 0.01 * max(top.allocated for top in tops) / GIB
        axis.barh(range(len(tops)), sizes, left=left, color=color, height=0.7, label=kind if shown else None)
        left += sizes
    axis.set_yticks(range(len(tops)), [f"{size}, {length:,}" for size, length in shapes])
    axis.invert_yaxis()
    for row, (end, top) in enumerate(zip(left, tops)):
        axis.annotate(number(top.allocated / GIB, ""), (end, row), xytext=(4, 0),
                      textcoords="offset points", va="center")
    axis.set_xlim(0, left.max() * 1.12)
    axis.set_xlabel("peak of a full step, GiB")
    axis.legend(loc="upper right")
    axis.grid(visible=False)
    return drawn


def memory_checkpoints(tables: Tables) -> Figure | None:
    """Peak and GPU time over blocks a checkpoint; dashed: without checkpoints."""
    rows = one_level(tables).sort_values("blocks_per_checkpoint")
    none, some = rows[rows["blocks_per_checkpoint"] == 0], rows[rows["blocks_per_checkpoint"] > 0]
    some = some[some["status"] == "ok"]
    if some.empty:
        return None
    peak = "peak_gib" if some["peak_gib"].notna().any() else "predicted_gib"
    drawn, axes = figure(_saved(some, none, peak), 3.0, 1, 2)
    blocks = some["blocks_per_checkpoint"].astype(int)
    for axis, name, title, color in ((axes[0], peak, "peak, GiB", BLUE),
                                     (axes[1], "gpu_ms", "GPU time, ms", ORANGE)):
        axis.plot(blocks, some[name], "o-", color=color)
        if len(none) and none["status"].iloc[0] == "ok":
            axis.axhline(none[name].iloc[0], color=MUTED, linestyle="--")
            axis.annotate("no checkpoints", (blocks.max(), none[name].iloc[0]), ha="right",
                          xytext=(0, 3), textcoords="offset points", color=MUTED)
        axis.set(title=title, xlabel="blocks a checkpoint", xscale="log")
        axis.set_ylim(0, axis.get_ylim()[1] * 1.06)
        axis.set_xticks(blocks, blocks)
        axis.minorticks_off()
    return drawn


def _saved(some: pd.DataFrame, none: pd.DataFrame, peak: str) -> str:
    """What the setting that needs least saves, and what that costs."""
    least = some.loc[some[peak].idxmin()]
    blocks = int(least["blocks_per_checkpoint"])
    words = "A checkpoint around each block" if blocks == 1 else f"A checkpoint around {blocks} blocks"
    if none.empty or none["status"].iloc[0] != "ok":
        return f"{words} needs least: {number(least[peak], 'GiB')}"
    off, longer = (ratio(least[name], none[name].iloc[0], unit) - 1
                   for name, unit in ((peak, "GiB"), ("gpu_ms", "ms")))
    return f"{words} takes {number(-off, '%')} off the peak for {number(longer, '%')} more GPU time"


def memory_nested(tables: Tables) -> Figure | None:
    """Memory beyond weights and gradients over the number of blocks, a line an arrangement of checkpoints."""
    try:
        rows = nested(tables)
    except LookupError:  # a notebook's own run, of which nothing fitted
        return None
    if rows["blocks"].nunique() < 2:
        return None
    values = "beyond_gib" if rows["peak_gib"].notna().any() else "expected_kept_gib"
    wide = rows.pivot(index="blocks", columns="arrangement", values=values)[list(GROWTH)]
    last, first = wide.iloc[-1], wide.iloc[0]
    drawn, axis = figure(f"From {wide.index[0]} to {wide.index[-1]} blocks memory grows "
                         f"{number(last['none'] / first['none'], 'x')}, with a checkpoint a block "
                         f"{number(last['every block'] / first['every block'], 'x')}, from the start "
                         f"{number(last['from the start'] / first['from the start'], 'x')}", 3.4)
    colors = dict(zip(GROWTH, style.PALETTE))
    for name in GROWTH:
        axis.plot(wide.index, wide[name], "o-", color=colors[name])
    axis.set(xscale="log", xlabel="blocks", ylabel="activations, GiB")
    axis.set_ylim(0)
    axis.set_xticks(wide.index, wide.index)
    axis.minorticks_off()
    label_ends(axis, {name: (wide.index[-1], last[name]) for name in GROWTH}, colors)
    return drawn
