"""Figures of the memory study; None where there is nothing to draw."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepscope.config import PHASES, StepConfig
from stepscope.model.accounting import GIB, everything, instants, peak
from stepscope.report import style
from stepscope.report.schemas import Tables
from stepscope.report.shapes import PRECISION_NAMES, select
from stepscope.report.tables import number
from stepscope.studies.memory.tables import CONFIG, LIVE, begins_backward, column, predicted, usual

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
NAMED = ("small", "medium", "large", "xl", "2.7B")


@style.look()
def memory_timeline(tables: Tables) -> Figure | None:
    """Live memory over the allocations and frees of forward alone and of a full step, stacked by kind."""
    lines = tables["memory.timeline"]
    if lines.empty:
        return None
    try:
        one = usual(lines).iloc[0]
    except LookupError:  # a notebook's own run, of another configuration
        one = lines.iloc[0]
    rows, peaks = (select(frame, **one[[*CONFIG]].to_dict()) for frame in (lines, tables["memory.peaks"]))
    wholes = select(peaks, phase="whole").set_index("mode")
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


@style.look()
def predicted_timeline(tables: Tables) -> Figure:
    """What the handout's largest size would hold on a GPU at the instants of a step that can be its peak, by
    formula."""
    config = predicted()
    live = [
        {"phase": one.phase} | {column(kind): size / GIB for kind, size in kinds.items()}
        for one in instants(config, "step")
        for kinds in [everything(one, config, "step")]
    ]
    live += live[-1:] * (len(live) // 12)  # the optimizer's one instant, wide enough to be seen
    rows, top = pd.DataFrame(live), peak(config).allocated / GIB
    drawn, axis = style.figure(
        f"{config.size} at context {config.context_length:,} in fp32 would need"
        f" {number(top, 'GiB')} of a GPU",
        3.6,
    )
    _live(axis, rows, top, number(top, ""))
    axis.set_xlabel("instants of a step that can be its peak")
    axis.set_ylabel("GiB, predicted")
    axis.set_ylim(0, top * 1.14)
    return drawn


def _fewer(rows: pd.DataFrame) -> pd.DataFrame:
    """At most :data:`POINTS` rows of a timeline: of each stretch the highest."""
    total = rows[[column(kind) for kind in LIVE]].sum(axis=1)
    return rows.loc[total.groupby(np.arange(len(rows)) // -(-len(rows) // POINTS)).idxmax()]


@style.look()
def memory_peak(tables: Tables) -> Figure:
    """The predicted peak of a full fp32 step by what it holds: the sizes at one context, the largest at
    longer."""
    one = usual(tables["memory.peaks"], phase="whole").iloc[0].to_dict()
    size, context = one["size"], one["context_length"]
    sizes = NAMED[: NAMED.index(size) + 1] if size in NAMED else (size,)
    shapes = [*((name, context) for name in sizes), (size, 2 * context), (size, 4 * context)]
    fields = {name: one[name] for name in CONFIG if name != "expandable_segments"}
    configs = [
        StepConfig(**fields | {"size": size, "context_length": length, "device": "cpu"})
        for size, length in shapes
    ]
    tops = [peak(config.model_copy(update={"device": "cuda"})) for config in configs]
    moving = [(top.kinds["saved for backward"] + top.kinds["temporaries"]) / top.allocated for top in tops]
    drawn, axis = style.figure(
        f"{size}: at context {context:,} {number(moving[-3], '%')} of the predicted peak grows with the"
        f" context, at {4 * context:,} {number(moving[-1], '%')}",
        3.6,
    )
    parts = pd.DataFrame(
        {kind: [top.kinds[kind] / GIB for top in tops] for kind in COLORS},
        [f"{name}, {length:,}" for name, length in shapes],
    )
    left = parts.sum(axis=1).to_numpy()
    named = {kind: color for kind, color in COLORS.items() if parts[kind].max() > 0.01 * left.max()}
    style.stacked_bars(axis, parts, named)
    plain = usual(tables["memory.peaks"], phase="whole", mode="step").iloc[0]
    recorded = select(tables["memory.peaks"], phase="whole", mode="step", **plain[list(CONFIG[2:])].to_dict())
    ran_out = {
        (row["size"], row["context_length"]) for row in recorded.to_dict("records") if row["status"] == "oom"
    }
    for row, (end, top, shape) in enumerate(zip(left, tops, shapes)):
        out = shape in ran_out
        axis.annotate(
            number(top.allocated / GIB, "") + " runs out" * out,
            (end, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
        if out:
            axis.barh(
                [row], [end], color="none", edgecolor=style.PAPER, hatch="///", linewidth=0, height=0.66
            )
    axis.set_xlim(0, left.max() * 1.3)
    axis.set_xlabel(f"predicted peak of a full step in {PRECISION_NAMES[one['precision']]}, GiB")
    axis.legend(loc="upper right")
    return drawn
