"""Figures of the mixed-precision study, each one call over a tidy table; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from stepscope.figures import MARKERS, PALETTE, WIDTH_IN, use_style
from stepscope.timing import WHOLE

PRECISION_COLORS = dict(zip(["fp32", "tf32", "bf16", "fp16"], ["#000000", "#E69F00", "#0072B2", "#009E73"]))


def run_speedups(speedups: pd.DataFrame, title: str) -> Figure:
    """One run's speed-ups of the full step's phases, with their intervals."""
    use_style()
    rows = speedups[speedups["mode"] == "step"]
    figure, axis = plt.subplots(figsize=(WIDTH_IN * 0.7, 3.2))
    phases = list(dict.fromkeys(rows["phase"]))
    precisions = list(dict.fromkeys(rows["precision"]))
    for i, precision in enumerate(precisions):
        own = rows[rows["precision"] == precision].set_index("phase").reindex(phases)
        at = np.arange(len(phases)) + (i - (len(precisions) - 1) / 2) * 0.25
        axis.bar(at, own["speedup"], 0.24, color=PRECISION_COLORS[precision], label=precision,
                 yerr=[own["speedup"] - own["speedup_low"], own["speedup_high"] - own["speedup"]])
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xticks(range(len(phases)), ["whole step" if p == WHOLE else p for p in phases])
    axis.set(ylabel="times as fast as fp32", title=f"Full step by phase: {title}")
    axis.grid(axis="x", visible=False)
    axis.legend(ncols=3)
    return figure


def speedup_by_size(speedups: pd.DataFrame, where: str) -> Figure | None:
    """Speed-up over fp32 by model size: a panel a mode, a line a precision, a marker a context."""
    if speedups.empty:
        return None
    use_style()
    rows = speedups[speedups["phase"] == WHOLE]
    modes = {"forward": "Forward", "forward_backward": "Forward + backward", "step": "Full step"}
    contexts = sorted(rows["context_length"].unique())
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH_IN, 3.9), sharey=True)
    for axis, (mode, words) in zip(axes, modes.items()):
        own = rows[rows["mode"] == mode]
        sizes = list(own["size"].cat.remove_unused_categories().cat.categories)
        for precision, color in PRECISION_COLORS.items():
            lines = own[own["precision"] == precision]
            for i, context in enumerate(contexts):
                line = lines[lines["context_length"] == context].set_index("size").reindex(sizes)
                axis.plot(range(len(sizes)), line["speedup"], marker=MARKERS[i], color=color, markersize=5, linewidth=1.2,
                          alpha=0.45 + 0.55 * i / max(1, len(contexts) - 1))
        axis.axhline(1, color="0.3", linewidth=1, linestyle="--")
        axis.set_xticks(range(len(sizes)), sizes)
        axis.set(title=words, yscale="log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if str(value)[0] in "235" else ""))
    axes[0].set_ylabel("times as fast as fp32")
    handles = [Line2D([], [], color=PRECISION_COLORS[p], label=p) for p in PRECISION_COLORS if p in set(rows["precision"])]
    handles += [Line2D([], [], color="0.4", marker=MARKERS[i], linewidth=0, label=f"context {c}") for i, c in enumerate(contexts)]
    figure.legend(handles=handles, loc="outside lower center", ncols=7)
    figure.suptitle(f"Speed-up by model size ({where})", x=0.01, ha="left", fontweight="bold")
    return figure


def memory(cells: pd.DataFrame, where: str) -> Figure | None:
    """Peak of allocated memory against fp32's, by size, at each context: a panel a mode."""
    if cells.empty or cells["peak_allocated_mib"].isna().all():
        return None
    use_style()
    base = cells[cells["precision"] == "fp32"].set_index(["run_id", "mode"])["peak_allocated_mib"]
    rows = cells[cells["precision"].isin(["bf16", "fp16"]) & (cells["status"] == "ok")]
    rows = rows.assign(ratio=rows["peak_allocated_mib"] / base.reindex(pd.MultiIndex.from_frame(rows[["run_id", "mode"]])).to_numpy())
    rows = rows[rows["precision"] == "bf16"]
    modes = {"forward": "Forward", "forward_backward": "Forward + backward", "step": "Full step"}
    contexts = sorted(rows["context_length"].unique())
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH_IN, 3.4), sharey=True)
    for axis, (mode, words) in zip(axes, modes.items()):
        own = rows[rows["mode"] == mode]
        sizes = list(own["size"].cat.remove_unused_categories().cat.categories)
        for i, context in enumerate(contexts):
            line = own[own["context_length"] == context].set_index("size").reindex(sizes)
            axis.plot(range(len(sizes)), line["ratio"], marker=MARKERS[i], color=PALETTE[i], label=f"context {context}")
        axis.axhline(1, color="0.3", linewidth=1, linestyle="--")
        axis.set_xticks(range(len(sizes)), sizes)
        axis.set(title=words)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    axes[0].set_ylabel("peak memory, of fp32's")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"Peak memory in bf16 autocast ({where})", x=0.01, ha="left", fontweight="bold")
    return figure


