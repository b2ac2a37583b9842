"""Figures of the profiling study; None where there is nothing to draw."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepscope.config import PHASE_NAMES
from stepscope.report import style
from stepscope.report.tables import number
from stepscope.stats import launch_bound, union
from stepscope.studies.nsys.tables import REPLAYED, by_family
from stepscope.traces.families import ATTENTION_SOFTMAX, MATMUL

COLORS = {
    MATMUL: style.BLUE,
    "fused attention": style.SKY,
    ATTENTION_SOFTMAX: style.PINK,
    "elementwise": style.AMBER,
    "optimizer": style.GREEN,
    "copy and cast": style.ORANGE,
    "reduction and norm": style.RED,
}
LANE_NS = 1_000_000  # of the timeline that is drawn


def _families(axes: Axes, shares: pd.DataFrame, least: float = 0.09) -> None:
    """A bar a row, each part that is wide enough with its share."""
    style.stacked_bars(axes, shares, COLORS, lambda name, place: number(shares[name].iloc[place], "%"), least)
    style.without_axis(axes)


@style.look()
def families_of(operations: pd.DataFrame, of: str) -> Figure | None:
    """Of one run each phase's GPU time by family, in shares."""
    rows = operations[(operations["mode"] == "step") & operations["phase"].isin(PHASE_NAMES)]
    if rows.empty:
        return None
    shares = by_family(rows, ("phase",)).reindex([name for name in PHASE_NAMES if name in set(rows["phase"])])
    share = shares.get(MATMUL, pd.Series(0.0, shares.index)).sum() / shares.to_numpy().sum()
    drawn, axes = style.figure(f"{of}: matmuls are {number(share, '%')} of a full step's operations", 2.8)
    _families(axes, shares.div(shares.sum(axis=1), axis=0))
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


@style.look()
def lanes(timeline: pd.DataFrame, of: str = "Forward", on_cpu: bool = False) -> Figure | None:
    """A millisecond of forward: what the host launches, what the GPU runs, and what it runs as a CUDA graph
    where that was captured."""
    ran = _ran(timeline)
    names = {"forward": "operators" if on_cpu else "GPU runs", REPLAYED: "as a CUDA graph"}
    found = {mode: ran[ran["mode"] == mode] for mode in names if mode in set(ran["mode"])}
    if "forward" not in found:
        return None
    busy = {mode: _busy(rows) for mode, rows in found.items()}
    message = f"{of}: the GPU is busy {number(busy['forward'], '%')} of this millisecond"
    if on_cpu:
        message = f"{of}: operators run {number(busy['forward'], '%')} of this millisecond"
    if REPLAYED in busy:
        message += f", as a CUDA graph {number(busy[REPLAYED], '%')}"
    elif not on_cpu and launch_bound(busy["forward"], *_who_waits_ms(found["forward"])):
        message += ", and waits for launches"
    drawn, axes = style.figure(message, 1.7 + 0.35 * len(found))
    host = timeline[
        (timeline["mode"] == "forward")
        & (timeline["launch_ns"] < LANE_NS)
        & (timeline["launch_ns"] + timeline["launch_duration_ns"] > 0)
    ]
    spans = _spans_us(host["launch_ns"], host["launch_duration_ns"])
    axes.broken_barh(spans, (-0.35, 0.7), color=style.MUTED)
    for place, rows in enumerate(found.values(), start=1):
        for family, own in rows.groupby(rows["family"].where(rows["family"].isin([*COLORS]), "all else")):
            spans = _spans_us(own["start_ns"], own["duration_ns"])
            axes.broken_barh(spans, (place - 0.35, 0.7), color=COLORS.get(family, style.FILL), label=family)
    axes.set(xlim=(0, LANE_NS / 1e3), ylim=(len(found) + 0.5, -0.5), xlabel="µs")
    launcher = "host" if on_cpu else "CPU launches"
    axes.set_yticks(range(1 + len(found)), [launcher, *(names[mode] for mode in found)])
    axes.grid(False)
    once = dict(zip(*reversed(axes.get_legend_handles_labels())))
    drawn.legend(once.values(), once, loc="outside lower center", ncols=3)
    return drawn


def _ran(timeline: pd.DataFrame) -> pd.DataFrame:
    """What runs in the window that is drawn."""
    return timeline[(timeline["start_ns"] < LANE_NS) & (timeline["start_ns"] + timeline["duration_ns"] > 0)]


def _spans_us(start_ns: pd.Series, duration_ns: pd.Series) -> list[tuple[float, float]]:
    return list(zip(start_ns / 1e3, duration_ns / 1e3))


def _who_waits_ms(ran: pd.DataFrame) -> tuple[float, float]:
    """How long the host took to launch what ran, and how long that ran."""
    launched = (ran["launch_ns"] + ran["launch_duration_ns"]).max() - ran["launch_ns"].min()
    ends = (ran["start_ns"] + ran["duration_ns"]).to_numpy()
    return launched / 1e6, union(ran["start_ns"].to_numpy(), ends) / 1e6


def _busy(ran: pd.DataFrame) -> float:
    """The share of the drawn window in which an operation runs."""
    ends = ran["start_ns"] + ran["duration_ns"]
    return union(ran["start_ns"].clip(0, LANE_NS).to_numpy(), ends.clip(0, LANE_NS).to_numpy()) / LANE_NS
