"""Figures of the attention study; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from stepscope.say.selections import precisions
from stepscope.say.style import MARKERS, PALETTE, WIDTH_IN, use_style
from stepscope.studies.attention.cells import head, implementations, timed
from stepscope.studies.attention.config import ATTENTIONS
from stepscope.studies.attention.facts import untried
from stepscope.studies.attention.facts_time import against_eager
from stepscope.studies.attention.names import NAMES

COLORS = [color for color in PALETTE if color != "#F0E442"]  # yellow is lost as a line on white
STYLES = {name: {"color": color, "marker": marker}
          for name, color, marker in zip(ATTENTIONS, COLORS, MARKERS)}
STYLES["fa4"] = {"color": "0.5", "marker": "*"}
SHORTEST = 256  # shorter sequences are not in the heat map: launching takes as long as they do
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


def _over_sequence(axis, cells: pd.DataFrame, column: str, scale: float = 1.0,
                   interval: bool = False) -> None:
    """A line an implementation over the sequence, both axes logarithmic; whiskers: 95% intervals."""
    for name in implementations(cells):
        rows = cells[cells["implementation"] == name].sort_values("sequence")
        values = rows[column]
        if interval:
            axis.errorbar(rows["sequence"], values / scale, fmt="none", ecolor=STYLES[name]["color"],
                          yerr=[values - rows["pass_ci_low_ms"], rows["pass_ci_high_ms"] - values])
        axis.plot(rows["sequence"], values / scale, label=NAMES[name], linewidth=1.5, markersize=4.5,
                  **STYLES[name])
    axis.set(xscale="log", yscale="log", xlabel="sequence")
    axis.xaxis.set_major_locator(LogLocator(base=4))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.yaxis.set_major_formatter(PLAIN)


def _short(sequence: float) -> str:
    return f"{sequence / 1024:g}k" if sequence >= 1024 else f"{sequence:g}"


def _handles(axes) -> dict:
    """What stands in the legends of several panels, each label once."""
    return {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels())}


def ceiling(cells: pd.DataFrame, where: str) -> Figure | None:
    """Without mask: share of the measured matrix-product rate over the sequence, a panel a precision."""
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
    handles = _handles(axes[0])
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    best = rows.loc[rows.loc[rows["d_model"] == d, "utilisation"].idxmax()]
    figure.suptitle(f"At most {best['utilisation']:.0%} of the product rate: {NAMES[best['implementation']]},"
                    f" {best['precision']}\n(forward + backward without mask, d {d}, {where})",
                    x=0.01, ha="left", fontweight="bold")
    return figure


def speedup(cells: pd.DataFrame, where: str) -> Figure | None:
    """How many times faster than written-out attention, over d and sequence: a row of panels a precision, a
    panel an implementation."""
    rows = timed(cells)
    if rows.empty:
        return None
    both = against_eager(rows[rows["sequence"] >= min(SHORTEST, rows["sequence"].max())])
    others = [name for name in implementations(both) if name != "eager"]
    if not others:
        return None
    use_style()
    shown, heads = precisions(both), sorted(both["d_model"].unique())
    height = 1 + 0.2 * len(shown) * (len(heads) + 1.2)
    figure, axes = plt.subplots(len(shown), len(others), figsize=(WIDTH_IN * 0.85, height), squeeze=False,
                                sharex=True, sharey=True)
    limit = max(both["speedup"].max(), 1 / both["speedup"].min())
    for axis, name in zip(axes[0], others):
        axis.set_title(NAMES[name].replace("SDPA ", "").replace("memory-", ""), fontsize=10)
    for line, precision in zip(axes, shown):
        for axis, name in zip(line, others):
            here = both[(both["precision"] == precision) & (both["implementation"] == name)]
            image = _heat(axis, here, heads, sorted(both["sequence"].unique()), limit)
        line[0].set_ylabel(f"{precision}\nd", fontsize=10)
    figure.colorbar(image, ax=axes, label="x faster", shrink=0.6, format=PLAIN)
    figure.supxlabel("sequence (grey: does not run so" + (", or was not tried)" if untried(cells) else ")"),
                     fontsize=10)
    best = both.loc[both["speedup"].idxmax()]
    figure.suptitle(f"{NAMES[best['implementation']]} is up to {best['speedup']:.0f}x faster than written out"
                    f" ({best['precision']})\n(forward + backward, causal, {where})", x=0.01, ha="left",
                    fontweight="bold")
    return figure


def _heat(axis, rows: pd.DataFrame, heads: list[int], sequences: list[int], limit: float):
    """``speedup`` as colour and number, d down and sequence across; gives the image back for its colorbar."""
    grid = rows.pivot(index="d_model", columns="sequence", values="speedup")
    values = grid.reindex(index=heads, columns=sequences).to_numpy()
    image = axis.imshow(values, norm=LogNorm(1 / limit, limit), cmap="RdBu", aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        axis.text(x, y, _times(value), ha="center", va="center", fontsize=7,
                  color="white" if abs(np.log(value)) > 0.6 * np.log(limit) else "black")
    axis.grid(visible=False)
    axis.set_facecolor("0.93")  # shows where there is no value
    axis.set_xticks(range(len(sequences)), [_short(sequence) for sequence in sequences], fontsize=6.5)
    axis.set_yticks(range(len(heads)), heads, fontsize=8)
    return image


def _times(value: float) -> str:
    if np.isnan(value):
        return ""
    return f"{value:.2f}"[1:] if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
