"""Figures of the profiling study's notebook; None where there is nothing to draw."""

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
ON_GPU = {"forward": "GPU runs", REPLAYED: "as a CUDA graph"}  # lanes by mode


def draw_shares(axes: Axes, shares: pd.DataFrame, least: float) -> None:
    """Draw a bar per row, and print the share of each part that is at least ``least`` wide."""
    style.stacked_bars(axes, shares, COLORS, lambda name, place: number(shares[name].iloc[place], "%"), least)
    style.without_axis(axes)


@style.look()
def categories_of(operations: pd.DataFrame, of: str) -> Figure | None:
    """Of one run each phase's GPU time by family, in shares."""
    rows = operations[(operations["mode"] == "step") & operations["phase"].isin(PHASE_NAMES)]
    if rows.empty:
        return None
    shares = by_category(rows).reindex([name for name in PHASE_NAMES if name in set(rows["phase"])])
    share = shares.get(MATMUL, pd.Series(0.0, shares.index)).sum() / shares.to_numpy().sum()
    drawn, axes = style.figure(f"{of}: matmuls are {number(share, '%')} of a full step's operations", 2.8)
    draw_shares(axes, shares.div(shares.sum(axis=1), axis=0), least=0.09)
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


@style.look()
def lanes(timeline: pd.DataFrame, of: str = "Forward", on_cpu: bool = False) -> Figure | None:
    """A millisecond of forward: what the host launches, what the GPU runs, and what it runs as a CUDA graph
    where that was captured."""
    modes = [mode for mode in ON_GPU if mode in set(_ran(timeline)["mode"])]
    if "forward" not in modes:
        return None
    runs = {mode: _ran(timeline[timeline["mode"] == mode]) for mode in modes}
    busy = {mode: number(busy_share(rows), "%") for mode, rows in runs.items()}
    if on_cpu:
        message = f"{of}: operators run {busy['forward']} of this millisecond"
        return draw_lanes(message, timeline, {"forward": "operators"}, "host")
    message = f"{of}: the GPU is busy {busy['forward']} of this millisecond"
    if REPLAYED in busy:
        message += f", as a CUDA graph {busy[REPLAYED]}"
    elif launch_bound(busy_share(runs["forward"]), *_who_waits_ms(runs["forward"])):
        message += ", and waits for launches"
    return draw_lanes(message, timeline, {mode: ON_GPU[mode] for mode in modes}, "CPU launches")


def draw_lanes(title: str, timeline: pd.DataFrame, names: dict[str, str], launcher: str) -> style.Picture:
    """Draw a millisecond of forward: what is launched, and below it what runs, a lane per mode.

    Args:
        names: of the lanes by mode.
        launcher: the name of the lane of launches.
    """
    drawn, axes = style.figure(title, 1.7 + 0.35 * len(names))
    launches = _spans_us(timeline[timeline["mode"] == "forward"], "launch_ns", "launch_duration_ns")
    axes.broken_barh(launches, (-0.35, 0.7), color=style.MUTED)
    for place, mode in enumerate(names, start=1):
        rows = _ran(timeline[timeline["mode"] == mode])
        for family, members in rows.groupby(
            rows["kernel_category"].where(rows["kernel_category"].isin([*COLORS]), "all else")
        ):
            spans = _spans_us(members, "start_ns", "duration_ns")
            axes.broken_barh(spans, (place - 0.35, 0.7), color=COLORS.get(family, style.FILL), label=family)
    axes.set(xlim=(0, DRAWN_NS / 1e3), ylim=(len(names) + 0.5, -0.5), xlabel="µs")
    axes.set_yticks(range(1 + len(names)), [launcher, *names.values()])
    axes.grid(False)
    once = dict(zip(*reversed(axes.get_legend_handles_labels())))
    drawn.legend(once.values(), once, loc="outside lower center", ncols=3)
    return drawn


def _ran(timeline: pd.DataFrame, start: str = "start_ns", duration: str = "duration_ns") -> pd.DataFrame:
    """The rows that are in the window that is drawn."""
    return timeline[(timeline[start] < DRAWN_NS) & (timeline[start] + timeline[duration] > 0)]


def _spans_us(rows: pd.DataFrame, start: str, duration: str) -> list[tuple[float, float]]:
    """Begin and length of what is in the window that is drawn."""
    inside = _ran(rows, start, duration)
    return list(zip(inside[start] / 1e3, inside[duration] / 1e3))


def _who_waits_ms(ran: pd.DataFrame) -> tuple[float, float]:
    """How long the host took to launch what ran, and how long that ran."""
    launched = (ran["launch_ns"] + ran["launch_duration_ns"]).max() - ran["launch_ns"].min()
    ends = (ran["start_ns"] + ran["duration_ns"]).to_numpy()
    return launched / 1e6, union(ran["start_ns"].to_numpy(), ends) / 1e6
