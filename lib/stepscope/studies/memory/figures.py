"""Figures of the memory study, each one call over tidy tables; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepscope.config import PHASE_NAMES
from stepscope.say import formats
from stepscope.say.formats import MODE_WORDS, number
from stepscope.say.style import MARKERS, PALETTE, PRECISION_COLORS, WIDTH_IN, use_style
from stepscope.studies.memory.facts import GIB, matrix
from stepscope.studies.memory.facts_checkpoints import stacked_blocks
from stepscope.studies.memory.facts_options import curve

COLORS = {"parameters": "#0072B2", "optimizer state": "#E69F00", "gradients": "#009E73",
          "cuBLAS workspace": "#000000", "other": "#999999", "autocast copies": "#F0E442",
          "activations": "#56B4E9", "temporaries": "#D55E00"}
HEADING = {"x": 0.01, "ha": "left", "fontsize": 12, "fontweight": "bold"}
MOSTLY = 0.8  # of the peak: where parameters alone are more, the axis begins near them
NEAR_FULL = 0.7  # of the GPU's memory: where predictions come so near, it is drawn


def stacked(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Live bytes by category after each event: an array (categories of :data:`COLORS`, events + 1); and their
    sum."""
    freed = table.dropna(subset="freed_at")
    events = int(max(table["allocated_at"].max(), freed["freed_at"].max() if len(freed) else 0)) + 2
    live = np.zeros((len(COLORS), events))
    place = {category: row for row, category in enumerate(COLORS)}
    for change, group, event in ((np.add, table, "allocated_at"), (np.subtract, freed, "freed_at")):
        rows = group["category"].map(place).to_numpy(dtype=int)
        change.at(live, (rows, group[event].to_numpy(dtype=int) + 1), group["size"].to_numpy())
    live = live.cumsum(axis=1)
    return live, live.sum(axis=0)


def bounds(table: pd.DataFrame, step: int) -> dict[str, tuple[int, int]]:
    """First event of each phase of a step, and the event after its last: by phase, in order."""
    rows = table[(table["step"] == step) & table["phase"].isin(PHASE_NAMES)]
    names = [phase for phase in PHASE_NAMES if phase in set(rows["phase"])]
    starts = rows.groupby("phase")["allocated_at"].min().reindex(names)
    later = table.loc[(table["step"] > step) & table["phase"].isin(PHASE_NAMES), "allocated_at"]
    last = int(rows["allocated_at"].max()) + 1
    if len(later):
        end = min(int(later.min()), last + len(rows))
    else:
        end = min(last + len(rows) // 2, int(table["freed_at"].max()) + 1)
    edges = [*starts.astype(int), max(end, last)]
    return {phase: (first, after) for phase, first, after in zip(starts.index, edges, edges[1:])}


def steps_of(table: pd.DataFrame) -> list[int]:
    return sorted(table.loc[table["phase"].isin(PHASE_NAMES), "step"].unique().tolist())


def timeline(table: pd.DataFrame, title: str) -> Figure:
    """Live memory by category over the allocator's events, the first step beside the last, phases marked,
    peaks labelled."""
    use_style()
    live, total = stacked(table)
    steps = steps_of(table)
    steps = [steps[0], steps[-1]] if len(steps) > 1 else steps
    figure, axes = plt.subplots(1, len(steps), figsize=(WIDTH_IN, 4.4), sharey=True, squeeze=False)
    for axis, step in zip(axes[0], steps):
        _one_step(axis, bounds(table, step), live, total)
        which = "the first step" if step == steps[0] and len(steps) > 1 else "a steady step"
        axis.set_xlabel(f"allocations and frees of {which}")
        axis.margins(x=0)
        axis.grid(axis="x", visible=False)
    top, floor = total.max() / GIB, live[0].max() / GIB
    bottom = floor - 0.2 * (top - floor) if floor > MOSTLY * top else 0
    begins = f"; begins at {bottom:.1f}" if bottom else ""
    axes[0][0].set_ylabel(f"live memory asked for (GiB{begins})")
    axes[0][0].set_ylim(bottom, top + 0.1 * (top - bottom))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    figure.suptitle(title, **HEADING)
    return figure


def _one_step(axis: Axes, phases: dict[str, tuple[int, int]], live: np.ndarray, total: np.ndarray) -> None:
    """The categories of one step stacked, its phases marked and its peak labelled."""
    first, end = next(iter(phases.values()))[0], list(phases.values())[-1][1]
    used = [row for row in range(len(COLORS)) if live[row].any()]
    x = np.arange(first, end + 1)
    names = [list(COLORS)[row] for row in used]
    axis.stackplot(x - first, live[used][:, first:end + 1] / GIB, colors=[COLORS[name] for name in names],
                   step="post", labels=names, linewidth=0, rasterized=True)
    for phase, (begin, after) in phases.items():
        if after - begin > 0.04 * (end - first):
            axis.axvline(begin - first, color="0.3", linewidth=0.8, linestyle=":")
            axis.text(begin - first, 1.005, f" {phase}", transform=axis.get_xaxis_transform(), fontsize=9,
                      va="bottom")
    top, at = total[first:end + 1].max() / GIB, int(total[first:end + 1].argmax())
    side = "left" if at < 0.15 * (end - first) else "right" if at > 0.85 * (end - first) else "center"
    axis.annotate(f"{top:.2f} GiB", (at, top), xytext=(0, 5), textcoords="offset points", fontsize=10,
                  ha=side, fontweight="bold")
    axis.plot([at], [top], "v", color="black", markersize=5)


def peaks(runs: pd.DataFrame, where: str) -> Figure | None:
    """Peak over context by mode and precision: points measured, lines predicted; what did not fit is hollow,
    at its prediction."""
    runs = matrix(runs)
    if runs.empty:
        return None
    use_style()
    modes = [mode for mode in ("forward", "step") if (runs["mode"] == mode).any()]
    figure, axes = plt.subplots(1, len(modes), figsize=(WIDTH_IN, 3.8), squeeze=False)
    contexts = sorted(runs["context_length"].unique())
    for axis, mode in zip(axes[0], modes):
        _peaks_of(axis, runs[runs["mode"] == mode])
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, contexts)
        title = "forward alone" if mode == "forward" else "full step"
        axis.set(xlabel="context", ylabel="peak allocated (GiB)", title=title)
        axis.set_ylim(0)
    handles = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside right center")
    figure.suptitle(f"{_peaks_title(runs, modes[-1])}\n({runs['size'].iloc[0]}, batch"
                    f" {runs['batch_size'].iloc[0]}, {where}; each kind of run to its own scale)", **HEADING)
    return figure