def running(table: pd.DataFrame, device: str) -> Figure | None:
    """The running error of a sum of 0.01s over 1,000 additions, by way of summing."""
    if table.empty:
        return None
    use_style()
    rows = table[table["device"] == device]
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 3.8))
    dashes = {"Kahan": ":", "pairwise": "-.", "into fp32": "--"}
    colors = {"fp32": "#000000", "fp16": "#009E73", "bf16": "#0072B2"}
    for way, own in rows.groupby("way", sort=False):
        if way == "fp16 cast to fp32, into fp32":  # the same numbers as without the cast
            continue
        style = next((dash for word, dash in dashes.items() if word in way and way != "fp32 into fp32"), "-")
        axis.plot(own["additions"], own["error"].abs().clip(lower=1e-9), style, color=colors[way[:4]], label=way, linewidth=1.6)
    axis.set(yscale="log", ylim=(1e-8, 20), xlabel="additions of 0.01", ylabel="error of the sum so far",
             title=f"What is wrong with the sum ({device.upper() if device == 'cpu' else 'GPU'}; errors under 1e-8 are below the edge)")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def norms(table: pd.DataFrame, device: str) -> Figure | None:
    """Relative error of each quantity inside RMSNorm and LayerNorm over the inputs' scale; crosses where it is no number."""
    if table.empty:
        return None
    use_style()
    rows = table[(table["device"] == device) & (table["quantity"] != "input")]
    colors = {"fp32": "#000000", "fp16": "#009E73", "bf16": "#0072B2"}
    wanted = ["squares", "mean square", "reciprocal root", "output"]
    figure, axes = plt.subplots(1, 4, figsize=(WIDTH_IN, 3.5), sharey=True)
    for axis, quantity in zip(axes, wanted):
        for i, (dtype, color) in enumerate(colors.items()):
            own = rows[(rows["norm"] == "RMSNorm") & (rows["dtype"] == dtype) & (rows["quantity"] == quantity)]
            axis.plot(own["scale"], own["relative_error"].clip(lower=1e-9), marker=MARKERS[i], color=color, label=dtype, markersize=4)
            broken = own[own["nonfinite"] > 0]
            axis.plot(broken["scale"], [3] * len(broken), "x", color=color, markersize=7, markeredgewidth=2)
        axis.set(xscale="log", yscale="log", title=quantity, ylim=(1e-9, 10), xlabel="scale of the inputs")
    axes[0].set_ylabel("median relative error")
    handles, labels = axes[0].get_legend_handles_labels()
    handles.append(Line2D([], [], color="0.4", marker="x", linewidth=0, markeredgewidth=2))
    figure.legend(handles, [*labels, "some are inf or NaN"], loc="outside lower center", ncols=4)
    figure.suptitle("Inside RMSNorm, each step in one type, against float64", x=0.01, ha="left", fontweight="bold")
    return figure
