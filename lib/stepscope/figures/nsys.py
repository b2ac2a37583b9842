"""Figures of the nsys study."""

import pandas as pd
from matplotlib.axes import Axes

from stepscope.report import style
from stepscope.report.tables import number
from stepscope.traces.families import ATTENTION_SOFTMAX, MATMUL
from stepscope.views.nsys import DRAWN_NS

COLORS = {
    MATMUL: style.BLUE,
    "fused attention": style.SKY,
    ATTENTION_SOFTMAX: style.PINK,
    "elementwise": style.AMBER,
    "optimizer": style.GREEN,
    "copy and cast": style.ORANGE,
    "reduction and norm": style.RED,
}
PHASES = {"forward": "forward", "backward": "backward", "optimizer": "AdamW"}  # the loss is too short to see
LANES = {"forward": "GPU runs", "replayed": "as a CUDA graph"}


@style.look()
def kernel_families(title: str, categories: pd.DataFrame) -> style.Picture:
    """Draw a bar per size and phase of a full step, by kernel category, in shares of the step.

    Args:
        categories: rows of the view ``profile_categories`` of one mode, one row per size, phase and category.
    """
    is_drawn = categories["phase"].isin([*PHASES])
    rows = categories[is_drawn]
    phase = rows["phase"].map(PHASES)
    named = rows.assign(bar=rows["size"] + ": " + phase)
    shares = named.pivot(index="bar", columns="kernel_category", values="share")
    widths = shares.sum().sort_values(ascending=False)
    sizes = rows["size"].unique()
    bars = [f"{size}: {name}" for size in sizes for name in PHASES.values()]
    shares = shares.reindex(index=bars, columns=widths.index)
    shares = shares.fillna(0.0)

    def text(category: str, place: int) -> str:
        return number(shares[category].iloc[place], "%")

    height = 1.6 + 0.34 * len(bars)
    drawn, axes = style.figure(title, height)
    style.stacked_bars(axes, shares, COLORS, text, least=0.07)
    style.without_axis(axes)
    axes.set_xlabel("share of the step's GPU time")
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


@style.look()
def launches_timeline(title: str, operations: pd.DataFrame) -> style.Picture:
    """Draw a millisecond of forward: what the CPU launches, what the GPU runs, and what it runs as a CUDA graph.

    Args:
        operations: rows of the view ``launch_timeline`` of one configuration.
    """
    by_mode = {mode: operations[operations["mode"] == mode] for mode in LANES}
    lanes = {mode: rows for mode, rows in by_mode.items() if len(rows)}
    height = 1.7 + 0.35 * len(lanes)
    drawn, axes = style.figure(title, height)
    launches = _spans(by_mode["forward"], "launch_ns", "launch_duration_ns")
    axes.broken_barh(launches, (-0.35, 0.7), color=style.MUTED)
    for place, rows in enumerate(lanes.values(), start=1):
        _lane(axes, rows, place)
    names = ["CPU launches", *(LANES[mode] for mode in lanes)]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(lanes) + 0.5, -0.5)
    axes.set_xlim(0, DRAWN_NS / 1e3)
    axes.set_xlabel("µs")
    axes.grid(False)
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles))  # one of each
    drawn.legend(by_label.values(), by_label, loc="outside lower center", ncols=3)
    return drawn


def _lane(axes: Axes, rows: pd.DataFrame, place: int) -> None:
    """Draw when operations ran, in their categories' colors."""
    category = rows["kernel_category"]
    has_color = category.isin([*COLORS])
    shown = category.where(has_color, "all else")
    for name, own in rows.groupby(shown):
        spans = _spans(own, "start_ns", "duration_ns")
        color = COLORS.get(name, style.FILL)
        axes.broken_barh(spans, (place - 0.35, 0.7), color=color, label=name)


def _spans(rows: pd.DataFrame, start: str, duration: str) -> list[tuple[float, float]]:
    """Return begin and length, in µs, of what lies in the drawn window."""
    begins_before = rows[start] < DRAWN_NS
    ends_after = rows[start] + rows[duration] > 0
    inside = rows[begins_before & ends_after]
    return list(zip(inside[start] / 1e3, inside[duration] / 1e3))
