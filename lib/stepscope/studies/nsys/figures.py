"""Figures of the profiling study; None where there is nothing to draw."""
from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import PercentFormatter

from stepscope.config import PHASE_NAMES, PHASES
from stepscope.say.formats import MODE_WORDS, capital, percent
from stepscope.say.selections import pick, reference
from stepscope.say.style import PHASE_COLORS, WIDTH_IN, hatched_area, ink_on, use_style
from stepscope.studies.nsys.facts import AGREE, clocks_beside
from stepscope.studies.nsys.measure import by_family
from stepscope.traces.families import ATTENTION_SOFTMAX, LOSS_SOFTMAX, MATMUL, shown_family

FAMILY_COLORS = {
    "matrix multiply": "#0072B2", "fused attention": "#56B4E9", ATTENTION_SOFTMAX: "#CC79A7",
    LOSS_SOFTMAX: "#F4C2D7", "softmax": "#AA5588",
    "reduction and norm": "#D55E00", "elementwise": "#F0E442", "copy and cast": "#009E73",
    "memory": "#8FBC8F", "embedding and indexing": "#999999", "optimizer": "#E69F00",
    "compiler-generated": "#7F3C8D", "random": "#666666", "communication": "#333333",
    "convolution": "#1B4F72", "pooling": "#A0522D", "quantization": "#C5B0D5", "other": "#000000"}


def sizes_of(table: pd.DataFrame) -> list[str]:
    """The sizes of a table that is ordered by size."""
    return list(table["size"].cat.remove_unused_categories().cat.categories)


def patches(families: Sequence[str], hatched: bool = False) -> list[Patch]:
    """What a legend shows for families; ``hatched`` where the picture is."""
    if hatched:
        return [Patch(**hatched_area(FAMILY_COLORS[family], place), label=family)
                for place, family in enumerate(families)]
    return [Patch(color=FAMILY_COLORS[family], label=family) for family in families]


def title(figure: Figure, words: str) -> None:
    figure.suptitle(words, x=0.01, ha="left", fontweight="bold")


def families(operations: pd.DataFrame, where: str) -> Figure | None:
    """Share of device time by family, of one run: a bar for each mode's phases and for its whole."""
    shares = by_family(operations)
    shares = shares[shares["phase"].isin([*PHASE_NAMES, "all"])]
    table = shares.pivot_table(index=["mode", "phase"], columns="family", values="share", sort=False)
    table = table.fillna(0)
    order = [(mode, phase) for mode in PHASES for phase in (*PHASE_NAMES, "all")
             if (mode, phase) in table.index and phase != "loss" and (mode, phase) != ("forward", "all")]
    if not order:
        return None
    use_style()
    table = table.reindex(order)
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 0.8 + 0.36 * len(table)))
    left = pd.Series(0.0, index=table.index)
    labels = [f"{mode.replace('_', ' + ')}: {phase}" for mode, phase in table.index]
    for family, color in FAMILY_COLORS.items():
        if family in table:
            axis.barh(labels, table[family], left=left, color=color, label=family, edgecolor="white",
                      linewidth=0.5)
            for y, (start, width) in enumerate(zip(left, table[family], strict=True)):
                if width > 0.06:
                    axis.text(start + width / 2, y, f"{width:.0%}", ha="center", va="center", fontsize=11,
                              color=ink_on(color))
            left += table[family]
    whole, most = table.iloc[-1], table.iloc[-1].idxmax()
    title = f"{capital(MODE_WORDS[order[-1][0]])}: {percent(whole[most])} of the device time is {most}"
    axis.set(xlim=(0, 1), xlabel="share of the time of all operations", title=f"{title}\n({where})")
    axis.xaxis.set_major_formatter(PercentFormatter(1))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=11)
    return figure


def timeline(operations: pd.DataFrame, where: str) -> Figure | None:
    """One captured step: phases by launch and by GPU, every operation by family, and where the device was
    idle. Of a table of several runs, the reference's step."""
    rows = pick(operations, mode="step")
    if rows.empty:
        return None
    if "size" in rows:
        size, context = reference(operations)
        rows, where = pick(rows, size=size, context_length=context), f"{size}, context {context}, {where}"
    rows = rows.assign(family=shown_family(rows))
    use_style()
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 4.2))
    start, length = rows["start_ns"] / 1e6, rows["duration_ns"] / 1e6
    _phase_bars(axis, rows, (start + length).max())
    used = [family for family in FAMILY_COLORS if (rows["family"] == family).any()]
    for family in used:
        group = rows["family"] == family
        boxes = [
            Rectangle((x, 1.1), width, 0.8) for x, width in zip(start[group], length[group], strict=True)
        ]
        axis.add_collection(PatchCollection(boxes, color=FAMILY_COLORS[family], linewidth=0))
    ordered = rows.sort_values("start_ns")
    end = (ordered["start_ns"] + ordered["duration_ns"]).cummax().shift() / 1e6
    idle = ordered["start_ns"] / 1e6 - end
    gaps = [Rectangle((x, 0.1), width, 0.8) for x, width in zip(end[idle > 0], idle[idle > 0], strict=True)]
    axis.add_collection(PatchCollection(gaps, color="black", linewidth=0))
    axis.set(ylim=(0, 4), xlim=(0, (start + length).max()), xlabel="time from the step's start (ms)")
    title(figure, f"The device is idle for {percent(idle[idle > 0].sum() / (start + length).max())}"
                  f" of this captured step; a capture adds gaps\n({where})")
    axis.set_yticks([0.5, 1.5, 2.5, 3.5],
                    ["device idle", "operations", "phases on\nthe device", "launched by\nthe host"])
    axis.grid(visible=False)
    figure.legend(handles=patches(used), loc="outside lower center", ncols=4)
    return figure


