"""Draw the profiling study's figures, which show kernel categories by phase and a timeline of launches."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepscope.config import PHASE_NAMES
from stepscope.report import style
from stepscope.report.tables import number
from stepscope.stats import launch_bound, union
from stepscope.studies.nsys.tables import DRAWN_NS, REPLAYED, busy_share, by_category
from stepscope.traces.kernel_categories import ATTENTION_SOFTMAX, MATMUL

COLORS = {
    MATMUL: style.BLUE,
    "fused attention": style.SKY,
    ATTENTION_SOFTMAX: style.PINK,
    "elementwise": style.AMBER,
    "optimizer": style.GREEN,
    "copy and cast": style.ORANGE,
    "reduction and norm": style.RED,
}
ON_GPU = {"forward": "GPU runs", REPLAYED: "as a CUDA graph"}  # names of lanes, by mode


def draw_shares(axes: Axes, shares: pd.DataFrame, least: float) -> None:
    """Draw one stacked bar per row; label each segment whose share is greater than ``least``."""

    def label(name: str, row: int) -> str:
        return number(shares[name].iloc[row], "%")

    style.stacked_bars(axes, shares, COLORS, label, least)
    style.without_axis(axes)


@style.look()
def categories_of(operations: pd.DataFrame, label: str) -> Figure | None:
    """Draw each kernel category's share of the operations' time, by phase; return None if there is no full step.

    Args:
        operations: the table of one run.
        label: the run's name in the title.
    """
    is_drawn = (operations["mode"] == "step") & operations["phase"].isin(PHASE_NAMES)
    rows = operations[is_drawn]
    if rows.empty:
        return None
    phases = [name for name in PHASE_NAMES if (rows["phase"] == name).any()]
    times_ms = by_category(rows).reindex(phases)
    total_ms = times_ms.to_numpy().sum()
    matmul_ms = times_ms[MATMUL].sum() if MATMUL in times_ms else 0.0
    share = number(matmul_ms / total_ms, "%")
    drawn, axes = style.figure(f"{label}: matmuls are {share} of a full step's operations", 2.8)
    shares = times_ms.div(times_ms.sum(axis=1), axis=0)
    draw_shares(axes, shares, least=0.09)
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


@style.look()
def lanes(
    timeline: pd.DataFrame,
    label: str = "Forward",
    on_cpu: bool = False,
) -> Figure | None:
    """Draw one millisecond of the forward pass in lanes: CPU launches, GPU kernels, and kernels of a CUDA graph.

    Args:
        timeline: the table of one run; the result is None if the table doesn't contain forward.
        label: the run's name in the title.
        on_cpu: whether the operations are operators that run on a CPU.
    """
    runs = {}
    for mode in ON_GPU:
        rows = _in_window(timeline[timeline["mode"] == mode])
        if len(rows):
            runs[mode] = rows
    if "forward" not in runs:
        return None
    busy = {mode: number(busy_share(rows), "%") for mode, rows in runs.items()}
    if on_cpu:
        message = f"{label}: operators run for {busy['forward']} of this millisecond"
        return draw_lanes(message, timeline, {"forward": "operators"}, "host")
    message = f"{label}: the GPU is busy for {busy['forward']} of this millisecond"
    if REPLAYED in runs:
        message += f", and {busy[REPLAYED]} as a CUDA graph"
    elif _is_launch_bound(runs["forward"]):
        message += ", and waits for launches"
    names = {mode: ON_GPU[mode] for mode in runs}
    return draw_lanes(message, timeline, names, "CPU launches")


def draw_lanes(
    title: str,
    timeline: pd.DataFrame,
    names: dict[str, str],
    launcher: str,
) -> style.Picture:
    """Draw one millisecond of the forward pass: a lane of launches and, below it, one lane of operations per mode.

    Args:
        names: the label of each lane of operations, by mode.
        launcher: the label of the lane of launches.
    """
    height = 1.7 + 0.35 * len(names)
    drawn, axes = style.figure(title, height)
    forward = timeline[timeline["mode"] == "forward"]
    launches = _spans_us(forward, "launch_ns", "launch_duration_ns")
    axes.broken_barh(launches, (-0.35, 0.7), color=style.MUTED)
    for place, mode in enumerate(names, start=1):
        rows = _in_window(timeline[timeline["mode"] == mode])
        categories = rows["kernel_category"]
        shown = categories.where(categories.isin([*COLORS]), "all else")
        for category, members in rows.groupby(shown):
            spans = _spans_us(members, "start_ns", "duration_ns")
            color = COLORS.get(category, style.FILL)
            axes.broken_barh(spans, (place - 0.35, 0.7), color=color, label=category)
    axes.set(
        xlim=(0, DRAWN_NS / 1e3),
        ylim=(len(names) + 0.5, -0.5),
        xlabel="µs",
    )
    labels = [launcher, *names.values()]
    axes.set_yticks(range(len(labels)), labels)
    axes.grid(False)
    handles, categories = axes.get_legend_handles_labels()
    handle_of = dict(zip(categories, handles))  # one handle per category
    drawn.legend(handle_of.values(), handle_of, loc="outside lower center", ncols=3)
    return drawn


def _in_window(
    timeline: pd.DataFrame,
    start: str = "start_ns",
    duration: str = "duration_ns",
) -> pd.DataFrame:
    """Return the rows that overlap the first millisecond, which is the part that is drawn."""
    starts = timeline[start]
    ends = starts + timeline[duration]
    return timeline[(starts < DRAWN_NS) & (ends > 0)]


def _spans_us(rows: pd.DataFrame, start: str, duration: str) -> list[tuple[float, float]]:
    """Return the start and duration in µs of each drawn row."""
    drawn = _in_window(rows, start, duration)
    starts_us = drawn[start] / 1e3
    durations_us = drawn[duration] / 1e3
    return list(zip(starts_us, durations_us))


def _is_launch_bound(operations: pd.DataFrame) -> bool:
    """Return whether the CPU takes longer to launch operations than the GPU takes to run them."""
    launch_ends = operations["launch_ns"] + operations["launch_duration_ns"]
    launch_ns = launch_ends.max() - operations["launch_ns"].min()
    starts = operations["start_ns"].to_numpy()
    ends = starts + operations["duration_ns"].to_numpy()
    gpu_ns = union(starts, ends)
    return launch_bound(busy_share(operations), launch_ns / 1e6, gpu_ns / 1e6)
