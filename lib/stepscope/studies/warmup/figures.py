"""Figures of the warm-up study; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from stepscope.runs.tables import by_size
from stepscope.say.formats import MODE_WORDS, span
from stepscope.say.selections import pick
from stepscope.say.style import MARKERS, PALETTE, REST, WIDTH_IN, hatched_area, use_style
from stepscope.studies.warmup.facts import RUN, SETTLED, whole_steps

SHOWN = 8  # steps
ONCE = "gone after a one-layer model"  # what the process pays once, with any model
# A colour a part in both panels; the optimizer's state as in the pictures of memory.
COST_COLORS = {"import torch": "#0072B2", "import torch._dynamo": "#56B4E9", "CUDA context": "#009E73",
               "first allocation": "#F0E442", "cuBLAS handle": "#000000", "model and optimizer": "#D55E00",
               "allocator": "#8FBC8F", "optimizer state": "#E69F00", ONCE: "#CC79A7", "the rest": REST}


def warmup_steps(samples: pd.DataFrame, benchmarks: pd.DataFrame, where: str) -> Figure | None:
    """The first steps of each process over its steady time, a panel a mode, a line a process, a colour a
    context."""
    steps = whole_steps(samples, benchmarks)
    if steps.empty:
        return None
    use_style()
    steps = steps[steps["step"] < SHOWN]
    contexts = sorted(steps["context_length"].unique())
    modes = [mode for mode in MODE_WORDS if (steps["mode"] == mode).any()]
    figure, axes = plt.subplots(1, len(modes), figsize=(WIDTH_IN, 4.2), squeeze=False, sharey=True)
    for axis, mode in zip(axes[0], modes, strict=True):
        for (context, *_), rows in pick(steps, mode=mode).groupby(["context_length", *RUN]):
            index = contexts.index(context)
            axis.plot(rows["step"] + 1, 1 + rows["beyond"], marker=MARKERS[index % len(MARKERS)],
                      markersize=3.5, color=PALETTE[index % len(PALETTE)], linewidth=0.8,
                      label=f"context {context}")
        axis.axhline(1 + SETTLED, color="0.6", linewidth=1, linestyle="--")
        axis.set(title=MODE_WORDS[mode].capitalize(), xlabel="step", xticks=range(1, SHOWN + 1),
                 yscale="log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    axes[0, 0].set_ylabel("time over steady")
    handles = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(contexts))
    second = steps[steps["step"] == 1]
    figure.suptitle(f"{(second['beyond'] < SETTLED).sum()} of {len(second)} processes are within"
                    f" {SETTLED:.0%} of their steady time in step 2\n(dashed: {SETTLED:.0%} slow; {where})",
                    x=0.01, ha="left", fontweight="bold")
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
        within[ONCE] = table["first step beyond steady"] - primed
    within["the rest"] = table["first step beyond steady"] - within.sum(axis=1)
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH_IN, 5), sharey=True)
    for axis, parts, title in ((axes[0], table[before], "Before the first step"),
                               (axes[1], within, "In the first step, beyond a steady one")):
        left = np.zeros(len(parts))
        for index, part in enumerate(parts):
            widths = parts[part].clip(lower=0).to_numpy()
            color = COST_COLORS.get(part, "0.5")
            axis.barh(parts.index.astype(str), widths, left=left, label=part, **hatched_area(color, index))
            left += widths
        axis.set(xlabel="time (ms)", title=title)
        axis.grid(axis="y", visible=False)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))
    axes[0].invert_yaxis()
    extra = table["first step beyond steady"]
    contexts = ", ".join(str(context) for context in sorted(set(cold["context_length"])))
    figure.suptitle(f"The first step takes {span(extra, ' ms')} longer than a steady one\n"
                    f"(context {contexts}; {where}; two scales)", x=0.01, ha="left", fontweight="bold")
    return figure
