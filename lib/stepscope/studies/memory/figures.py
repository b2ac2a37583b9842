"""Figures of the memory study; None where there is nothing to draw."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepscope.config import PHASES, PRECISION_NAMES
from stepscope.report import style
from stepscope.report.schemas import Tables
from stepscope.report.tables import number
from stepscope.studies.memory.tables import CONFIG, LIVE, begins_backward, column, largest_plain

COLORS = {
    "weights": style.BLUE,
    "optimizer state": style.GREEN,
    "gradients": style.AMBER,
    "saved for backward": style.SKY,
    "autocast weight cache": style.ORANGE,
    "temporaries": style.RED,
    "workspaces": style.MUTED,
    "other": style.FILL,
}
POINTS = 160  # of a drawn timeline: an SVG holds each
THICK = 0.08  # of the height: what is thinner has no name in the picture


@style.look()
def memory_timeline(tables: Tables) -> Figure | None:
    """Live memory over the allocations and frees of forward alone and of a full step, stacked by kind."""
    lines = tables["memory.timeline"]
    if lines.empty:
        return None
    one = largest_plain(lines).iloc[0]
    rows, peaks = (_like(frame, one) for frame in (lines, tables["memory.peaks"]))
    wholes = peaks[peaks["phase"] == "whole"].set_index("mode")
    modes = [mode for mode in PHASES if (rows["mode"] == mode).any()]
    last = wholes.loc[modes[-1]]
    place = "where backward begins" if begins_backward(last) else f"in {last['peak_in']}"
    message = (
        f"{one['size']} at context {one['context_length']:,} in {PRECISION_NAMES[one['precision']]}:"
        f" the peak is {place}, {number(last['peak_gib'], 'GiB')}"
    )
    drawn, axes = style.figure(
        message,
        3.6,
        1,
        len(modes),
        sharey=True,
        squeeze=False,
        width_ratios=[1 + len(PHASES[mode]) for mode in modes],
    )
    limit = rows[[column(kind) for kind in LIVE]].sum(axis=1).max()
    for axis, mode in zip(axes[0], modes):
        _live(axis, rows[rows["mode"] == mode], limit, number(wholes.loc[mode, "peak_gib"], ""))
        axis.set_title("forward alone" if mode == "forward" else "")
    axes[0, 0].set_ylabel("GiB")
    axes[0, 0].set_ylim(0, limit * 1.14)
    return drawn


def _like(frame: pd.DataFrame, row: pd.Series) -> pd.DataFrame:
    """Return the rows of the same configuration."""
    return frame[(frame[[*CONFIG]] == row[[*CONFIG]]).all(axis=1)]


def _live(axis: Axes, rows: pd.DataFrame, limit: float, top: str) -> None:
    """One mode's kinds stacked and named where they are thickest, its phases marked, its peak labelled: what
    is drawn was asked for, and ``top`` is what was allocated, a little more."""
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
            axis.annotate(
                kind,
                (at, height[row, at]),
                xytext=(8, 12),
                textcoords="offset points",
                ha="right",
                color=COLORS[kind],
            )
        elif len(thick) > 0.08 * len(x):
            at = int(thick.mean())
            axis.text(
                at, height[row, at] - live[row, at] / 2, kind, ha="center", va="center", color=style.PAPER
            )
    starts = rows["phase"].ne(rows["phase"].shift()).to_numpy().nonzero()[0]
    for begin, after in zip(starts, [*starts[1:], len(rows)]):
        if len(starts) > 1 and after - begin > 0.08 * len(rows):
            axis.axvline(begin, color=style.MUTED, linewidth=0.8, linestyle=":")
            axis.text(
                begin, 1.0, f" {rows['phase'].iloc[begin]}", transform=axis.get_xaxis_transform(), va="bottom"
            )
        elif len(starts) > 1 and after == len(rows):  # the last stage is too narrow for its name
            axis.axvline(begin, color=style.MUTED, linewidth=0.8, linestyle=":")
            axis.text(
                after,
                1.0,
                rows["phase"].iloc[begin],
                transform=axis.get_xaxis_transform(),
                ha="right",
                va="bottom",
            )
    at = int(total.argmax())
    axis.plot([at], [total[at]], "v", color=style.INK)
    axis.annotate(top, (at, total[at]), xytext=(7, 2), textcoords="offset points", color=style.INK)
    axis.set_xlabel("allocations and frees")
    axis.set_xticks([])
    axis.margins(x=0)
    axis.grid(visible=False)


def _fewer(rows: pd.DataFrame) -> pd.DataFrame:
    """At most :data:`POINTS` rows of a timeline: of each stretch the highest."""
    total = rows[[column(kind) for kind in LIVE]].sum(axis=1)
    return rows.loc[total.groupby(np.arange(len(rows)) // -(-len(rows) // POINTS)).idxmax()]
