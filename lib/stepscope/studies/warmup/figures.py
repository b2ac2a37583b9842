"""Figures of the warm-up study; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from stepscope.runs.tables import by_size
from stepscope.say.selections import pick
from stepscope.say.style import MARKERS, PALETTE, WIDTH_IN, use_style
from stepscope.studies.warmup.facts import whole_steps


def warmup_steps(samples: pd.DataFrame, where: str) -> Figure | None:
    """Every step of each warm-up run from cold, a panel a size; filled points enter the mean, the bar at the
    right is it.
    """
    steps = whole_steps(samples)
    if steps.empty:
        return None
    use_style()
    sizes = list(steps["size"].cat.remove_unused_categories().cat.categories)
    figure, axes = plt.subplots(1, len(sizes), figsize=(WIDTH_IN, 3.6), squeeze=False)
    for axis, size in zip(axes[0], sizes):
        for index, (warmups, rows) in enumerate(pick(steps, size=size).groupby("warmup_steps")):
            color, marker = PALETTE[index], MARKERS[index]
            axis.plot(rows["step"] + 1, rows["time_ms"], color=color, linewidth=0.8, alpha=0.6)
            timed = rows[rows["timed"]]
            axis.plot(rows["step"] + 1, rows["time_ms"], marker, color=color, markerfacecolor="white",
                      markersize=5)
            axis.plot(timed["step"] + 1, timed["time_ms"], marker, color=color, markersize=5,
                      label=f"{warmups} warm-ups")
            axis.plot(17 + index * 1.5, timed["time_ms"].mean(), "_", color=color, markersize=12,
                      markeredgewidth=3)
        axis.set(title=size, xlabel="step", xticks=[1, 5, 10, 15, 19],
                 xticklabels=["1", "5", "10", "15", "mean"], yscale="log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.tick_params(which="both", axis="y", labelsize=9)
    axes[0, 0].set_ylabel("time of a full step (ms)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"From cold: filled samples enter the mean ({where})", x=0.01, ha="left",
                    fontweight="bold")
    return figure


def warmup_costs(costs: pd.DataFrame, where: str) -> Figure | None:
    """What a fresh process pays, a stacked bar a size: before the first step and in it."""
    if costs.empty:
        return None
    costs = by_size(costs[~costs["profile"].astype(bool)])
    cold = costs[~costs["one_layer_first"].astype(bool)]
    table = cold.pivot_table(index="size", columns="part", values="time_ms", observed=True, sort=False,
                             aggfunc="median")
    beyond = costs[costs["part"] == "first step beyond steady"]
    if not set(cold["run_id"]) & set(beyond["run_id"]):
        return None
    primed = beyond[beyond["one_layer_first"].astype(bool)].groupby("size", observed=True)["time_ms"].median()
    before = list(cold.loc[cold["when"] == "before", "part"].unique())
    undone = [part for part in ("allocator", "optimizer state") if part in table]
    within = table[undone].copy()
    if len(primed):
        within["loading at first use"] = table["first step beyond steady"] - primed
    within["the rest"] = table["first step beyond steady"] - within.sum(axis=1)
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH_IN, 3.8), sharey=True)
    for axis, parts, title in ((axes[0], table[before], "Before the first step"),
                               (axes[1], within, "In the first step, beyond a steady one")):
        left = np.zeros(len(parts))
        for index, part in enumerate(parts):
            widths = parts[part].clip(lower=0).to_numpy()
            color = "0.75" if part == "the rest" else PALETTE[index]
            axis.barh(parts.index.astype(str), widths, left=left, color=color, label=part, edgecolor="white")
            left += widths
        axis.set(xlabel="time (ms)", title=title)
        axis.grid(axis="y", visible=False)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=9)
    axes[0].invert_yaxis()
    figure.suptitle(f"What starting costs ({where})", x=0.01, ha="left", fontweight="bold")
    return figure
