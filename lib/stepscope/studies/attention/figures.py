"""Figures of the attention study; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from stepscope.say.style import MARKERS, PALETTE, WIDTH_IN, use_style
from stepscope.studies.attention.answers import WORDS, head, names, precisions, timed, untried
from stepscope.studies.attention.config import ATTENTIONS

COLORS = [color for color in PALETTE if color != "#F0E442"]  # yellow is lost as a line on white
STYLES = {name: {"color": color, "marker": marker} for name, color, marker in zip(ATTENTIONS, COLORS, MARKERS)}
SHORTEST = 256  # shorter sequences are not in the heat map: they wait for the host
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def one_run(cells: pd.DataFrame, title: str) -> Figure:
    """One run's causal cells: time of a pass and memory in use before backward, over the sequence."""
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH_IN, 3.6))
    ok = cells[(cells["status"] == "ok") & cells["causal"]]
    for axis, column, scale, label in ((axes[0], "pass_median_ms", 1, "forward and backward (ms)"),
                                       (axes[1], "in_use_bytes", 2**20, "in use before backward (MiB)")):
        _over_sequence(axis, ok, column, scale)
        axis.set(ylabel=label, title=title if axis is axes[0] else "")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _over_sequence(axis, cells: pd.DataFrame, column: str, scale: float = 1.0, interval: bool = False) -> None:
    """A line an implementation over the sequence, both axes logarithmic; whiskers are the median's 95% interval."""
    for name in names(cells):
        own = cells[cells["implementation"] == name].sort_values("sequence")
        if interval:
            axis.errorbar(own["sequence"], own[column] / scale, fmt="none", ecolor=STYLES[name]["color"],
                          yerr=[own[column] - own["pass_ci_low_ms"], own["pass_ci_high_ms"] - own[column]])
        axis.plot(own["sequence"], own[column] / scale, label=WORDS[name], linewidth=1.5, markersize=4.5, **STYLES[name])
    axis.set(xscale="log", yscale="log", xlabel="sequence")
    axis.xaxis.set_major_locator(LogLocator(base=4))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.yaxis.set_major_formatter(PLAIN)


def _short(sequence: float) -> str:
    return f"{sequence / 1024:g}k" if sequence >= 1024 else f"{sequence:g}"


def over_sequence(cells: pd.DataFrame, ends: pd.DataFrame, where: str) -> Figure | None:
    """Causal: time of a pass above and its peak memory below over the sequence, a panel a precision.

    A cross in the strip above a panel is the shortest sequence at which an implementation did not fit; memory that was
    probed beyond the timed sequences is drawn too.
    """
    rows = timed(cells)
    if rows.empty:
        return None
    use_style()
    d, columns = head(rows), precisions(rows)
    memory = "peak_bytes" if "peak_bytes" in rows else "in_use_bytes"  # a CPU's allocator has no peak
    figure, axes = plt.subplots(2, len(columns), figsize=(WIDTH_IN * 0.76, 4.8), squeeze=False, sharey="row", sharex=True)
    for (top, bottom), precision in zip(axes.T, columns):
        own = rows[(rows["d_model"] == d) & (rows["precision"] == precision)]
        _over_sequence(top, own, "pass_median_ms", interval=True)
        probes = ends[(ends["precision"] == precision) & (ends["d_model"] == d) & ~ends["expandable"].astype(bool)] if len(ends) else ends
        fits = probes[(probes["status"] == "ok") & (probes["part"] == "pass")] if len(probes) else probes
        _over_sequence(bottom, pd.concat([own, fits]) if len(fits) else own, memory, 2**30)
        masks = pd.concat([own, probes]).dropna(subset="mask_peak_bytes").sort_values("sequence") if "mask_peak_bytes" in own else own[:0]
        if len(masks):
            bottom.plot(masks["sequence"], masks["mask_peak_bytes"] / 2**30, "--", color=STYLES["flex"]["color"], linewidth=1,
                        label="FlexAttention's mask being made")
        failed = probes[probes["status"] == "oom"] if len(probes) else probes
        for index, name in enumerate(names(failed) if len(failed) else ()):
            where_fails = failed.loc[failed["implementation"] == name, "sequence"].min()
            top.plot(where_fails, 1.07 + 0.075 * index, "X", color=STYLES[name]["color"], markersize=8, clip_on=False,
                     transform=top.get_xaxis_transform())
            for axis in (top, bottom):
                axis.axvline(where_fails, color=STYLES[name]["color"], linestyle=":", linewidth=1)
        if "available_bytes" in own:
            bottom.axhline(own["available_bytes"].iloc[0] / 2**30, color="0.55", linewidth=1.5, label="memory to be had")
        top.set(title=precision, xlabel="")
    axes[0, 0].set_ylabel("time (ms)")
    axes[1, 0].set_ylabel("peak (GiB)" if memory == "peak_bytes" else "in use (GiB)")
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    if len(ends) and (ends["status"] == "oom").any():
        handles["out of memory, at this sequence"] = plt.Line2D([], [], color="0.3", marker="X", linestyle="none", markersize=8)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    figure.suptitle(f"Forward + backward, d {d}, batch {rows['batch_size'].iloc[0]}, causal"
                    f" ({where})", x=0.01, ha="left", fontweight="bold")
    return figure


