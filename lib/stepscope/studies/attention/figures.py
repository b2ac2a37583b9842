"""Figures of the attention study; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from stepscope.say.formats import gain, ms, positions, precision
from stepscope.say.selections import precisions
from stepscope.say.style import MARKERS, PALETTE, WIDTH_IN, ink_on, use_style
from stepscope.studies.attention.cells import head, implementations, timed
from stepscope.studies.attention.config import ATTENTIONS
from stepscope.studies.attention.facts import untried
from stepscope.studies.attention.facts_time import against_eager
from stepscope.studies.attention.names import NAMES

COLORS = [color for color in PALETTE if color != "#F0E442"]  # yellow is lost as a line on white
STYLES = {name: {"color": color, "marker": marker}
          for name, color, marker in zip(ATTENTIONS, COLORS, MARKERS)}
STYLES["fa4"] = {"color": "0.5", "marker": "*"}
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def one_run(cells: pd.DataFrame, where: str) -> Figure:
    """One run's causal cells: time of a pass and memory in use before backward, over the sequence."""
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH_IN, 3.6))
    ok = cells[(cells["status"] == "ok") & cells["causal"]]
    for axis, column, scale, label in ((axes[0], "pass_median_ms", 1, "forward and backward (ms)"),
                                       (axes[1], "in_use_bytes", 2**20, "in use before backward (MiB)")):
        _over_sequence(axis, ok, column, scale)
        axis.set(ylabel=label)
        axis.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    title = "Nothing could be timed"
    if len(last := ok[ok["sequence"] == ok["sequence"].max()]):
        best = last.loc[last["pass_median_ms"].idxmin()]
        title = (f"{NAMES[best['implementation']]} is fastest at sequence {best['sequence']}:"
                 f" {ms(best['pass_median_ms'])}")
    figure.suptitle(f"{title}\n({where})", x=0.01, ha="left", fontweight="bold")
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
    figure, axes = plt.subplots(1, len(columns), figsize=(WIDTH_IN, 4.8), squeeze=False, sharey=True)
    for axis, name in zip(axes[0], columns):
        _over_sequence(axis, rows[(rows["d_model"] == d) & (rows["precision"] == name)], "utilisation")
        axis.set(title=precision(name), yscale="linear")
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0, 0].set_ylim(0, 1.08 * rows.loc[rows["d_model"] == d, "utilisation"].max())
    axes[0, 0].set_ylabel("share of the measured\nmatrix-product rate")
    handles = _handles(axes[0])
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    best = rows.loc[rows.loc[rows["d_model"] == d, "utilisation"].idxmax()]
    figure.suptitle(f"At most {best['utilisation']:.0%} of the product rate: {NAMES[best['implementation']]},"
                    f" {precision(best['precision'])}\n(forward + backward without mask, d {d}, {where})",
                    x=0.01, ha="left", fontweight="bold")
    return figure


def speedup(cells: pd.DataFrame, where: str) -> Figure | None:
    """How many times faster than written-out attention at the longest sequence: d down, a column an
    implementation, a panel a precision; in shorter ones the host sets the time."""
    rows = timed(cells)
    if rows.empty:
        return None
    both = against_eager(rows[rows["sequence"] == rows["sequence"].max()])
    others = [name for name in implementations(both) if name != "eager"]
    if not others:
        return None
    use_style()
    shown, heads = precisions(both), sorted(both["d_model"].unique())
    figure, axes = plt.subplots(len(shown), 1, figsize=(WIDTH_IN, 1.6 + 0.36 * len(shown) * (len(heads) + 1)),
                                squeeze=False, sharex=True)
    limit = max(both["speedup"].max(), 1 / both["speedup"].min())
    for axis, name in zip(axes[:, 0], shown):
        own = both[both["precision"] == name]
        grid = own.pivot(index="d_model", columns="implementation", values="speedup")
        _heat(axis, grid.reindex(index=heads, columns=others), limit)
        axis.set_ylabel(f"{precision(name)}\nd")
    axes[0, 0].xaxis.tick_top()
    axes[0, 0].tick_params(axis="x", labeltop=True, length=0)
    heads_of = [NAMES[name].replace("SDPA ", "SDPA\n").replace("memory-", "memory-\n") for name in others]
    axes[0, 0].set_xticks(range(len(others)), heads_of)
    for axis in axes[1:, 0]:
        axis.tick_params(axis="x", top=False, bottom=False, labelbottom=False)
    best = both.loc[both["speedup"].idxmax()]
    figure.suptitle(f"{NAMES[best['implementation']]} is up to {best['speedup']:.0f}x faster than written out"
                    f" ({precision(best['precision'])})\n(sequence {positions(best['sequence'])}, forward +"
                    f" backward, causal, {where};\ngrey: does not run so"
                    + (", or was not tried)" if untried(cells) else ")"),
                    x=0.01, ha="left", fontweight="bold")
    return figure


def _heat(axis, grid: pd.DataFrame, limit: float) -> None:
    """How many times faster, as colour and number, d down and implementations across."""
    image = axis.imshow(grid.to_numpy(), norm=LogNorm(1 / limit, limit), cmap="RdBu", aspect="auto")
    for (y, x), value in np.ndenumerate(grid.to_numpy()):
        if np.isfinite(value):
            axis.text(x, y, gain(value, 2), ha="center", va="center", fontsize=13,
                      color=ink_on(image.cmap(image.norm(value))))
    axis.grid(visible=False)
    axis.set_facecolor("0.93")  # shows where there is no value
    axis.set_yticks(range(len(grid)), grid.index)