def _peaks_title(runs: pd.DataFrame, mode: str) -> str:
    """The peak at the shortest context and at the longest, or that the longest does not fit."""
    rows = runs[runs["mode"] == mode].sort_values("context_length")
    words, first, last = MODE_WORDS[mode], rows.iloc[0], rows.iloc[-1]
    peak = f"{number(first['predicted_mib'] / 1024)} GiB at context {first['context_length']}"
    if last["status"] == "oom":
        return f"{words.capitalize()}: {peak}, out of memory at {last['context_length']}"
    longest_gib = number(last["predicted_mib"] / 1024)
    return f"{words.capitalize()}: {peak}, {longest_gib} at {last['context_length']}"


def _peaks_of(axis: Axes, runs: pd.DataFrame) -> None:
    """The peaks of one mode by precision, and the GPU's memory where they come near it."""
    by_precision = runs.sort_values("precision", ascending=False).groupby("precision", sort=False)
    for (precision, rows), marker in zip(by_precision, MARKERS):
        color = PRECISION_COLORS[precision]
        rows = rows.sort_values("context_length")
        axis.plot(rows["context_length"], rows["predicted_mib"] / 1024, "-", color=color, linewidth=1,
                  label=f"{precision}, predicted")
        ok, oom = rows[rows["status"] == "ok"], rows[rows["status"] == "oom"]
        measured_mib = ok.get("steady_peak_allocated_mib", ok["predicted_mib"])
        axis.plot(ok["context_length"], measured_mib / 1024, marker, color=color,
                  label=f"{precision}, measured")
        axis.plot(oom["context_length"], oom["predicted_mib"] / 1024, marker, color=color,
                  markerfacecolor="white", label=f"{precision}, out of memory" if len(oom) else None)
    memory = runs["gpu_memory_mib"].dropna()
    if len(memory) and runs["predicted_mib"].max() > NEAR_FULL * memory.iloc[0]:
        axis.axhline(memory.iloc[0] / 1024, color="0.3", linestyle=":")
        axis.text(0.02, memory.iloc[0] / 1024, "the GPU's memory", transform=axis.get_yaxis_transform(),
                  va="bottom", fontsize=9)