def ceiling(cells: pd.DataFrame, where: str) -> Figure | None:
    """Without mask: share of the precision's measured matrix-product rate over the sequence, a panel a precision."""
    rows = timed(cells, causal=False)
    if rows.empty or rows["utilisation"].isna().all():
        return None
    use_style()
    d, columns = head(rows), precisions(rows)
    figure, axes = plt.subplots(1, len(columns), figsize=(WIDTH_IN, 3.9), squeeze=False, sharey=True)
    for axis, precision in zip(axes[0], columns):
        _over_sequence(axis, rows[(rows["d_model"] == d) & (rows["precision"] == precision)], "utilisation")
        axis.set(title=precision, yscale="linear")
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0, 0].set_ylim(0, 1.08 * rows.loc[rows["d_model"] == d, "utilisation"].max())
    axes[0, 0].set_ylabel("share of the measured\nmatrix-product rate")
    handles = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    figure.suptitle(f"Forward + backward without mask, d {d} ({where})", x=0.01, ha="left", fontweight="bold")
    return figure


def speedup(cells: pd.DataFrame, where: str) -> Figure | None:
    """How many times as fast as written-out attention, over d and sequence: a row of panels a precision, a panel an
    implementation."""
    rows = timed(cells)
    rows = rows[rows["sequence"] >= min(SHORTEST, rows["sequence"].max())] if len(rows) else rows
    others = [name for name in names(rows) if name != "eager"] if len(rows) else []
    if not others:
        return None
    keys = ["precision", "d_model", "sequence"]
    eager = rows[rows["implementation"] == "eager"][[*keys, "pass_median_ms"]]
    both = rows.merge(eager, on=keys, suffixes=("", "_eager"))
    both["speedup"] = both["pass_median_ms_eager"] / both["pass_median_ms"]
    use_style()
    shown, heads, sequences = precisions(both), sorted(both["d_model"].unique()), sorted(both["sequence"].unique())
    figure, axes = plt.subplots(len(shown), len(others),
                                figsize=(WIDTH_IN * 0.85, 1 + 0.2 * len(shown) * (len(heads) + 1.2)), squeeze=False,
                                sharex=True, sharey=True)
    limit, first = max(both["speedup"].max(), 1 / both["speedup"].min()), axes[0, 0]
    for line, precision in zip(axes, shown):
        for axis, name in zip(line, others):
            if line[0] is first:
                axis.set_title(WORDS[name].replace("SDPA ", "").replace("memory-", ""), fontsize=10)
            own = both[(both["precision"] == precision) & (both["implementation"] == name)]
            grid = own.pivot(index="d_model", columns="sequence", values="speedup").reindex(index=heads, columns=sequences)
            image = axis.imshow(grid.to_numpy(), norm=LogNorm(1 / limit, limit), cmap="RdBu", aspect="auto")
            for (y, x), value in np.ndenumerate(grid.to_numpy()):
                text = "" if np.isnan(value) else f"{value:.2f}"[1:] if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
                axis.text(x, y, text, ha="center", va="center", fontsize=7,
                          color="white" if abs(np.log(value)) > 0.6 * np.log(limit) else "black")
            axis.grid(visible=False)
            axis.set_facecolor("0.93")  # shows where there is no value
            axis.set_xticks(range(len(sequences)), [_short(sequence) for sequence in sequences], fontsize=6.5)
            axis.set_yticks(range(len(heads)), heads, fontsize=8)
        line[0].set_ylabel(f"{precision}\nd", fontsize=10)
    figure.colorbar(image, ax=axes, label="times as fast", shrink=0.6, format=PLAIN)
    figure.supxlabel("sequence (grey: does not run so" + (", or was not tried)" if untried(cells) else ")"), fontsize=10)
    figure.suptitle(f"Forward + backward against written out, causal ({where})", x=0.01, ha="left", fontweight="bold")
    return figure
