"""Figures of the nsys study."""

import pandas as pd

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
    rows = categories[categories["phase"].isin([*PHASES])]
    phase = rows["phase"].map(PHASES)
    shares = rows.assign(bar=rows["size"] + ": " + phase).pivot(
        index="bar", columns="kernel_category", values="share"
    )
    bars = [f"{size}: {name}" for size in rows["size"].unique() for name in PHASES.values()]
    widest_first = shares.sum().sort_values(ascending=False).index
    shares = shares.reindex(index=bars, columns=widest_first).fillna(0.0)
    drawn, axes = style.figure(title, 1.6 + 0.34 * len(shares))
    style.stacked_bars(axes, shares, COLORS, lambda name, bar: number(shares[name].iloc[bar], "%"), 0.07)
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
    lanes = [mode for mode in LANES if mode in set(operations["mode"])]
    drawn, axes = style.figure(title, 1.7 + 0.35 * len(lanes))
    launched = operations[operations["mode"] == "forward"]
    axes.broken_barh(_spans(launched, "launch_ns", "launch_duration_ns"), (-0.35, 0.7), color=style.MUTED)
    for place, mode in enumerate(lanes, start=1):
        own = operations[operations["mode"] == mode]
        category = own["kernel_category"].where(own["kernel_category"].isin([*COLORS]), "all else")
        for name, rows in own.groupby(category):
            spans = _spans(rows, "start_ns", "duration_ns")
            axes.broken_barh(spans, (place - 0.35, 0.7), color=COLORS.get(name, style.FILL), label=name)
    axes.set(xlim=(0, DRAWN_NS / 1e3), ylim=(len(lanes) + 0.5, -0.5), xlabel="µs")
    axes.set_yticks(range(1 + len(lanes)), ["CPU launches", *(LANES[mode] for mode in lanes)])
    axes.grid(False)
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles))  # one of each
    drawn.legend(by_label.values(), by_label, loc="outside lower center", ncols=3)
    return drawn


def _spans(rows: pd.DataFrame, start: str, duration: str) -> list[tuple[float, float]]:
    """Return begin and length, in µs, of what lies in the drawn window."""
    inside = rows[(rows[start] < DRAWN_NS) & (rows[start] + rows[duration] > 0)]
    return list(zip(inside[start] / 1e3, inside[duration] / 1e3))