def checkpoints(settings: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame,
                where: str) -> Figure | None:
    """Peak, measured and predicted, and step time over blocks per checkpoint; dashed: without checkpoints."""
    rows = curve(settings, runs, samples)
    if rows.empty:
        return None
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH_IN, 3.6))
    group, none = rows[rows["blocks"] > 0], rows[rows["blocks"] == 0]
    ok, fitted_none = group[group["status"] == "ok"], none[none["status"] == "ok"]
    on_gpu = ok["peak_mib"].notna().any()
    axes[0].plot(group["blocks"], group["predicted_mib"] / 1024, "-", color=PALETTE[1], label="predicted")
    if on_gpu:
        axes[0].plot(ok["blocks"], ok["peak_mib"] / 1024, "o", color=PALETTE[0], label="measured")
    axes[1].plot(ok["blocks"], ok["time_ms"], "o-", color=PALETTE[0], label="measured")
    peak = "peak_mib" if on_gpu else "predicted_mib"
    for axis, column, scale in ((axes[0], peak, 1024), (axes[1], "time_ms", 1)):
        if len(fitted_none):
            axis.axhline(fitted_none[column].iloc[0] / scale, color="0.3", linestyle="--",
                         label="no checkpoints")
        axis.set_xscale("log", base=2)
        axis.set_xticks(group["blocks"], group["blocks"])
        axis.set_ylim(0, axis.get_ylim()[1] * 1.05)
        axis.set_xlabel("blocks per checkpoint")
        axis.legend(loc="lower right")
        axis.minorticks_off()
    axes[0].set(ylabel="peak allocated (GiB)", title="memory")
    axes[1].set(ylabel="step (ms)", title="time")
    row = rows.iloc[0]
    shape = f"{row['size']}, context {row['context_length']}, {MODE_WORDS[row['mode']]}, {row['precision']}"
    figure.suptitle(f"{_checkpoints_title(group, none, peak)}\n({shape}, {where})", **HEADING)
    return figure


def _checkpoints_title(group: pd.DataFrame, none: pd.DataFrame, peak: str) -> str:
    """Where the least memory is, and what it saves and costs against no checkpoints."""
    least = group.loc[group[peak].idxmin()]
    words = f"Least memory with {formats.count(int(least['blocks']), 'block')} per checkpoint"
    fitted = none[none["status"] == "ok"]
    if fitted.empty:
        return words
    without = fitted.iloc[0]
    longer = least["time_ms"] / without["time_ms"] - 1
    return (f"{words}: {formats.percent(1 - least[peak] / without[peak])} less than without,"
            f" for {formats.percent(abs(longer))} {'more' if longer > 0 else 'less'} time")


def nested(stacks: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame, where: str) -> Figure:
    """Memory beyond the state and time of a step over the number of blocks, a line an arrangement of
    checkpoints (out of memory: a gap); without a GPU's peaks, what is kept by formula."""
    rows = stacked_blocks(stacks, runs, samples)
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH_IN, 4.2))
    on_gpu = rows["beyond_mib"].notna().any()
    numbers, column = sorted(rows["blocks"].unique()), "beyond_mib" if on_gpu else "kept_mib"
    for (name, group), color, marker in zip(rows.groupby("arrangement", sort=False), PALETTE, MARKERS):
        ok = group[group["status"] == "ok"]
        axes[0].plot(ok["blocks"], ok[column] / 1024, f"{marker}-",
                     color=color, label=name)
        axes[1].plot(ok["blocks"], ok["time_ms"], f"{marker}-", color=color)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_xticks(numbers, numbers)
        axis.minorticks_off()
        axis.set_xlabel("blocks")
    axes[0].set(ylabel="GiB", title="memory beyond the state" if on_gpu else "memory kept, by formula")
    axes[1].set(ylabel="ms", title="forward + backward")
    figure.legend(loc="outside lower center", ncols=5, title="checkpoints")
    run = runs.set_index("run_id").loc[rows["run_id"].iloc[0]]
    last = rows[rows["blocks"] == numbers[-1]].set_index("arrangement")
    sizes = [f"{last[column].get(name, np.nan) / 1024:.2g} GiB {words}" for name, words in
             (("none", "without checkpoints"), ("every block", "with one a block"), ("halved", "halved"))]
    figure.suptitle(f"{numbers[-1]} blocks: {', '.join(sizes)}\n({run['size']}, context "
                    f"{run['context_length']}, {formats.precision(run['precision'])}, {where})", **HEADING)
    return figure
