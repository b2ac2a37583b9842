"""Draw the memory study's figures."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from stepscope.config import PHASES
from stepscope.report import style
from stepscope.report.tables import number
from stepscope.studies.memory.tables import LIVE, column

KIND_COLORS = {
    "weights": style.BLUE,
    "optimizer state": style.GREEN,
    "gradients": style.AMBER,
    "saved for backward": style.SKY,
    "autocast weight cache": style.ORANGE,
    "temporaries": style.RED,
    "workspaces": style.MUTED,
    "other": style.FILL,
}
MAX_POINTS = 160  # maximum number of points in a timeline, because each point takes space in the SVG
MIN_NAMED_SHARE = 0.08  # minimum share of the height or width; smaller parts aren't labeled


@style.look()
def memory_timeline(title: str, timeline: pd.DataFrame, peaks: pd.DataFrame) -> style.Picture:
    """Draw the requested memory by kind after each allocation and free, for each recorded mode.

    Args:
        timeline: rows of the view ``timeline`` for one configuration, with at least one mode.
        peaks: each mode's row of the view ``peaks`` with the phase "total".
    """
    modes = [mode for mode in PHASES if (timeline["mode"] == mode).any()]
    widths = [max(2, len(PHASES[mode])) for mode in modes]
    drawn, axes = style.figure(title, 3.6, 1, len(modes), sharey=True, squeeze=False, width_ratios=widths)
    limit = _live(timeline).sum(axis=1).max()
    allocated = peaks.set_index("mode")["peak_gib"]
    for axis, mode in zip(axes[0], modes):
        thinned = _highest(timeline[timeline["mode"] == mode])
        _stack(axis, thinned, limit)
        _mark_phases(axis, thinned["phase"])
        _mark_peak(axis, _live(thinned).sum(axis=1), number(allocated[mode], ""))
        axis.set_title("forward alone" if mode == "forward" else "")
        axis.set_xlabel("allocations and frees")
        axis.set_xticks([])
        axis.margins(x=0)
        axis.grid(visible=False)
    axes[0, 0].set_ylabel("GiB")
    axes[0, 0].set_ylim(0, limit * 1.14)
    return drawn


def _live(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the live memory in GiB after each event, with one column per kind."""
    kinds = [kind for kind in KIND_COLORS if kind in LIVE]
    return rows[[column(kind) for kind in kinds]].set_axis(kinds, axis="columns")


def _highest(rows: pd.DataFrame) -> pd.DataFrame:
    """Reduce a timeline to at most :data:`MAX_POINTS` rows, by keeping the highest row of each interval."""
    total = _live(rows).sum(axis=1)
    stretch = np.arange(len(rows)) // -(-len(rows) // MAX_POINTS)
    return rows.loc[total.groupby(stretch).idxmax()]


def _stack(axis: Axes, rows: pd.DataFrame, limit: float) -> None:
    """Draw the kinds as stacked areas; label each at its thickest point if the label fits."""
    live = _live(rows)
    live = live.loc[:, live.max() > 0]
    colors = [KIND_COLORS[kind] for kind in live]
    axis.stackplot(np.arange(len(live)), live.to_numpy().T, colors=colors, step="post", linewidth=0)
    tops = live.cumsum(axis="columns")
    centered: dict[str, Any] = {"ha": "center", "va": "center", "color": style.PAPER}
    for kind in live:
        heights, top = live[kind].to_numpy(), tops[kind].to_numpy()
        highest = heights.max()
        if highest < MIN_NAMED_SHARE * limit:
            continue
        thick = (heights > 0.5 * highest).nonzero()[0]
        middle = int(thick.mean())
        if kind == "temporaries":
            _name_spike(axis, int(heights.argmax()), top, kind)
        elif len(thick) > MIN_NAMED_SHARE * len(live):
            axis.text(middle, top[middle] - heights[middle] / 2, kind, **centered)


def _name_spike(axis: Axes, place: int, top: np.ndarray, kind: str) -> None:
    """Write a kind's name next to its highest spike, because the spike is too narrow to contain the name."""
    axis.annotate(
        kind,
        (place, top[place]),
        xytext=(8, 12),
        textcoords="offset points",
        ha="right",
        color=KIND_COLORS[kind],
    )


def _mark_phases(axis: Axes, phases: pd.Series) -> None:
    """Draw a labeled line at the start of each phase that is wide enough, and of the last phase even if it isn't.

    The label of a narrow last phase ends at the edge of the axes.
    """
    starts = phases.ne(phases.shift()).to_numpy().nonzero()[0]
    if len(starts) < 2:
        return
    at_top: dict[str, Any] = {"transform": axis.get_xaxis_transform(), "va": "bottom"}
    for begin, end in zip(starts, [*starts[1:], len(phases)]):
        name = phases.iloc[begin]
        is_wide = end - begin > MIN_NAMED_SHARE * len(phases)
        if is_wide:
            axis.text(begin, 1.0, f" {name}", **at_top)
        elif end == len(phases):
            axis.text(end, 1.0, name, ha="right", **at_top)
        else:
            continue
        axis.axvline(begin, color=style.MUTED, linewidth=0.8, linestyle=":")


def _mark_peak(axis: Axes, total: pd.Series, text: str) -> None:
    """Mark the highest point with ``text``, which gives allocated memory; the curve shows requested memory."""
    place = int(total.to_numpy().argmax())
    axis.plot([place], [total.iloc[place]], "v", color=style.INK)
    axis.annotate(
        text, (place, total.iloc[place]), xytext=(7, 2), textcoords="offset points", color=style.INK
    )


@style.look()
def memory_peak(title: str, sizes: pd.DataFrame, longer: pd.DataFrame) -> style.Picture:
    """Draw a full step's predicted peaks by kind, for several sizes, and then for one size at longer contexts.

    Args:
        sizes, longer: rows of the view ``predictions``, each drawn as one bar; steps that ran out of memory are
            hatched.
    """
    rows = pd.concat([sizes, longer])
    names = rows["size"] + rows["context_length"].map(", {:,}".format)
    columns = [column(kind) for kind in KIND_COLORS]
    parts = rows[columns].set_axis([*KIND_COLORS], axis="columns").set_axis(names.tolist())
    ends = parts.sum(axis=1)
    limit = ends.max()
    colors = {kind: color for kind, color in KIND_COLORS.items() if parts[kind].max() > 0.01 * limit}
    drawn, axis = style.figure(title, 3.6)
    style.stacked_bars(axis, parts, colors)
    hatched: dict[str, Any] = {
        "color": "none",
        "edgecolor": style.PAPER,
        "hatch": "///",
        "linewidth": 0,
        "height": 0.66,
    }
    for place, (end, row) in enumerate(zip(ends, rows.itertuples())):
        text = number(row.predicted_gib)
        if row.runs_out:
            text = f"{text} runs out"
            axis.barh([place], [end], **hatched)
        axis.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center")
    axis.set_xlim(0, limit * 1.3)
    axis.set_xlabel("predicted peak of a full step, GiB")
    axis.legend(loc="upper right")
    return drawn