def _phase_bars(axis: Axes, rows: pd.DataFrame, last_ms: float) -> None:
    """Each phase twice: from its first launch to its last, and from its first operation to its last."""
    for phase in PHASE_NAMES:
        group = rows[rows["phase"] == phase]
        if group.empty:
            continue
        gpu = (group["start_ns"].min() / 1e6, (group["start_ns"] + group["duration_ns"]).max() / 1e6)
        host = (group["launch_ns"].min() / 1e6, group["launch_ns"].max() / 1e6)
        for y, (begin, end) in ((3, host), (2, gpu)):
            axis.broken_barh([(begin, end - begin)], (y + 0.1, 0.8), color=PHASE_COLORS[phase])
            if end - begin > 0.05 * last_ms:
                axis.text((begin + end) / 2, y + 0.5, "AdamW" if phase == "optimizer" else phase, ha="center",
                          va="center", fontsize=12, color=ink_on(PHASE_COLORS[phase]))


def clocks(clocks: pd.DataFrame, walls: pd.DataFrame, where: str) -> Figure | None:
    """Forward alone by every clock, as multiples of the plain pass's wall time; a line a profile."""
    rows = pick(clocks_beside(clocks, walls), mode="forward")
    rows = rows[rows["unprofiled_ms"].notna()] if len(rows) else rows
    if rows.empty:
        return None
    use_style()
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 1.9 + 0.3 * len(rows)))
    kinds = {"host_ms": ("host's range", "D", "#E69F00"),
             "operations_ms": ("sum of operations", "s", "#56B4E9"),
             "projected_ms": ("first to last operation", "o", "#0072B2")}
    for column, (label, marker, color) in kinds.items():
        axis.plot(rows[column] / rows["unprofiled_ms"], range(len(rows)), marker, color=color, label=label,
                  markersize=8)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(rows)), [f"{row.size_}, {row.context_length}" for row in
                                       rows.rename(columns={"size": "size_"}).itertuples()])
    axis.tick_params(labelsize=13)
    axis.set_xlabel("times the same pass's wall time without a profiler", fontsize=14)
    axis.set_xlim(left=0)
    axis.invert_yaxis()
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=14)
    close = ((rows["projected_ms"] / rows["unprofiled_ms"] - 1).abs() < AGREE).sum()
    title(figure, f"In {close} of {len(rows)} forward passes the GPU's time under nsys\n"
                  f"is within {percent(AGREE)} of the plain one ({where})")
    return figure


def families_by_size(operations: pd.DataFrame, where: str, mode: str, phases: Sequence[str],
                     words: str) -> Figure | None:
    """Share of device time by family over sizes and contexts, a row of panels a phase of one mode."""
    keys = operations[["run_id", "size", "context_length"]].drop_duplicates()
    shares = by_family(operations).merge(keys, on="run_id")
    shares = shares[(shares["mode"] == mode) & shares["phase"].isin(phases)]
    if shares.empty:
        return None
    use_style()
    sizes = sizes_of(keys)
    figure, axes = plt.subplots(len(phases), len(sizes), figsize=(WIDTH_IN, 2.2 + 2.6 * len(phases)),
                                squeeze=False, sharey=True)
    largest = shares.groupby("family")["share"].max()
    used = [family for family in FAMILY_COLORS if largest.get(family, 0) > 0.001]
    for line, phase in zip(axes, phases, strict=True):
        for axis, size in zip(line, sizes, strict=True):
            _stacked(axis, pick(shares, size=size, phase=phase), used)
        line[0].set_ylabel("whole step" if phase == "all" else phase)
        line[0].yaxis.set_major_formatter(PercentFormatter(1))
    for size, top, bottom in zip(sizes, axes[0], axes[-1], strict=True):
        top.set_title(size)
        bottom.set_xlabel("context")
    figure.legend(handles=patches(used, hatched=True), loc="outside lower center", ncols=3)
    products = shares.loc[shares["family"] == MATMUL, "share"]
    low, high = percent(products.min()), percent(products.max())
    title(figure, f"Matrix products are {low if low == high else f'{low} to {high}'} of {words}\n({where})")
    return figure


def _stacked(axis: Axes, shares: pd.DataFrame, families: Sequence[str]) -> None:
    """A bar a context, stacked of families."""
    table = shares.pivot_table(index="context_length", columns="family", values="share").fillna(0)
    bottom = pd.Series(0.0, index=table.index)
    for place, family in enumerate(families):
        if family in table:
            axis.bar(range(len(table)), table[family], bottom=bottom, width=0.85,
                     **hatched_area(FAMILY_COLORS[family], place))
            bottom += table[family]
    for place, share in enumerate(table.get(MATMUL, ())):
        axis.text(place, share / 2, f"{100 * share:.0f}", ha="center", va="center",
                  color=ink_on(FAMILY_COLORS[MATMUL]))
    axis.set_xticks(range(len(table)), table.index, rotation=90)
    axis.set(ylim=(0, 1))
    axis.grid(axis="x", visible=False)
