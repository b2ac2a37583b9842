"""Figures of the profiling study; None where there is nothing to draw."""
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepscope.config import PHASE_NAMES
from stepscope.report import style
from stepscope.report.tables import number
from stepscope.step.stats import launch_bound, union
from stepscope.studies.nsys.tables import Tables, at_reference, by_family, profiles, reference
from stepscope.traces.families import ATTENTION_SOFTMAX, MATMUL

COLORS = {MATMUL: style.BLUE, "fused attention": style.SKY, ATTENTION_SOFTMAX: style.PINK,
          "elementwise": style.AMBER, "optimizer": style.GREEN, "copy and cast": style.ORANGE,
          "reduction and norm": style.RED}
LANE_NS = 1_000_000  # of the timeline that is drawn


def stacked(axes: Axes, wide: pd.DataFrame, labels: Sequence[str], least: float = 0.09) -> None:
    """A bar of families a row, from the top down, each part that is wide enough with its share of the row."""
    left = pd.Series(0.0, wide.index)
    places, last = range(len(wide)), next((name for name in wide.columns[::-1] if name not in COLORS), None)
    for family in wide.columns:
        axes.barh(places, wide[family], left=left.to_numpy(), height=0.66,
                  color=COLORS.get(family, style.FILL), edgecolor=style.PAPER, linewidth=0.5,
                  label=family if family in COLORS else "other" if family == last else "_")
        for place, (begin, width) in enumerate(zip(left, wide[family])):
            if width > least:
                axes.text(begin + width / 2, place, number(width, "%"), ha="center", va="center",
                          color=style.PAPER if family in COLORS else style.INK)
        left += wide[family]
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.grid(False)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)


def families_of(operations: pd.DataFrame, where: str) -> Figure | None:
    """Of one run each phase's GPU time by family, in shares."""
    rows = operations[(operations["mode"] == "step") & operations["phase"].isin(PHASE_NAMES)]
    if rows.empty:
        return None
    wide = by_family(rows, ("phase",)).reindex([name for name in PHASE_NAMES if name in set(rows["phase"])])
    share = wide.get(MATMUL, pd.Series(0.0, wide.index)).sum() / wide.to_numpy().sum()
    drawn, axes = style.figure(f"{where}: matmuls are {number(share, '%')} of a full step's operations", 2.8)
    stacked(axes, wide.div(wide.sum(axis=1), axis=0), list(wide.index))
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


def lanes(timeline: pd.DataFrame, message: str = "") -> Figure | None:
    """A millisecond of forward: above what the host launches, below what the GPU runs."""
    rows = timeline[(timeline["mode"] == "forward") & (timeline["start_ns"] < LANE_NS)]
    if rows.empty:
        return None
    running = rows[rows["start_ns"] + rows["duration_ns"] > 0]
    drawn, axes = style.figure(message or "A millisecond of forward on the CPU and on the GPU", 2.3)
    host = rows[(rows["launch_ns"] < LANE_NS) & (rows["launch_ns"] + rows["launch_duration_ns"] > 0)]
    axes.broken_barh(list(zip(host["launch_ns"] / 1e3, host["launch_duration_ns"] / 1e3)), (1.15, 0.7),
                     color=style.MUTED)
    for family, own in running.groupby(running["family"].where(running["family"].isin([*COLORS]),
                                                               "all else")):
        axes.broken_barh(list(zip(own["start_ns"] / 1e3, own["duration_ns"] / 1e3)), (0.15, 0.7),
                         color=COLORS.get(str(family), style.FILL), label=family)
    axes.set(xlim=(0, LANE_NS / 1e3), ylim=(0, 2), xlabel="µs")
    axes.set_yticks([0.5, 1.5], ["GPU runs", "CPU launches"])
    axes.grid(False)
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


def launches_timeline(tables: Tables) -> Figure | None:
    """A millisecond of the launch-bound forward: the smallest size, in bf16 where it was profiled."""
    for precision in ("bf16", "fp32"):
        try:
            rows = profiles(tables, "timeline", precision)
        except LookupError:
            continue
        context = reference(rows) if precision == "bf16" else rows["context_length"].min()
        own = rows[(rows["context_length"] == context) & (rows["size"] == rows["size"].iloc[0])]
        return lanes(own, f"{own['size'].iloc[0]}'s {precision} forward at context {context:,}: the GPU is"
                          f" busy {number(_busy(own), '%')} of this millisecond"
                          + ", and waits for launches" * launch_bound(_busy(own)))
    return None


def _busy(timeline: pd.DataFrame) -> float:
    """The share of the drawn window in which an operation runs."""
    start = timeline["start_ns"].clip(0, LANE_NS).to_numpy()
    end = (timeline["start_ns"] + timeline["duration_ns"]).clip(0, LANE_NS).to_numpy()
    return union(start, end) / LANE_NS


def kernel_families(tables: Tables) -> Figure | None:
    """Each phase of a full step by family, in shares of the step, the smallest and the largest size at the
    reference context."""
    rows = at_reference(tables, "step")
    sizes = list(dict.fromkeys([rows["size"].iloc[0], rows["size"].iloc[-1]]))
    rows = rows[rows["size"].isin(sizes) & rows["phase"].isin(PHASE_NAMES)]
    order = [(size, phase) for size in sizes for phase in PHASE_NAMES if phase in set(rows["phase"])]
    wide = by_family(rows, ("size", "phase")).reindex(order)
    wide = wide.div(wide.sum(axis=1).groupby(level=0).sum(), axis=0, level=0)
    wide = wide.drop([(size, "loss") for size in sizes], errors="ignore")  # too little to be seen
    matmuls = [f"{number(wide.loc[size, MATMUL].sum(), '%')} of {size}'s step" for size in reversed(sizes)]
    drawn, axes = style.figure(f"Matmuls are {' and '.join(matmuls)}; AdamW has none", 1.4 + 0.34 * len(wide))
    stacked(axes, wide, [f"{size}: {'AdamW' if phase == 'optimizer' else phase}" for size,
                         phase in wide.index], least=0.07)
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn
