"""Figures of the nsys study."""
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, PercentFormatter

from stepscope.config import PHASE_NAMES
from stepscope.say.selections import reference
from stepscope.say.style import MARKERS, PALETTE, PHASE_COLORS, WIDTH_IN, use_style
from stepscope.studies.nsys.answers import clocks_beside, region_rates
from stepscope.studies.nsys.measure import by_family

FAMILY_COLORS = {"matrix multiply": "#0072B2", "fused attention": "#56B4E9", "softmax": "#CC79A7", "reduction and norm": "#E69F00",
                 "elementwise": "#F0E442", "copy and cast": "#009E73", "memory": "#8FBC8F", "embedding and indexing": "#999999",
                 "optimizer": "#D55E00", "compiler-generated": "#7F3C8D", "random": "#666666", "communication": "#333333",
                 "other": "#000000"}


def families(operations: pd.DataFrame, where: str) -> Figure | None:
    """Share of device time by family: a bar for each mode's phases and for its whole."""
    shares = by_family(operations)
    shares = shares[shares["phase"].isin([*PHASE_NAMES, "all"])]
    table = shares.pivot_table(index=["mode", "phase"], columns="family", values="share", sort=False).fillna(0)
    order = [(mode, phase) for mode in ("forward", "forward_backward", "step") for phase in (*PHASE_NAMES, "all")
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
            axis.barh(labels, table[family], left=left, color=color, label=family, edgecolor="white", linewidth=0.5)
            for y, (start, width) in enumerate(zip(left, table[family])):
                if width > 0.06:
                    axis.text(start + width / 2, y, f"{width:.0%}", ha="center", va="center", fontsize=9,
                              color="black" if family in ("elementwise", "memory", "reduction and norm", "fused attention") else "white")
            left += table[family]
    axis.set(xlim=(0, 1), xlabel="share of the time of all operations", title=f"Device time by kernel family ({where})")
    axis.xaxis.set_major_formatter(PercentFormatter(1))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    return figure


def timeline(operations: pd.DataFrame, where: str, mode: str = "step") -> Figure | None:
    """One captured step: phases by launch and by GPU, every operation by family, and where the device was idle."""
    rows = operations[operations["mode"] == mode] if "mode" in operations else operations
    if rows.empty:
        return None
    use_style()
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 3.2))
    start, length = rows["start_ns"] / 1e6, rows["duration_ns"] / 1e6
    for phase in PHASE_NAMES:
        own = rows[rows["phase"] == phase]
        if len(own):
            gpu = (own["start_ns"].min() / 1e6, (own["start_ns"] + own["duration_ns"]).max() / 1e6)
            host = (own["launch_ns"].min() / 1e6, own["launch_ns"].max() / 1e6)
            for y, (begin, end) in ((3, host), (2, gpu)):
                axis.broken_barh([(begin, end - begin)], (y + 0.1, 0.8), color=PHASE_COLORS[phase])
                if end - begin > 0.05 * (start + length).max():
                    axis.text((begin + end) / 2, y + 0.5, phase, ha="center", va="center", fontsize=9,
                              color="white" if phase in ("backward", "loss") else "black")
    used = [family for family in FAMILY_COLORS if (rows["family"] == family).any()]
    for family in used:
        own = rows["family"] == family
        boxes = [Rectangle((x, 1.1), width, 0.8) for x, width in zip(start[own], length[own])]
        axis.add_collection(PatchCollection(boxes, color=FAMILY_COLORS[family], linewidth=0))
    ordered = rows.sort_values("start_ns")
    end = (ordered["start_ns"] + ordered["duration_ns"]).cummax().shift() / 1e6
    idle = ordered["start_ns"] / 1e6 - end
    axis.add_collection(PatchCollection([Rectangle((x, 0.1), width, 0.8) for x, width in zip(end[idle > 0], idle[idle > 0])],
                                        color="black", linewidth=0))
    axis.set(ylim=(0, 4), xlim=(0, (start + length).max()), xlabel="time from the step's start (ms)", title=f"One captured step ({where})")
    axis.set_yticks([0.5, 1.5, 2.5, 3.5], ["device idle", "operations", "phases on the device", "launched by the host"])
    axis.grid(visible=False)
    figure.legend(handles=[Patch(color=FAMILY_COLORS[family], label=family) for family in used], loc="outside lower center",
                  ncols=5, fontsize=9)
    return figure


def clocks(table: pd.DataFrame, where: str) -> Figure | None:
    """Forward alone by every clock, a panel a size; ``table`` is ``answers.nsys.clocks_beside``'s."""
    if table.empty:
        return None
    rows = table[table["mode"] == "forward"]
    use_style()
    sizes = list(rows["size"].cat.remove_unused_categories().cat.categories)
    figure, axes = plt.subplots(1, len(sizes), figsize=(WIDTH_IN, 3.5), squeeze=False)
    kinds = {"unprofiled_ms": ("wall, unprofiled", "#000000"), "projected_ms": ("on the device", "#0072B2"),
             "operations_ms": ("sum of operations", "#56B4E9"), "host_ms": ("host range", "#E69F00")}
    for axis, size in zip(axes[0], sizes):
        own = rows[rows["size"] == size].sort_values("context_length")
        for offset, (column, (label, color)) in enumerate(kinds.items()):
            axis.bar([x + (offset - 1.5) * 0.2 for x in range(len(own))], own[column], 0.2, color=color, label=label)
        axis.set_xticks(range(len(own)), own["context_length"], rotation=45 if len(sizes) > 3 else 0)
        axis.set(title=size, xlabel="context")
        axis.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("forward pass (ms)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"Forward by every clock ({where})", x=0.01, ha="left", fontweight="bold")
    return figure


def families_by_size(operations: pd.DataFrame, where: str, mode: str, phases: list[str], title: str) -> Figure | None:
    """Share of device time by family over sizes and contexts, a row of panels a phase of one mode."""
    if operations.empty:
        return None
    keys = operations[["run_id", "size", "context_length"]].drop_duplicates()
    shares = by_family(operations).merge(keys, on="run_id")
    shares = shares[(shares["mode"] == mode) & shares["phase"].isin(phases)]
    if shares.empty:
        return None
    use_style()
    sizes = list(keys["size"].cat.remove_unused_categories().cat.categories)
    figure, axes = plt.subplots(len(phases), len(sizes), figsize=(WIDTH_IN, 1.3 + 1.9 * len(phases)), squeeze=False, sharey=True)
    used = [family for family in FAMILY_COLORS if shares.loc[shares["family"] == family, "share"].max() > 0.001]
    for number, (line, phase) in enumerate(zip(axes, phases)):
        for axis, size in zip(line, sizes):
            own = shares[(shares["size"] == size) & (shares["phase"] == phase)]
            table = own.pivot_table(index="context_length", columns="family", values="share").fillna(0)
            bottom = pd.Series(0.0, index=table.index)
            for family in used:
                if family in table:
                    axis.bar(range(len(table)), table[family], bottom=bottom, color=FAMILY_COLORS[family], width=0.85, edgecolor="white", linewidth=0.4)
                    bottom += table[family]
            axis.set_xticks(range(len(table)), table.index, rotation=45, fontsize=9)
            axis.set(ylim=(0, 1))
            axis.grid(axis="x", visible=False)
            if number == 0:
                axis.set_title(size)
            if number == len(phases) - 1:
                axis.set_xlabel("context")
        line[0].set_ylabel("whole step" if phase == "all" else phase)
        line[0].yaxis.set_major_formatter(PercentFormatter(1))
    figure.legend(handles=[Patch(color=FAMILY_COLORS[family], label=family) for family in used], loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(f"{title} ({where})", x=0.01, ha="left", fontweight="bold")
    return figure


ATTENTION_PARTS = ["attention.qkv", "attention.rope", "attention.scores", "attention.mask", "attention.softmax", "attention.value", "attention.output"]


def attention(operations: pd.DataFrame, regions: pd.DataFrame, where: str) -> Figure | None:
    """Attention's parts in forward alone: device time (filled) and host time (open) a pass, a panel a size at its middle context."""
    if operations.empty:
        return None
    rows = operations[(operations["mode"] == "forward") & operations["region"].isin(ATTENTION_PARTS)]
    host = regions[(regions["mode"] == "forward") & regions["region"].isin(ATTENTION_PARTS)]
    contexts = sorted(rows["context_length"].unique())
    context = max((c for c in contexts if c <= 512), default=contexts[0])
    rows, host = rows[rows["context_length"] == context], host[host["context_length"] == context]
    use_style()
    sizes = list(rows["size"].cat.remove_unused_categories().cat.categories)
    figure, axes = plt.subplots(1, len(sizes), figsize=(WIDTH_IN, 3.6), squeeze=False, sharey=True)
    for axis, size in zip(axes[0], sizes):
        device, own = rows[rows["size"] == size], host[host["size"] == size]
        on_device = device.groupby("region")["total_ns"].sum().reindex(ATTENTION_PARTS) / device["steps"].iloc[0] / 1e6
        on_host = own.groupby("region")["host_ns"].sum().reindex(ATTENTION_PARTS) / own["steps"].iloc[0] / 1e6
        y = range(len(ATTENTION_PARTS))
        axis.barh([i - 0.2 for i in y], on_device, 0.4, color="#0072B2", label="on the device (sum of operations)")
        axis.barh([i + 0.2 for i in y], on_host, 0.4, color="white", edgecolor="#D55E00", hatch="///", label="host range")
        axis.set_yticks(y, [part.removeprefix("attention.") for part in ATTENTION_PARTS])
        axis.set(title=size, xlabel="ms a pass")
        axis.grid(axis="y", visible=False)
    axes[0, 0].invert_yaxis()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"Attention by its parts, forward, context {context} ({where})", x=0.01, ha="left", fontweight="bold")
    return figure


def roofline(points: pd.DataFrame, peak_tflops: float, peak_tbs: float, where: str) -> Figure | None:
    """Achieved TFLOP/s over FLOPs per byte for each region that multiplies matrices, under the measured ceilings.

    Args:
        points: size, context_length, region, intensity (FLOP/byte), tflops.
    """
    if points.empty or not peak_tflops == peak_tflops:
        return None
    use_style()
    figure, axis = plt.subplots(figsize=(WIDTH_IN * 0.8, 4.6))
    low, high = points["intensity"].min() / 2, points["intensity"].max() * 2
    ridge = peak_tflops / peak_tbs
    axis.plot([low, ridge, high], [low * peak_tbs, peak_tflops, peak_tflops], color="black", linewidth=1.5)
    axis.text(high, peak_tflops * 1.06, f"fp32 product {peak_tflops:.3g} TFLOP/s", ha="right", fontsize=9)
    axis.text(low, low * peak_tbs * 1.35, f"copy {peak_tbs:.3g} TB/s", fontsize=9, rotation=30)
    sizes = list(points["size"].cat.remove_unused_categories().cat.categories)
    regions = list(dict.fromkeys(points["region"]))
    for r, region in enumerate(regions):
        for s, size in enumerate(sizes):
            own = points[(points["region"] == region) & (points["size"] == size)]
            axis.plot(own["intensity"], own["tflops"], MARKERS[s % len(MARKERS)], color=PALETTE[r % len(PALETTE)], markersize=5, alpha=0.9)
    axis.set(xscale="log", yscale="log", xlabel="FLOPs per byte that the region's operations have to move", ylabel="achieved TFLOP/s",
             title=f"Regions of forward under the measured ceilings ({where})")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    handles = [plt.Line2D([], [], color=PALETTE[i % len(PALETTE)], marker="o", linestyle="none", label=name) for i, name in enumerate(regions)]
    handles += [plt.Line2D([], [], color="0.4", marker=MARKERS[i % len(MARKERS)], linestyle="none", label=name) for i, name in enumerate(sizes)]
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    return figure


def clocks_of(clocks_table: pd.DataFrame, walls: pd.DataFrame, times: pd.DataFrame, where: str) -> Figure | None:
    return clocks(clocks_beside(clocks_table, walls, times), where)


def forward_families(operations: pd.DataFrame, where: str) -> Figure | None:
    return families_by_size(operations, where, "forward", ["forward"], "Forward's device time by family")


def step_families(operations: pd.DataFrame, where: str) -> Figure | None:
    return families_by_size(operations, where, "step", ["forward", "backward", "all"], "A full step's device time by family")


def roofline_of(operations: pd.DataFrame, ceilings: pd.DataFrame, where: str) -> Figure | None:
    values = ceilings.groupby("ceiling")["value"].median()
    rates = region_rates(operations)
    return roofline(rates[rates["tflops"] > 0], values["matmul_fp32"], values["copy"], where)


def timeline_of(operations: pd.DataFrame, where: str) -> Figure | None:
    size, context = reference(operations)
    own = operations[(operations["size"] == size) & (operations["context_length"] == context)]
    return timeline(own, f"{size}, context {context}, {where}")
